"""Reads a rank's parts of a checkpoint for transformers, which goes on to load them as always.

transformers knows which tensors of a file become which parameter: it renames some, and makes one
parameter of several tensors or several of one ("conversions"). It is asked for that, and is given
something in the place of each tensor that reads this rank's part when its turn comes. So each rank
reads and holds its parts alone, but for conversions other than stacking experts: their result is
cut when it is there, one conversion at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.torch_backend.fallback.cuts import AxisShare, Part, Stored, Whole, shape_of
from tgi_trio.shard.torch_backend.fallback.division import Division
from tgi_trio.shard.torch_backend.models.decoder import Ranks


def reading_class(blank: Any, division: Division, ranks: Ranks) -> type[Any]:
    """Return a class whose `from_pretrained` makes models like `blank` with this rank's parts.

    `blank` is whole, and may have no memory. It is a class of its own, since that function asks its
    class to read the files: so nothing of transformers is changed.
    """
    whole = type(blank)

    def load(
        model: Any, state_dict: object, files: list[str], load_config: Any, **options: Any
    ) -> Any:
        division.divide(model, ranks)
        with ExitStack() as opened:
            parts = _open_parts(blank, files, load_config.weight_mapping or [], division, opened)
            converted = replace(load_config, weight_mapping=[])
            loaded = whole._load_pretrained_model(model, parts, None, converted, **options)
        model.__class__ = whole
        return loaded

    body = {"_load_pretrained_model": staticmethod(load), "__module__": whole.__module__}
    return type(whole.__name__, (whole,), body)


def _open_parts(
    model: Any, files: list[str], mapping: list[Any], division: Division, opened: ExitStack
) -> dict[str, _FilePart | _ConvertedPart]:
    """Return the parts of a model's parameters by name, and what the files have beside them.

    `model` is whole: conversions ask it for shapes.
    """
    from safetensors import safe_open
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known, prefix = model.state_dict(), model.base_model_prefix
    parts: dict[str, _FilePart | _ConvertedPart] = {}
    conversions: dict[str, _Conversion] = {}
    for name, stored in sorted(_stored_tensors(files, safe_open, opened), key=_natural_order):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if pattern is None or target not in known:
            parts[target] = _FilePart(stored, division.parts.get(target, Whole()))
            continue
        if target not in conversions:
            axes = known[target].dim()
            conversions[target] = _Conversion(model, by_pattern[pattern], target, axes, division)
            parts |= conversions[target].parts()
        conversions[target].add(name, pattern, stored)
    return parts


def _stored_tensors(
    files: list[str], safe_open: Any, opened: ExitStack
) -> Iterator[tuple[str, Stored]]:
    """Yield the names and unread tensors of files that stay open as long as `opened`."""
    for file in files:
        held = opened.enter_context(safe_open(file, framework="pt"))
        for name in held.keys():  # noqa: SIM118 (it is no mapping)
            yield name, held.get_slice(name)


def _natural_order(named: tuple[str, Stored]) -> Any:
    """Return a key by which experts come in the order of their numbers, as for transformers."""
    from transformers.core_model_loading import dot_natural_key

    return dot_natural_key(named[0])


@dataclass(frozen=True, slots=True)
class _FilePart:
    """A rank's part of a tensor in a file; indexing by `...` reads it."""

    stored: Stored
    part: Part

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.part.take(self.stored)


@dataclass(frozen=True, slots=True)
class _ConvertedPart:
    """A rank's part of a parameter that a conversion makes; indexing by `...` makes it."""

    conversion: _Conversion
    name: str

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.conversion.pop(self.name)


class _Conversion:
    """The tensors of files that become one parameter or several, and how."""

    def __init__(
        self, model: Any, converter: Any, first: str, axes: int, division: Division
    ) -> None:
        """`first`: the name of the first parameter, which has so many axes; `converter`: is copied.

        Nothing is read before a part is asked for.
        """
        self._model = model
        self._axes = axes
        self._converter = deepcopy(converter)
        self._first = first
        self._division = division
        self._sources: dict[str, list[tuple[str, Stored]]] = {}  # by pattern: names, tensors
        self._made: dict[str, torch.Tensor] | None = None
        self._lock = Lock()  # transformers reads with several threads

    def parts(self) -> dict[str, _FilePart | _ConvertedPart]:
        """Return the parts of the parameters that it makes."""
        first, *others = self._converter.target_patterns
        names = (self._first, *(self._first.replace(first, other) for other in others))
        return {name: _ConvertedPart(self, name) for name in names}

    def add(self, name: str, pattern: str, stored: Stored) -> None:
        """Add a tensor, in the order in which transformers would."""
        self._sources.setdefault(pattern, []).append((name, stored))

    def pop(self, name: str) -> torch.Tensor:
        """Return this rank's part of a parameter; a part is asked for once."""
        with self._lock:
            if self._made is None:
                self._made = self._convert()
            if name not in self._made:
                raise ModelLoadError(f"transformers makes no {name!r} of the checkpoint's tensors.")
            return self._made.pop(name)

    def _convert(self) -> dict[str, torch.Tensor]:
        cut = self._member_cut()
        for pattern, tensors in self._sources.items():
            for name, stored in tensors:
                reader = _Reader(stored, cut)
                self._converter.add_tensor(self._first, name, pattern, reader)
        self._sources.clear()
        made = self._converter.convert(self._first, model=self._model, config=self._model.config)
        results = {n: t[0] if isinstance(t, list) else t for n, t in made.items()}
        if cut is not None:
            return results
        parts = self._division.parts
        return {name: parts.get(name, Whole()).take(whole) for name, whole in results.items()}

    def _member_cut(self) -> AxisShare | None:
        """Return the cut of each tensor in a file; None: the result is cut.

        Matrices of experts are stacked, and if there are two kinds, joined along one axis: what is
        cut from the result is cut from each of them.
        """
        from transformers.core_model_loading import Concatenate, MergeModulelist

        part, operations = self._division.parts.get(self._first), self._converter.operations
        if not isinstance(part, AxisShare) or part.axis == 0:
            return None
        if not operations or type(operations[0]) is not MergeModulelist or operations[0].dim:
            return None
        joined = [op.dim % self._axes for op in operations[1:] if type(op) is Concatenate]
        if len(joined) != len(operations) - 1 or joined not in ([], [part.axis]):
            return None
        if part.packs != (len(self._converter.source_patterns) if joined else 1):
            return None
        members = (tensor for tensors in self._sources.values() for _, tensor in tensors)
        stacked = all(len(shape_of(member)) == self._axes - 1 for member in members)
        return part.of_a_member() if stacked else None


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a tensor, or a rank's part of it, when transformers calls for it."""

    stored: Stored
    cut: AxisShare | None

    def __call__(self) -> torch.Tensor:
        whole: torch.Tensor = self.stored[...] if self.cut is None else self.cut.take(self.stored)
        return whole
