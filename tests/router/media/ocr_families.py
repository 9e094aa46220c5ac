"""Families that read pages: their settings, and names of their processors."""

from __future__ import annotations

from tests.router.media.layout_family import INTERNVL, Family

_CUT = {"size": {"height": 64, "width": 64}, "max_patches": 6}
_PAGE = {"size": {"height": 1024, "width": 1024}}
HUNYUAN = {
    "image_token": "<\uff5chy_place▁holder▁no▁102\uff5c>",
    "image_start_token": "<\uff5chy_place▁holder▁no▁100\uff5c>",
    "image_end_token": "<\uff5chy_place▁holder▁no▁101\uff5c>",
}
_GOT = {"image_token": "<imgpad>", "begin": "<img>", "end": "</img>"}

OCR_FAMILIES = {
    "deepseek_ocr2": Family(
        "deepseek_ocr2", "DeepseekOcr2ImageProcessorPil", "DeepseekOcr2Processor"
    ),
    "deepseek_ocr2/few": Family(
        "deepseek_ocr2", "DeepseekOcr2ImageProcessorPil", "DeepseekOcr2Processor",
        pixels={"size": {"height": 256, "width": 256}, "tile_size": 192, "max_patches": 4},
        options={"patch_size": 8, "downsample_ratio": 2},
    ),
    "got_ocr2": Family(
        "got_ocr2", "GotOcr2ImageProcessorPil", "GotOcr2Processor", pixels=_PAGE, tokens=_GOT
    ),
    "got_ocr2/tiles": Family(  # which its processor does not make, whatever is said
        "got_ocr2", "GotOcr2ImageProcessorPil", "GotOcr2Processor",
        pixels={**_PAGE, "crop_to_patches": True, "max_patches": 4}, tokens=_GOT,
    ),
    "granite_docling": Family(
        "granite_docling", "GraniteDoclingImageProcessorPil", "GraniteDoclingProcessor"
    ),
    "granite_docling/dense": Family(
        "granite_docling", "GraniteDoclingImageProcessorPil", "GraniteDoclingProcessor",
        pixels={
            **{"size": {"height": 64, "width": 64}, "max_patches": 6, "dense_max_patches": 20},
            **{"dense_max_scale": 0.9, "dense_min_aspect": 1.2, "dense_max_aspect": 3.0},
        },
        options={"image_seq_len": 5},
    ),
    "granite_docling/whole": Family(
        "granite_docling", "GraniteDoclingImageProcessorPil", "GraniteDoclingProcessor",
        pixels={"crop_to_patches": False, "dense_max_patches": 20, "dense_min_aspect": 0.5},
        options={"image_seq_len": 5},
    ),
    "hunyuan_vl": Family(
        "hunyuan_vl", "HunYuanVLImageProcessorPil", "HunYuanVLProcessor", tokens=HUNYUAN
    ),
    "hunyuan_vl/small": Family(
        "hunyuan_vl", "HunYuanVLImageProcessorPil", "HunYuanVLProcessor", tokens=HUNYUAN,
        pixels={"min_pixels": 3136, "max_pixels": 40_000, "patch_size": 8},
    ),
    "hunyuan_vl/sides": Family(
        "hunyuan_vl", "HunYuanVLImageProcessorPil", "HunYuanVLProcessor", tokens=HUNYUAN,
        pixels={"size": {"shortest_edge": 10_000, "longest_edge": 90_000}, "merge_size": 3},
    ),
    "qianfan_ocr": Family(
        "got_ocr2", "GotOcr2ImageProcessorPil", "QianfanOCRProcessor", pixels=_CUT,
        options={"image_seq_length": 4}, tokens=INTERNVL,
    ),
    "unlimited_ocr": Family("unlimited_ocr", "UnlimitedOcr", "UnlimitedOcrProcessor"),
    "unlimited_ocr/few": Family(
        "unlimited_ocr", "UnlimitedOcr", "UnlimitedOcrProcessor",
        pixels={"size": {"height": 200, "width": 200}, "tile_size": 128, "max_patches": 5},
        options={"patch_size": 8},
    ),
}  # fmt: skip
