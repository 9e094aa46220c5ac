"""How images change the attention of a model's text. No torch, since the router reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model import hunyuan_vl
from tgi_trio.model.config import NONSENSE, ModelConfig
from tgi_trio.model.image_families import IMAGE_FAMILIES, ImageAttention, ImageFamily
from tgi_trio.model.nonsense import describe_nonsense
from tgi_trio.model.video_families import read_positions
from tgi_trio.model.wrappers import is_thinker

# Types whose config.json says whether an image's tokens see each other, and what it leaves out.
_SEEING: Final[Mapping[str, str | None]] = {"gemma4": None, "gemma4_unified": "vision"}
_MARKS: Final = ("image_start", "image_end", "slice_start", "slice_end", "newline")


@dataclass(frozen=True, slots=True)
class ImageRules:
    """The rules of one model."""

    image_attention: ImageAttention = "causal"
    # For image positions (M-RoPE): patches along a side of what becomes one token. 0: positions are
    # those in the prompt.
    merge: int = 0
    # Positions in a second of a video; 0: each grid of its frames takes one.
    by_second: int = 0
    seconds_first: bool = False  # a grid's number is multiplied by its seconds, then by these
    # Tokens that turn by the corners of an image's parts, which lie on a canvas; none: there are no
    # such. `merge` is of their patches.
    marks: frozenset[int] = frozenset()
    # Parts of a position, of which the last three are the column, the row and an image's number,
    # and those before them the place (Hunyuan VL). 0: they are time, row and column.
    numbered: int = 0
    # A token after which no image is attended to until the next image; -1: there is none.
    end_token: int = -1


def image_rules(config: ModelConfig) -> ImageRules:
    """Return a model's rules; those of plain text if its images are not supported.

    Raises ModelLoadError for a config.json that makes no sense.
    """
    family = IMAGE_FAMILIES.get(config.model_type)
    if family is None:
        return ImageRules()
    read = partial(_read_rules, family=family)
    try:
        return read(config)
    except NONSENSE as error:
        raise describe_nonsense(config, error, read, about="images") from error


def _read_rules(config: ModelConfig, family: ImageFamily) -> ImageRules:
    image_attention = config.values.get(
        "use_bidirectional_attention", _SEEING.get(config.model_type)
    )
    if config.model_type in _SEEING and image_attention != "vision":
        return ImageRules()
    if config.model_type == "idefics":
        return ImageRules(family.image_attention, end_token=_end_token(config))
    if config.model_type == "minicpmv4_7":
        mode = config.get("downsample_mode", "16x")
        marks = frozenset(int(config.need(f"{name}_id")) for name in _MARKS)
        return ImageRules(family.image_attention, 2 if mode == "4x" else 4, marks=marks)
    if not family.turns:
        return ImageRules(family.image_attention)
    vision: Any = config.get("vision_config", {})
    merge = vision.get("spatial_merge_size", 2) if isinstance(vision, Mapping) else None
    if not isinstance(merge, int) or isinstance(merge, bool) or merge < 1:
        raise ModelLoadError(
            f"{config.folder / 'config.json'} says spatial_merge_size {merge!r}, which is no "
            "positive number."
        )
    if config.model_type == hunyuan_vl.HUNYUAN_VL:
        parts = hunyuan_vl.count_parts(config)
        return ImageRules(family.image_attention, merge, numbered=parts)
    by_second = read_positions(config.model_type, config.values)
    return ImageRules(family.image_attention, merge, by_second, is_thinker(config.model_type))


def _end_token(config: ModelConfig) -> int:
    """Return the id of the end, the first of several; -1: there is none."""
    stated = config.get("eos_token_id", -1)
    return int(stated if not isinstance(stated, list) else stated[0] if stated else -1)
