"""How a LoRA adapter lies in its slot of a device's memory, for `kernels/adapters.py`.

A slot is as large as the largest adapter may be. What is in it lies one behind the other, so that
an adapter comes in one copy: of every pair A [r, inputs], then B [outputs, r], r made a multiple
of sixteen by zeros. The directory says of every piece of every linear where its matrices begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from tgi_trio.model.adapters.sites import Site, adaptable_linears
from tgi_trio.model.matrices import Share
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.shard.adapters.numbers import AdapterNumbers

UNIT: Final = 16  # numbers that offsets count, and ranks come by


@dataclass(frozen=True, slots=True)
class SitePlace:
    """A linear of this rank, and its entries in a directory: one for each of its pieces."""

    inputs: int
    starts: tuple[int, ...]  # the first output of each piece
    outputs: int
    first: int  # its first entry


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter as it is copied into a slot."""

    numbers: torch.Tensor  # flat, of the model's dtype
    # int32 [entries, 4]: which piece's A is multiplied by, ranks, and where A and B begin, in units
    directory: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.directory.nbytes


class SlotLayout:
    """What is where in the slots of one rank of a model."""

    def __init__(self, spec: DecoderSpec, share: Share, max_rank: int) -> None:
        """`max_rank`: of adapters; `share`: which part of a matrix is this rank's."""
        self.ranks = aligned(max_rank)
        places: dict[Site, SitePlace] = {}
        entries = capacity = 0
        for site, linear in adaptable_linears(spec):
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
        self.places: Mapping[Site, SitePlace] = places
        self.entries = entries
        self.capacity = capacity  # numbers of a slot

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Return the device's memory that a slot takes."""
        return self.capacity * dtype.itemsize + self.entries * 4 * 4

    def pack(self, adapter: AdapterNumbers, dtype: torch.dtype) -> PackedAdapter:
        """Lay an adapter's numbers out; from any thread."""
        directory = torch.zeros((self.entries, 4), dtype=torch.int32)
        found: list[torch.Tensor] = []
        at = 0

        def put(matrix: torch.Tensor) -> int:
            nonlocal at
            begin = at
            found.append(matrix.reshape(-1))
            at += matrix.numel()
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
                        entry = (block, ranks, into, out_of + start * ranks // UNIT)
                        directory[place.first + piece] = torch.tensor(entry, dtype=torch.int32)
        numbers = torch.cat(found) if found else torch.empty(0, dtype=dtype)
        return PackedAdapter(numbers, directory)


def aligned(count: int) -> int:
    """Return a count made a multiple of `UNIT`."""
    return -(-count // UNIT) * UNIT
