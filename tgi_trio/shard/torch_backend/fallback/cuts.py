"""A rank's part of a parameter of transformers, taken from a tensor or from a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from tgi_trio.model.split import Portion, block_share, even_share

# A tensor, or what safetensors reads when it is indexed by slices.
Stored = Any


class Part(Protocol):
    """One rank's part of a parameter."""

    def own_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return its shape; raises ModelLoadError for a shape that cannot be split."""
        ...

    def take(self, stored: Stored) -> torch.Tensor:
        """Return it, contiguous and in memory of its own; reads no more than it."""
        ...


@dataclass(frozen=True, slots=True)
class AxisShare:
    """A share of one axis.

    `packs`: so many matrices lie one after the other along the axis, each of which is cut.
    `ragged`: the last rank may have less than the others. `name`: of the parameter, for errors.
    """

    name: str
    axis: int
    packs: int
    ragged: bool
    portion: Portion

    def own_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        shape = list(whole)
        shape[self.axis] = sum(s.stop - s.start for s in self._spans(shape[self.axis]))
        return tuple(shape)

    def take(self, stored: Stored) -> torch.Tensor:
        shape = shape_of(stored)
        before = (slice(None),) * self.axis
        pieces = [stored[(*before, span)] for span in self._spans(shape[self.axis])]
        if len(pieces) > 1:
            return torch.cat(pieces, dim=self.axis)
        # A slice is a view of the whole, in files as well, and keeps all its memory.
        own: torch.Tensor = pieces[0].clone(memory_format=torch.contiguous_format)
        return own

    def of_a_member(self) -> AxisShare:
        """Return the cut of one of the matrices that are stacked along axis 0 and packed."""
        return replace(self, axis=self.axis - 1, packs=1)

    def _spans(self, size: int) -> list[slice]:
        each = size // self.packs
        if size % self.packs:
            even_share(size, f"numbers of {self.name}", 0, self.packs)
        rank, ranks = self.portion.rank, self.portion.ranks
        if self.ragged:
            own = block_share(each, rank, ranks)
        else:
            own = even_share(each, f"numbers of {self.name}", rank, ranks)
        return [slice(own.start + n * each, own.stop + n * each) for n in range(self.packs)]


@dataclass(frozen=True, slots=True)
class Whole:
    """All of it, in memory of its own: one view of a file would keep all its pages mapped."""

    def own_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(whole)

    def take(self, stored: Stored) -> torch.Tensor:
        copied: torch.Tensor = stored[...].clone(memory_format=torch.contiguous_format)
        return copied


@dataclass(frozen=True, slots=True)
class Alone:
    """All of it on rank 0 and zeros on the others: what is added to a sum once."""

    portion: Portion

    def own_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(whole)

    def take(self, stored: Stored) -> torch.Tensor:
        whole: torch.Tensor = stored[...]
        return torch.zeros_like(whole) if self.portion.rank else whole.clone()


def shape_of(stored: Stored) -> tuple[int, ...]:
    """Return the shape of a tensor in memory or in a file."""
    return tuple(stored.shape if isinstance(stored, torch.Tensor) else stored.get_shape())
