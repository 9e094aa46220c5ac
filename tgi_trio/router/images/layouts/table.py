"""Which family of models lays images out in which way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tgi_trio.router.images.layouts.fixed import lay_out_llava, lay_out_paligemma
from tgi_trio.router.images.layouts.gemma import lay_out_gemma3, lay_out_gemma4
from tgi_trio.router.images.layouts.grid import lay_out_qwen
from tgi_trio.router.images.layouts.layout import ImageLayout, ImageSettings
from tgi_trio.router.images.layouts.pinpoints import lay_out_llava_next
from tgi_trio.router.images.layouts.rows import lay_out_pixtral
from tgi_trio.router.images.layouts.tiles import lay_out_idefics2, lay_out_idefics3

# By `model_type` of config.json.
LAYOUTS: Final[dict[str, Callable[[ImageSettings], ImageLayout]]] = {
    "gemma3": lay_out_gemma3,
    "gemma4": lay_out_gemma4,
    "idefics2": lay_out_idefics2,
    "idefics3": lay_out_idefics3,
    "llava": lay_out_llava,
    "llava_next": lay_out_llava_next,
    "mistral3": lay_out_pixtral,
    "paligemma": lay_out_paligemma,
    "qwen2_5_vl": lay_out_qwen,
    "qwen2_vl": lay_out_qwen,
    "qwen3_5": lay_out_qwen,
    "qwen3_vl": lay_out_qwen,
    "smolvlm": lay_out_idefics3,
}


def find_layout(settings: ImageSettings) -> ImageLayout | None:
    """Return a model's layout, None for a family that has none; raises ModelLoadError.

    Pixtral calls itself `llava`, with a tower of its own.
    """
    if settings.vision.get("model_type") == "pixtral":
        return lay_out_pixtral(settings)
    family = LAYOUTS.get(str(settings.config.get("model_type")))
    return family(settings) if family else None
