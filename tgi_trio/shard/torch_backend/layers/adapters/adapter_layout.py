"""The layout of a LoRA adapter in its slot of device memory.

A slot has room for the largest adapter. Its matrices are contiguous, so that an adapter is uploaded
in one copy: for each pair A [r, inputs], then B [outputs, r], with r padded by zeros to a multiple
of sixteen; for each of its pieces, if the adapter has them, gains [outputs], then offsets. The
directory says where those of each piece of each linear layer begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tgi_trio.model.adapters.sites import EVERYTHING, AdapterScope, Site, adaptable_linears
from tgi_trio.model.matrices.references import Share
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.shard.adapters.numbers import AdapterNumbers
from tgi_trio.shard.adapters.parts import AdapterPart

ENTRY: Final = 5  # numbers of a directory entry
UNIT: Final = 16  # numbers; offsets count in it, and ranks are multiples of it


@dataclass(frozen=True, slots=True)
class SitePlace:
    """A linear layer of this rank, and its entries in the directory, one for each piece."""

    inputs: int
    starts: tuple[int, ...]  # the first output of each piece
    outputs: int
    first: int  # index of its first entry

    def end(self, piece: int) -> int:
        """Return the end of a piece's outputs."""
        return (*self.starts[1:], self.outputs)[piece]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter as it is copied into a slot."""

    numbers: torch.Tensor  # flat, of the model's dtype
    # int32 [entries, 5]: the piece whose A is used, the rank r, and where A, B and gains begin, in
    # units; 0: there are no gains
    directory: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.directory.nbytes


class SlotLayout:
    """Where everything lies in the slots of one rank of a model."""

    def __init__(
        self,
        spec: DecoderSpec,
        share: Share,
        max_rank: int,
        scope: AdapterScope = EVERYTHING,
    ) -> None:
        """`max_rank`: the largest r of an adapter; `share`: this rank's part of a matrix.

        `scope`: what adapters may change.
        """
        self.ranks = aligned(max_rank)
        places: dict[Site, SitePlace] = {}
        entries = capacity = 0
        for site, linear in adaptable_linears(spec, scope):
            counts = [
                sum(span.stop - span.start for span in piece.outputs.spans(share(piece.outputs)))
                for piece in linear.pieces
            ]
            (columns,) = linear.pieces[0].inputs.spans(share(linear.pieces[0].inputs))
            inputs, outputs = columns.stop - columns.start, sum(counts)
            starts = tuple(np.cumsum([0, *counts[:-1]]).tolist())
            places[site] = SitePlace(inputs, starts, outputs, entries)
            entries += len(counts)
            capacity += self.ranks * (len(counts) * inputs + outputs)
            if scope.gains and not site.of_expert:
                capacity += sum(aligned(2 * count) for count in counts)
        self.places: Mapping[Site, SitePlace] = places
        self.entries = entries
        self.capacity = capacity  # numbers of a slot

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Return the bytes of device memory that a slot takes."""
        return self.capacity * dtype.itemsize + self.entries * ENTRY * 4

    def pack(self, adapter: AdapterNumbers, dtype: torch.dtype) -> PackedAdapter:
        """Lay out an adapter's numbers. Thread-safe."""
        directory = torch.zeros((self.entries, ENTRY), dtype=torch.int32)
        found: list[torch.Tensor] = []
        at = 0

        def put(matrix: torch.Tensor) -> int:
            nonlocal at
            begin, more = at, aligned(matrix.numel()) - matrix.numel()
            found.append(torch.nn.functional.pad(matrix.reshape(-1), (0, more)))
            at += len(found[-1])
            return begin // UNIT

        for site, parts in adapter.sites.items():
            place = self.places[site]
            for part in parts:
                a, b = (torch.from_numpy(matrix).to(dtype) for matrix in (part.a, part.b))
                more = aligned(len(a)) - len(a)
                ranks = len(a) + more
                into = put(torch.nn.functional.pad(a, (0, 0, 0, more)))
                out_of = put(torch.nn.functional.pad(b, (0, more)))
                block = place.starts.index(part.start)
                for piece in range(block, len(place.starts)):
                    start = place.starts[piece] - part.start
                    if start < len(b):
                        own = slice(start, place.end(piece) - part.start)
                        gains = 0 if part.gains is None else put(_stack_gains(part, own, dtype))
                        entry = (block, ranks, into, out_of + start * ranks // UNIT, gains)
                        directory[place.first + piece] = torch.tensor(entry, dtype=torch.int32)
        numbers = torch.cat(found) if found else torch.empty(0, dtype=dtype)
        return PackedAdapter(numbers, directory)


def _stack_gains(part: AdapterPart, own: slice, dtype: torch.dtype) -> torch.Tensor:
    """Return the gains of some outputs, then their offsets."""
    if part.gains is None or part.offsets is None:
        raise ValueError("an adapter has gains and offsets, or neither")
    return torch.from_numpy(np.stack((part.gains[own], part.offsets[own]))).to(dtype)


def aligned(count: int) -> int:
    """Return a count rounded up to a multiple of `UNIT`."""
    return -(-count // UNIT) * UNIT
