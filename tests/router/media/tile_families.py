"""Families that cut images into tiles: their settings, and names of their processors."""

from __future__ import annotations

from tests.router.media.layout_family import INTERNVL, QWEN, Family

CUT = {"size": {"height": 64, "width": 64}, "max_patches": 6}
COHERE = {
    "image_token": "<|IMG_PATCH|>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
AYA = {**COHERE, **{f"tile_{i}": f"TILE_{i}" for i in range(1, 7)}, "whole": "TILE_GLOBAL"}
LLAMA4 = {
    **{"begin": "<|image_start|>", "end": "<|image_end|>", "image_token": "<|image|>"},
    **{"patch": "<|patch|>", "x": "<|tile_x_separator|>", "y": "<|tile_y_separator|>"},
}
LFM2 = {
    **{"image_token": "<image>", "image_start_token": "<|image_start|>"},
    **{"image_end_token": "<|image_end|>", "image_thumbnail_token": "<|img_thumbnail|>"},
    **{f"at_{r}_{c}": f"<|img_row_{r}_col_{c}|>" for r in range(1, 11) for c in range(1, 11)},
}
MINICPM = {
    **QWEN,
    **{"image_start_token": "<image>", "image_end_token": "</image>"},
    **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
    **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
}
SEEN = {"image_token": "<|image|>", "video_token": "<|video|>"}
OVIS = {
    **{"atom": "<IMG_ATOM>", "begin": "<IMG_START>", "grid": "<IMG_GRID>", "column": "<IMG_COL>"},
    **{"row": "<IMG_ROW>", "end": "<IMG_END>", "image_token": "<image>"},
}
STEP = {
    **{"image_token": "<im_patch>", "begin": "<im_start>", "end": "<im_end>"},
    **{"window": "<patch_start>", "window_end": "<patch_end>", "row_end": "<patch_newline>"},
}

TILE_FAMILIES = {
    "aya_vision": Family(
        "got_ocr2", "GotOcr2ImageProcessorPil", "AyaVisionProcessor", pixels=CUT,
        options={"patch_size": 14, "img_size": 56, "downsample_factor": 2}, tokens=AYA,
    ),
    "cohere2_vision": Family(
        "cohere2_vision", "Cohere2Vision", "Cohere2VisionProcessor",
        pixels={**CUT, "patch_size": 2}, tokens=COHERE,
    ),
    "internvl": Family(
        "got_ocr2", "GotOcr2ImageProcessorPil", "InternVLProcessor", pixels=CUT,
        options={"image_seq_length": 4}, tokens=INTERNVL,
    ),
    "internvl/one": Family(
        "got_ocr2", "GotOcr2ImageProcessorPil", "InternVLProcessor",
        pixels={**CUT, "max_patches": 1}, options={"image_seq_length": 4}, tokens=INTERNVL,
    ),
    "llama4": Family(
        "llama4", "Llama4", "Llama4Processor", options={"patch_size": 112}, tokens=LLAMA4
    ),
    "llama4/largest": Family(
        "llama4", "Llama4", "Llama4Processor", pixels={**CUT, "resize_to_max_canvas": True},
        options={"patch_size": 16, "pixel_shuffle_ratio": 1}, tokens=LLAMA4,
    ),
    "lfm2_vl": Family("lfm2_vl", "Lfm2Vl", "Lfm2VlProcessor", tokens=LFM2),
    "lfm2_vl/few": Family(
        "lfm2_vl", "Lfm2Vl", "Lfm2VlProcessor", tokens=LFM2,
        pixels={
            **{"encoder_patch_size": 8, "tile_size": 64, "max_image_tokens": 9, "max_tiles": 3},
            **{"min_image_tokens": 2, "max_pixels_tolerance": 1.5, "use_thumbnail": False},
        },
    ),
    "lfm2_vl/whole": Family(
        "lfm2_vl", "Lfm2Vl", "Lfm2VlProcessor", tokens=LFM2, pixels={"do_image_splitting": False}
    ),
    "minicpmv4_6": Family(
        "minicpmv4_6", "MiniCPMV4_6ImageProcessorPil", "MiniCPMV4_6Processor", tokens=MINICPM
    ),
    "minicpmv4_6/small": Family(
        "minicpmv4_6", "MiniCPMV4_6ImageProcessorPil", "MiniCPMV4_6Processor", tokens=MINICPM,
        config={"downsample_mode": "4x"},
        pixels={
            **{"scale_resolution": 100, "patch_size": 8, "max_slice_nums": 5},
            **{"downsample_mode": "4x", "use_image_id": False},
        },
    ),
    "minicpmv4_6/whole": Family(
        "minicpmv4_6", "MiniCPMV4_6ImageProcessorPil", "MiniCPMV4_6Processor", tokens=MINICPM,
        pixels={"slice_mode": False},
    ),
    "minicpmv4_7": Family(
        "minicpmv4_6", "MiniCPMV4_6ImageProcessorPil", "MiniCPMV4_7Processor", tokens=MINICPM
    ),
    "minicpm_ocr": Family("minicpm_ocr", "MiniCPMOcr", "MiniCPMOcrProcessor", tokens=MINICPM),
    "step3p7": Family("step3p7", "Step3p7", "Step3p7Processor", tokens=STEP),
    "step3p7/small": Family(
        "step3p7", "Step3p7", "Step3p7Processor", tokens=STEP,
        pixels={
            **{"size": {"height": 112, "width": 112}, "patch_size": 60, "max_image_size": 700},
            **{"vision_patch_size": 7, "downsampler_stride": 2},
        },
    ),
    "ovis2": Family(
        "ovis2", "Ovis2ImageProcessorPil", "Ovis2Processor",
        pixels={"crop_to_patches": True}, options={"image_seq_length": 5}, tokens=OVIS,
    ),
    "ovis2/nearest": Family(
        "ovis2", "Ovis2ImageProcessorPil", "Ovis2Processor", tokens=OVIS,
        pixels={"crop_to_patches": True, "use_covering_area_grid": False, "max_patches": 6},
    ),
    "ovis2/whole": Family("ovis2", "Ovis2ImageProcessorPil", "Ovis2Processor", tokens=OVIS),
    "perception_lm": Family(
        "perception_lm", "PerceptionLM", "PerceptionLMProcessor",
        options={"patch_size": 14}, tokens=SEEN,
    ),
    "perception_lm/few": Family(
        "perception_lm", "PerceptionLM", "PerceptionLMProcessor",
        pixels={"tile_size": 64, "max_num_tiles": 5},
        options={"patch_size": 8, "pooling_ratio": 1}, tokens=SEEN,
    ),
    "perception_lm/whole": Family(
        "perception_lm", "PerceptionLM", "PerceptionLMProcessor",
        pixels={"vision_input_type": "vanilla"}, options={"patch_size": 14}, tokens=SEEN,
    ),
}  # fmt: skip
