"""The parameters of a tower's class, and the tensors of a projector of which each is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.projectors.projector import (
    LENGTH,
    Change,
    Projector,
    count_blocks,
    find_deep_blocks,
)
from tgi_trio.model.gguf.stated import read_count

_ENDINGS: Final = (".weight", ".bias")
_FRAMES: Final = (".weight", ".weight.1")
_SOUNDS: Final = ("a.", "mm.a.")  # beginnings of tensors for sounds
_DEEP: Final = "v.deepstack.{}."
_UP, _DOWN, _GATE = (f"v.blk.{{}}.ffn_{part}" for part in ("up", "down", "gate"))


@dataclass(frozen=True, slots=True)
class Parameter:
    """How a file has a parameter."""

    tensors: tuple[str, ...]  # whose rows, or frames, one after the other are the parameter's
    change: Change | None = None


def list_parameters(model: GgufModel, projector: Projector) -> dict[str, Parameter]:
    """Return the parameters that a file has by their names in the tower's class.

    Raises ValueError for a tensor of which no parameter is made.
    """
    found: dict[str, Parameter] = {}
    for name, tensors in _expand(model, projector):
        change = projector.changes.get(_number_out(name, projector.changes))
        if change == "frames":
            tensors = tuple(tensors[0].removesuffix(".weight") + end for end in _FRAMES)
        if all(each in model.tensors for each in tensors):
            found[name] = Parameter(tensors, change)
    read = {each for parameter in found.values() for each in parameter.tensors}
    left = model.tensors.keys() - read - set(projector.unread)
    if unknown := sorted(name for name in left if not name.startswith(_SOUNDS)):
        more = f", nor {len(unknown) - 1} others" if len(unknown) > 1 else ""
        raise ValueError(f"no tower of its type has its tensor {unknown[0]!r}{more}")
    return found


def _expand(model: GgufModel, projector: Projector) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every parameter that a class may have, with the tensors that it would be made of."""
    swapped = _has_swapped_halves(model)
    blocks, deep = range(count_blocks(model)), find_deep_blocks(model)
    for module, stored in projector.names.items():
        parts = (stored,) if isinstance(stored, str) else stored
        if swapped:
            parts = tuple({_UP: _DOWN, _DOWN: _UP}.get(part, part) for part in parts)
        numbers = list(enumerate(deep if parts[0].startswith(_DEEP) else blocks))
        for own, block in numbers if "{}" in module else [(0, 0)]:
            name, tensors = module.format(own), tuple(part.format(block) for part in parts)
            yield name, tensors
            for ending in _ENDINGS:
                yield name + ending, tuple(each + ending for each in tensors)


def _number_out(name: str, changes: Mapping[str, Change]) -> str:
    """Return the key of a parameter among `changes`: its name, with `{}` in a block's place."""
    if name in changes:
        return name
    parts = name.split(".")
    digits = [index for index, part in enumerate(parts) if part.isdecimal()]
    if digits:
        parts[digits[0]] = "{}"
    return ".".join(parts)


def _has_swapped_halves(model: GgufModel) -> bool:
    """Return whether the first half of a block's MLP is called its last, as in older files.

    llama.cpp recognises them by their shapes, too.
    """
    shapes = [model.tensors.get(f"{half.format(0)}.weight") for half in (_UP, _DOWN)]
    if None in shapes or f"{_GATE.format(0)}.weight" in model.tensors:
        return False
    up, down = (each[1].shape for each in shapes if each is not None)
    length = read_count(model, LENGTH)
    return up != down and up[0] == length == down[-1]
