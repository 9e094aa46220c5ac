"""Names of a vision tower's tensors in older and newer checkpoints of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# Prefixes of tensor names in transformers' classes, and the same in older files.
_OLDER: Final = (
    ("vision_tower.", "vision_tower.vision_model."),
    ("language_model.", "language_model.model."),
)
# Parts of names in these classes, and in files that have all of the others (LFM3-VL).
_WORDS: Final = (
    ("patch_embed.", "patchifier."),
    ("q_norm.", "q_layernorm."),
    ("k_norm.", "k_layernorm."),
)


def spellings(name: str) -> Iterator[str]:
    """Yield the possible names in a checkpoint of the tensor `name` of a transformers class."""
    names = [name]
    names += [old + name.removeprefix(new) for new, old in _OLDER if name.startswith(new)]
    reworded = name
    for word, other in _WORDS:
        reworded = reworded.replace(word, other)
    for own in dict.fromkeys((*names, reworded)):
        yield f"model.{own}"
        yield own
