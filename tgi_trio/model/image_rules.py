"""What images change of how a family's text layers attend. No torch in this file: the router asks.

Sources: the mask functions of transformers' `modeling_*.py`, and its `get_rope_index`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig

# Which tokens of a prompt with images see one another both ways, and so are computed in one step.
#   causal: none; each sees those before it
#   image:  the feature tokens of each image
#   prompt: all of the prompt
Sight = Literal["causal", "image", "prompt"]

_SIGHTS: Final[dict[str, Sight]] = {"gemma3": "image", "paligemma": "prompt"}
_TURNING: Final = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe")


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Of one model."""

    sight: Sight = "causal"
    # Where tokens turn by their place in the image: patches along a side of what becomes one token.
    # 0: they turn by their place in the prompt.
    merge: int = 0


def image_rules(config: ModelConfig) -> ImageRules:
    """Return a model's rules; raises ModelLoadError for a config.json that makes no sense."""
    sight = _SIGHTS.get(config.model_type, "causal")
    if config.model_type not in _TURNING:
        return ImageRules(sight)
    vision: Any = config.get("vision_config", {})
    merge = vision.get("spatial_merge_size", 2) if isinstance(vision, Mapping) else None
    if not isinstance(merge, int) or isinstance(merge, bool) or merge < 1:
        raise ModelLoadError(
            f"{config.folder / 'config.json'} says spatial_merge_size {merge!r}, which is no "
            "positive number."
        )
    return ImageRules(sight, merge)
