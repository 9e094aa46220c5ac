"""Names of a vision tower's tensors in older and newer checkpoints of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# Beginnings of tensors' names in transformers' class, and as older files may have them.
_OLDER: Final = (
    ("vision_tower.", "vision_tower.vision_model."),
    ("language_model.", "language_model.model."),
)
# Words in them, and as files have all of these (LFM3-VL).
_WORDS: Final = (
    ("patch_embed.", "patchifier."),
    ("q_norm.", "q_layernorm."),
    ("k_norm.", "k_layernorm."),
)


def spellings(name: str) -> Iterator[str]:
    """Yield how a checkpoint may call a tensor that a family's class calls `name`."""
    names = [name]
    names += [old + name.removeprefix(new) for new, old in _OLDER if name.startswith(new)]
    reworded = name
    for word, other in _WORDS:
        reworded = reworded.replace(word, other)
    for own in dict.fromkeys((*names, reworded)):
        yield f"model.{own}"
        yield own
