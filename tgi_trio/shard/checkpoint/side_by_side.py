"""A rank's share of a matrix's inputs, if it is more than one range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats, to_float32
from tgi_trio.shard.checkpoint.stored_matrix import PlainNumbers, StoredMatrix


def join_columns(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """Return the only part, or all parts side by side."""
    return parts[0] if len(parts) == 1 else SideBySide(parts)


@dataclass(frozen=True, slots=True)
class SideBySide(PlainNumbers):
    """A `StoredMatrix` of floating-point numbers: matrices with the same outputs, side by side."""

    parts: Sequence[StoredMatrix]

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].shape[0], sum(part.shape[1] for part in self.parts)

    def rows(self, part: slice) -> SideBySide:
        return SideBySide([each.rows(part) for each in self.parts])

    def columns(self, part: slice) -> StoredMatrix:
        first, last, _ = part.indices(self.shape[1])
        found, place = [], 0
        for each in self.parts:
            width = each.shape[1]
            begin, end = max(first - place, 0), min(last - place, width)
            if begin < end:
                found.append(each.columns(slice(begin, end)))
            place += width
        return join_columns(found or [self.parts[0].columns(slice(0, 0))])

    def dequantised(self) -> Floats:
        return np.concatenate([to_float32(part.dequantised()) for part in self.parts], axis=1)

    def place(self) -> tuple[Path, int]:
        return self.parts[0].place()

    def release(self) -> None:
        for part in self.parts:
            part.release()
