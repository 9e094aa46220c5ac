"""The families of models that see videos: one table, for the router and for the shard.

A row has how frames are chosen and resized, and the text of a video in a prompt. What the tower
makes of frames, and how the text attends to them, is as of the family's images
(`image_families.py`). No torch in this file, since the router reads it.

Sources: transformers' video processors and processors of these families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.wrappers import is_thinker


@dataclass(frozen=True, slots=True)
class VideoFamily:
    """How a family handles videos."""

    canvas: str  # a row of `media.video_canvases.CANVASES`
    layout: str  # a row of `router.media.layouts.videos.VIDEO_LAYOUTS`


_GLM: Final = VideoFamily("glm4v", "glm4v")
_TIMED: Final = VideoFamily("qwen3", "timed")

# By `model_type` in config.json.
VIDEO_FAMILIES: Final[Mapping[str, VideoFamily]] = {
    "glm46v": VideoFamily("glm46v", "glm46v"),
    "glm4v": _GLM,
    "glm4v_moe": _GLM,
    "internvl": VideoFamily("internvl", "internvl"),
    "qwen2_5_omni_thinker": VideoFamily("qwen2_5_omni", "qwen2_5_omni"),
    "qwen2_5_vl": VideoFamily("qwen2", "whole"),
    "qwen2_vl": VideoFamily("qwen2", "whole"),
    "qwen3_5": _TIMED,
    "qwen3_5_moe": _TIMED,
    "qwen3_omni_moe_thinker": VideoFamily("qwen3_omni", "whole"),
    "qwen3_vl": _TIMED,
    "qwen3_vl_moe": _TIMED,
    "smolvlm": VideoFamily("smolvlm", "smolvlm"),
}


def find_video_family(config: Mapping[str, Any]) -> VideoFamily:
    """Return the row of a model; `config`: its config.json.

    Raises ModelLoadError for a model type without a row.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in VIDEO_FAMILIES:
        raise ModelLoadError(
            f"the model type is {kind!r}, and served are videos of "
            f"{', '.join(sorted(VIDEO_FAMILIES))}"
        )
    return VIDEO_FAMILIES[kind]


def read_positions(model_type: str, config: Mapping[str, Any]) -> int:
    """Return how many positions a second of a video takes; 0: a grid takes one.

    Qwen2.5-VL and Qwen-Omni's config.json says so. Raises ModelLoadError.
    """
    if is_thinker(model_type):
        found = config.get("position_id_per_seconds", 25)
        if found not in (13, 25):  # of which each family has one: `media.omni_canvases`
            raise ModelLoadError(
                f"config.json says position_id_per_seconds {found!r}, not 13 or 25"
            )
        return int(found)
    if model_type != "qwen2_5_vl":
        return 0
    vision = config.get("vision_config")
    found = vision.get("tokens_per_second", 4) if isinstance(vision, Mapping) else 4
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ModelLoadError(f"config.json says tokens_per_second {found!r}, no positive number")
    return found
