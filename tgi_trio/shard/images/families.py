"""Which families of models have their images computed, and how their towers are found.

A tower is transformers' own: the family's class without its text model. What that class takes of a
bundle are the parameters of its `get_image_features`; what it returns are the features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# By `model_type` of config.json: the module that writes the text, which is ours to compute.
TEXT_PARTS: Final = {
    "gemma3": "language_model",
    "idefics2": "text_model",
    "idefics3": "text_model",
    "llava": "language_model",
    "llava_next": "language_model",
    "mistral3": "language_model",
    "paligemma": "language_model",
    "qwen2_5_vl": "language_model",
    "qwen2_vl": "language_model",
    "qwen3_vl": "language_model",
    "smolvlm": "text_model",
}

# Beginnings of tensors' names in transformers' class, and as older files may have them.
_OLDER: Final = (("vision_tower.", "vision_tower.vision_model."),)


def spellings(name: str) -> Iterator[str]:
    """Yield how a checkpoint may call a tensor that a family's class calls `name`."""
    names = [name]
    names += [old + name.removeprefix(new) for new, old in _OLDER if name.startswith(new)]
    for own in names:
        yield f"model.{own}"
        yield own
