"""What checkpoints, older and newer ones, call the tensors of a tower of transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

# Beginnings of tensors' names in transformers' class, and as older files may have them.
_OLDER: Final = (("vision_tower.", "vision_tower.vision_model."),)


def spellings(name: str) -> Iterator[str]:
    """Yield how a checkpoint may call a tensor that a family's class calls `name`."""
    names = [name]
    names += [old + name.removeprefix(new) for new, old in _OLDER if name.startswith(new)]
    for own in names:
        yield f"model.{own}"
        yield own
