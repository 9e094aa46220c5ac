"""The families of vision models: one table, for the router and for the shard.

A row has the text of an image in a prompt, the processor that prepares its pixels, where the
tower is, and how images change the attention of the text. No torch in this file, since the router
reads it.

Sources: transformers' processors, the mask functions of its `modeling_*.py`, its `get_rope_index`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tgi_trio.errors import ModelLoadError

# Which tokens of a prompt with images attend to each other both ways, and so are computed in one
# step.
#   causal: none; each attends to those before it
#   image:  the feature tokens of each image
#   prompt: the whole prompt
#   layers: none; but cross-attention layers let tokens attend to all images of a prompt, including
#           generated tokens
ImageAttention = Literal["causal", "image", "prompt", "layers"]
# How a patch that is one row of numbers stores its pixels: channel by channel (each with all its
# frames), pixel by pixel, or frame by frame and in these channel by channel.
PatchOrder = Literal["channels", "pixels", "frames"]
Three = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """How a family handles images."""

    layout: str  # a row of `router.media.layouts.table.LAYOUTS`
    processor: str  # a row of `media.processors.PROCESSORS`
    # The modules of transformers' class that are the text model, which we compute ourselves. The
    # rest of the class is the tower.
    text_parts: tuple[str, ...] = ("language_model",)
    image_attention: ImageAttention = "causal"
    # Tokens have rotary positions by row and column of their image (M-RoPE).
    turns: bool = False
    # The projector from tower to text, if transformers' `get_image_features` omits it.
    projector: str = ""
    halves: bool = False  # pixels are normalised in bfloat16, whatever the tower's dtype
    patch_order: PatchOrder = "channels"
    two_sizes: bool = False  # a second tower sees the image larger, and normalised otherwise
    needs: tuple[str, ...] = ()  # packages of the extra of the first one's name
    # Mean and deviation of pixels from 0 to 1, where a model's files say none; None: they have to.
    normal: tuple[Three, Three] | None = None
    # By what names files may say them, beside `image_mean` and `image_std`.
    older_normal: tuple[str, str] | None = None


_HALF: Final = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_CLIP: Final = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_GLM: Final = ImageFamily("glm", "glm4v", turns=True)
_TIMM: Final = ("timm", "torchvision")
_QWEN: Final = ImageFamily("qwen", "qwen2_vl", turns=True)

# By `model_type` in config.json.
IMAGE_FAMILIES: Final[Mapping[str, ImageFamily]] = {
    "aya_vision": ImageFamily("aya", "internvl"),
    "cohere2_vision": ImageFamily("cohere2", "cohere2"),
    "cohere_compass": ImageFamily("compass", "qwen2_vl", turns=True),
    "deepseek_ocr2": ImageFamily("deepseek_ocr2", "deepseek_ocr2", normal=_HALF),
    "deepseek_vl": ImageFamily("deepseek_vl", "deepseek_vl"),
    "deepseek_vl_hybrid": ImageFamily(
        "deepseek_vl", "deepseek_vl_hybrid", normal=_CLIP, two_sizes=True
    ),
    "exaone4_5": ImageFamily("exaone", "qwen2_vl"),
    "fast_vlm": ImageFamily("fast_vlm", "llava", needs=_TIMM),
    "gemma3": ImageFamily("gemma3", "gemma3", image_attention="image"),
    "gemma3n": ImageFamily("gemma3n", "siglip", needs=_TIMM),
    "gemma4": ImageFamily("gemma4", "gemma4", image_attention="image"),  # if its config.json has it
    "gemma4_unified": ImageFamily(
        "gemma4_unified", "gemma4_unified", image_attention="image", patch_order="pixels"
    ),
    "glm46v": _GLM,
    "glm5_next": ImageFamily("glm5_next", "glm5_next"),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "glm_ocr": _GLM,
    "glmga": _GLM,
    "got_ocr2": ImageFamily("got_ocr2", "got_ocr2"),
    "granite_docling": ImageFamily("granite_docling", "granite_docling", ("text_model",)),
    "granite4_vision": ImageFamily("granite4", "llava_next"),
    "hunyuan_vl": ImageFamily("hunyuan", "hunyuan_vl", turns=True, normal=_CLIP),
    "hyperclovax_vision_v2": ImageFamily("hyperclovax", "qwen2_vl"),
    "idefics": ImageFamily("idefics", "idefics", image_attention="layers"),
    "idefics2": ImageFamily("idefics2", "idefics2", text_parts=("text_model",)),
    "idefics3": ImageFamily("idefics3", "idefics3", text_parts=("text_model",)),
    "internvl": ImageFamily("internvl", "internvl"),  # as published, too: `internvl_chat.py`
    "kimi_k25": ImageFamily("kimi", "kimi", normal=_HALF),
    "lfm2_vl": ImageFamily("lfm2", "lfm2", patch_order="pixels"),
    "lfm3_vl": ImageFamily("qwen", "qwen2_vl"),
    "lighton_ocr": ImageFamily("lighton_ocr", "pixtral"),
    "llama4": ImageFamily("llama4", "llama4", projector="multi_modal_projector", halves=True),
    "llava": ImageFamily("llava", "llava"),
    "llava_next": ImageFamily("llava_next", "llava_next"),
    "llava_next_video": ImageFamily("llava_next", "llava_next"),
    "llava_onevision": ImageFamily("llava_onevision", "llava_onevision"),
    "minicpm_ocr": ImageFamily("minicpm_ocr", "minicpm_ocr"),
    "minicpmv4_6": ImageFamily("minicpmv", "minicpmv"),
    "minicpmv4_7": ImageFamily("minicpmv", "minicpmv", turns=True),
    "minimax_m3_vl": ImageFamily("minimax_m3", "minimax_m3", normal=_CLIP),
    "mistral3": ImageFamily("pixtral", "pixtral"),
    "mistral_large4": ImageFamily("pixtral", "pixtral"),
    "mllama": ImageFamily("mllama", "mllama", image_attention="layers"),
    "muse_glimmer": ImageFamily("muse", "muse", patch_order="frames", normal=_HALF),
    "nemotron_h_omni": ImageFamily(
        "nemotron", "nemotron", normal=_CLIP, older_normal=("norm_mean", "norm_std")
    ),
    "ovis2": ImageFamily("ovis2", "ovis2"),
    "paddleocr_vl": ImageFamily("paddleocr", "paddleocr", turns=True),
    "paligemma": ImageFamily("paligemma", "siglip", image_attention="prompt"),
    "perception_lm": ImageFamily("perception_lm", "perception_lm", normal=_HALF, needs=_TIMM),
    "phi4_multimodal": ImageFamily(
        *("phi4", "phi4", ("embed_tokens", "layers", "norm", "rotary_emb")), normal=_HALF
    ),
    "pixtral": ImageFamily("pixtral", "pixtral"),  # its model_type is llava
    "qianfan_ocr": ImageFamily("qianfan", "internvl"),
    "qwen2_5_omni_thinker": ImageFamily("qwen2_5_omni", "qwen2_vl", turns=True),
    "qwen2_5_vl": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_omni_moe_thinker": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen4_exp": _QWEN,
    "smolvlm": ImageFamily("idefics3", "smolvlm", text_parts=("text_model",)),
    "step3p7": ImageFamily("step3p7", "step3p7", normal=_CLIP),
    # DeepSeek-OCR is one without a window: `deepseek_ocr.py`
    "unlimited_ocr": ImageFamily("deepseek_ocr", "deepseek_ocr", normal=_HALF),
    "vipllava": ImageFamily("llava", "llava"),
}

_TOWERLESS: Final = ("fuyu",)  # types that see, and have no `vision_config`
# Why other types get no images. For types not listed: their tower is not implemented.
_UNSERVED: Final[Mapping[str, str]] = {
    "ernie4_5_vl_moe": "has experts for an image's tokens alone",
    "fuyu": "has one image in a prompt, whose tokens are written apart from the text's",
    "molmo2": "pools its patches by a table of its own",
}


def has_vision(config: Mapping[str, Any]) -> bool:
    """Return whether a model sees images, served or not; `config`: its config.json."""
    tower = config.get("vision_config")
    return (isinstance(tower, Mapping) and bool(tower)) or config.get("model_type") in _TOWERLESS


def find_family(config: Mapping[str, Any]) -> ImageFamily:
    """Return the row of a model; `config`: its config.json.

    Raises ModelLoadError for a model type without a row.
    """
    kind, vision = config.get("model_type"), config.get("vision_config")
    tower = vision.get("model_type") if isinstance(vision, Mapping) else None
    name = "pixtral" if kind == "llava" and tower == "pixtral" else str(kind)
    if name not in IMAGE_FAMILIES:
        raise ModelLoadError(
            f"model type {kind!r} {_UNSERVED.get(name, 'has no vision tower here')}; served are "
            f"images of {', '.join(sorted(IMAGE_FAMILIES))}"
        )
    return IMAGE_FAMILIES[name]
