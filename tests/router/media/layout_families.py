"""Settings of families that see images, as their files have them, and names of their processors."""

from __future__ import annotations

from tests.router.media.layout_family import QWEN, Family
from tests.router.media.ocr_families import OCR_FAMILIES
from tests.router.media.tile_families import TILE_FAMILIES

CLIP = {"vision_config": {"image_size": 336, "patch_size": 14}}
CLIP_PIXELS = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
CLIP_OPTIONS = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
GEMMA3 = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
AUDIO = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<a|>"}
GEMMA4 = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
TILES = {"image_size": 364, "patch_size": 14}
KIMI = {"image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>"}
MINIMAX = {
    **{"image_token": "]<]image[>[", "video_token": "]<]video[>["},
    **{"begin": "]<]start of image[>[", "end": "]<]end of image[>["},
}
MUSE = {
    **{"image_token": "<|patch|>", "video_token": "<|video|>"},
    **{"begin": "<|image_start|>", "end": "<|image_end|>"},
}
PHI4 = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
NEMOTRON = {
    **{"image_token": "<image>", "begin": "<img>", "end": "</img>", "video_token": "<video>"},
    "audio_token": "<so_embedding>",
}
FAMILIES = {
    **OCR_FAMILIES,
    **TILE_FAMILIES,
    "lfm3_vl": Family(
        "qwen2_vl", "Qwen2VLImageProcessorPil", "Lfm3VlProcessor",
        pixels={"min_pixels": 4096, "max_pixels": 500_000, "patch_size": 16}, tokens=QWEN,
    ),
    "llava": Family(
        "llava", "LlavaImageProcessorPil", "LlavaProcessor", CLIP, CLIP_PIXELS, CLIP_OPTIONS
    ),
    "llava_next": Family(
        "llava_next", "LlavaNextImageProcessorPil", "LlavaNextProcessor", CLIP,
        {**CLIP_PIXELS, "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336]]},
        CLIP_OPTIONS,
    ),
    "llava_next/full": Family(
        "llava_next", "LlavaNextImageProcessorPil", "LlavaNextProcessor", CLIP, CLIP_PIXELS,
        {**CLIP_OPTIONS, "vision_feature_select_strategy": "full"},
    ),
    "granite4_vision": Family(
        "llava_next", "LlavaNextImageProcessorPil", "Granite4VisionProcessor", CLIP, CLIP_PIXELS,
        {"patch_size": 14, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
    ),
    "granite4_vision/odd": Family(
        "llava_next", "LlavaNextImageProcessorPil", "Granite4VisionProcessor",
        pixels={
            "size": {"height": 64, "width": 64}, "crop_size": {"height": 64, "width": 64},
            "image_grid_pinpoints": [[64, 128], [128, 64], [192, 64]],
        },
        options={
            **{"patch_size": 6, "vision_feature_select_strategy": "default"},
            **{"num_additional_image_tokens": 1, "downsample_rate": "3/8"},
        },
    ),
    "llava_onevision": Family(
        "llava_onevision", "LlavaOnevisionImageProcessorPil", "LlavaOnevisionProcessor",
        {"vision_config": {"patch_size": 14}},
        options={"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
        tokens={"image_token": "<image>", "video_token": "<video>"},
    ),
    "llava_onevision/few": Family(
        "llava_onevision", "LlavaOnevisionImageProcessorPil", "LlavaOnevisionProcessor",
        {"vision_config": {"patch_size": 8}, "vision_aspect_ratio": "anyres_max_2"},
        {
            "size": {"height": 64, "width": 64},
            "image_grid_pinpoints": [[64, 64], [64, 128], [128, 64], [128, 128], [192, 64]],
        },
        {
            **{"num_image_tokens": 64, "vision_feature_select_strategy": "default"},
            "vision_aspect_ratio": "anyres_max_2",
        },
        {"image_token": "<image>", "video_token": "<video>"},
    ),
    "idefics": Family("idefics", "IdeficsImageProcessorPil", "IdeficsProcessor"),
    "idefics2": Family("idefics2", "Idefics2ImageProcessorPil", "Idefics2Processor"),
    "idefics2/split": Family(
        "idefics2", "Idefics2ImageProcessorPil", "Idefics2Processor",
        pixels={"do_image_splitting": True}, options={"image_seq_len": 7},
    ),
    "idefics3": Family(
        "idefics3", "Idefics3ImageProcessorPil", "Idefics3Processor",
        {"vision_config": TILES, "scale_factor": 2}, options={"image_seq_len": 169},
    ),
    "smolvlm": Family(
        "idefics3", "Idefics3ImageProcessorPil", "Idefics3Processor",
        {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        {"image_seq_len": 64},
    ),
    "smolvlm/whole": Family(
        "idefics3", "Idefics3ImageProcessorPil", "Idefics3Processor",
        {"vision_config": TILES}, {"do_image_splitting": False}, {"image_seq_len": 5},
    ),
    "pixtral": Family(
        "pixtral", "PixtralImageProcessorPil", "PixtralProcessor",
        {"vision_config": {"model_type": "pixtral", "patch_size": 16}},
        {"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}},
        {"patch_size": 16}, {"image_token": "[IMG]"},
    ),
    "mistral3": Family(
        "pixtral", "PixtralImageProcessorPil", "PixtralProcessor",
        {"vision_config": {"model_type": "pixtral", "patch_size": 14}, "spatial_merge_size": 2},
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 2}, {"image_token": "[IMG]"},
    ),
    "mistral_large4": Family(
        "pixtral", "PixtralImageProcessorPil", "PixtralProcessor",
        {"vision_config": {"model_type": "pixtral", "patch_size": 14}, "spatial_merge_size": 2},
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
        {"patch_size": 14, "spatial_merge_size": 2}, {"image_token": "[IMG]"},
    ),
    "qwen2_vl": Family(
        "qwen2_vl", "Qwen2VLImageProcessorPil", "Qwen2VLProcessor",
        pixels={"min_pixels": 3136, "max_pixels": 1_003_520}, tokens=QWEN,
    ),
    "qwen2_5_omni_thinker": Family(
        "qwen2_vl", "Qwen2VLImageProcessorPil", "Qwen2_5OmniProcessor",
        pixels={"min_pixels": 3136, "max_pixels": 1_003_520},
        tokens={
            **{"image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "audio_token": "<|AUDIO|>"},
            **{"vision_bos_token": "<|vision_bos|>", "vision_eos_token": "<|vision_eos|>"},
            **{"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
        },
    ),
    "qwen3_vl": Family(
        "qwen2_vl", "Qwen2VLImageProcessorPil", "Qwen2VLProcessor",
        pixels={"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16},
        tokens=QWEN,
    ),
    "cohere_compass": Family(
        "cohere_compass", "CohereCompassImageProcessorPil", "CohereCompassProcessor",
        pixels={"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16},
        tokens={"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"},
    ),
    "deepseek_vl": Family(
        "deepseek_vl", "DeepseekVLImageProcessorPil", "DeepseekVLProcessor",
        options={"num_image_tokens": 9}, tokens={"image_token": "<image_placeholder>"},
    ),
    "deepseek_vl_hybrid": Family(
        "deepseek_vl_hybrid", "DeepseekVLHybridImageProcessorPil", "DeepseekVLHybridProcessor",
        options={"num_image_tokens": 9}, tokens={"image_token": "<image_placeholder>"},
    ),
    "glm4v": Family(
        "glm4v", "Glm4vImageProcessorPil", "Glm4vProcessor",
        pixels={"size": {"shortest_edge": 12544, "longest_edge": 1_000_000}},
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
    "glm46v": Family(
        "glm46v", "Glm46VImageProcessorPil", "Glm46VProcessor",
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
    "glmga": Family(
        "glmga", "GlmgaImageProcessorPil", "Glm46VProcessor",
        pixels={"patch_expand_factor": 1},
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
    "glm5_next": Family(
        "glm5_next", "Glm5NextImageProcessorPil", "Glm5NextProcessor",
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
    "glm5_next/small": Family(
        "glm5_next", "Glm5NextImageProcessorPil", "Glm5NextProcessor",
        pixels={"min_image_tokens": 40, "max_image_tokens": 300, "patch_size": 16},
        tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    ),
    "nemotron_h_omni": Family(
        "nemotron_h_omni", "NemotronH_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3Processor",
        tokens=NEMOTRON,
    ),
    "nemotron_h_omni/small": Family(
        "nemotron_h_omni", "NemotronH_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3Processor",
        pixels={"patch_size": 14, "min_num_patches": 20, "max_num_patches": 70}, tokens=NEMOTRON,
    ),
    "kimi_k25": Family("kimi_k25", "Kimi_K25", "Kimi_K25Processor", tokens=KIMI),
    "kimi_k25/small": Family(
        "kimi_k25", "Kimi_K25", "Kimi_K25Processor", tokens=KIMI,
        pixels={"size": {"max_height": 20, "max_width": 20}, "max_patches": 90, "patch_size": 16},
    ),
    "lighton_ocr": Family(
        "pixtral", "PixtralImageProcessorPil", "LightOnOcrProcessor",
        pixels={"size": {"longest_edge": 700}, "patch_size": 14},
        options={"patch_size": 14, "spatial_merge_size": 2},
        tokens={
            **{"image_token": "<|image_pad|>", "image_break_token": "[IMG_BREAK]"},
            "image_end_token": "[IMG_END]",
        },
    ),
    "exaone4_5": Family(
        "qwen2_vl", "Qwen2VLImageProcessorPil", "Exaone4_5_Processor",
        pixels={"min_pixels": 3136, "max_pixels": 500_000}, tokens=QWEN,
    ),
    "hyperclovax_vision_v2": Family(
        "qwen2_vl", "Qwen2VLImageProcessorPil", "HyperCLOVAXVisionV2Processor",
        tokens={"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"},
    ),
    "paddleocr_vl": Family(
        "paddleocr_vl", "PaddleOCRVLImageProcessorPil", "PaddleOCRVLProcessor",
        tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "paddleocr_vl/small": Family(
        "paddleocr_vl", "PaddleOCRVLImageProcessorPil", "PaddleOCRVLProcessor",
        pixels={"min_pixels": 3136, "max_pixels": 40_000},
        tokens={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "fast_vlm": Family(
        "llava", "LlavaImageProcessorPil", "LlavaProcessor",
        pixels={"size": {"shortest_edge": 1024}, "crop_size": {"height": 1024, "width": 1024}},
        options={"patch_size": 64, "vision_feature_select_strategy": "full"},
    ),
    "gemma3": Family(
        "gemma3", "Gemma3ImageProcessorPil", "Gemma3Processor",
        {"mm_tokens_per_image": 256}, tokens=GEMMA3,
    ),
    "gemma3/crops": Family(
        "gemma3", "Gemma3ImageProcessorPil", "Gemma3Processor", {"mm_tokens_per_image": 4},
        {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 256,
         "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2},
        {"image_seq_length": 4}, GEMMA3,
    ),
    "gemma3n": Family(
        "siglip", "SiglipImageProcessorPil", "Gemma3nProcessor", tokens=GEMMA3 | AUDIO
    ),
    "gemma4": Family(
        "gemma4", "Gemma4ImageProcessorPil", "Gemma4Processor", tokens=GEMMA4 | AUDIO
    ),
    "gemma4_unified": Family(
        "gemma4_unified", "Gemma4Unified", "Gemma4UnifiedProcessor",
        pixels={"max_soft_tokens": 70},
        tokens=GEMMA4 | AUDIO,
    ),
    "minimax_m3_vl": Family(
        "minimax_m3_vl", "MiniMaxM3VL", "MiniMaxM3VLProcessor",
        pixels={"size": [672, 672]}, tokens=MINIMAX,
    ),
    "minimax_m3_vl/small": Family(
        "minimax_m3_vl", "MiniMaxM3VL", "MiniMaxM3VLProcessor",
        pixels={"min_pixels": 4000, "max_pixels": 200_000, "patch_size": 16}, tokens=MINIMAX,
    ),
    "mllama": Family(
        "mllama", "MllamaImageProcessorPil", "MllamaProcessor",
        tokens={"image_token": "<|image|>", "python_token": "<|python_tag|>"},
    ),
    "muse_glimmer": Family("muse_glimmer", "MuseGlimmer", "MuseGlimmerProcessor", tokens=MUSE),
    "muse_glimmer/few": Family(
        "muse_glimmer", "MuseGlimmer", "MuseGlimmerProcessor", tokens=MUSE,
        pixels={"patch_size": 16, "max_image_tokens": 30},
    ),
    "phi4_multimodal": Family(
        "phi4_multimodal", "Phi4Multimodal", "Phi4MultimodalProcessor", tokens=PHI4
    ),
    "phi4_multimodal/few": Family(
        "phi4_multimodal", "Phi4Multimodal", "Phi4MultimodalProcessor",
        pixels={"dynamic_hd": 5}, tokens=PHI4,
    ),
    "paligemma": Family(
        "siglip", "SiglipImageProcessorPil", "PaliGemmaProcessor",
        {"vision_config": {"image_size": 224, "patch_size": 14}}, {"image_seq_length": 256},
    ),
}  # fmt: skip


UNCOUNTED = {
    "idefics",
    "idefics2",
    "idefics2/split",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "mllama",
    "got_ocr2",
    "got_ocr2/tiles",
}  # processors that do not tell
