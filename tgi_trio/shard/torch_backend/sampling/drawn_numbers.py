"""Random numbers of rows, drawn for many steps at a time. No tensor in this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.sampling.philox import uniform

Positions: TypeAlias = NDArray[np.int64] | NDArray[np.int32]

_AHEAD: Final = 64  # positions of a row for which numbers are drawn together, at most
_DRAWN: Final = 2048  # numbers that are drawn together, at most, where rows are not more


def most_steps(rows: int) -> int:
    """Return for how many steps of so many rows numbers are drawn together."""
    return max(1, min(_AHEAD, _DRAWN // rows))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random numbers of rows at N steps in turn."""

    first: int  # position of the first row in the first of them
    positions: list[bytes]  # [N] of all rows
    numbers: NDArray[np.float64]  # [N, R]

    @classmethod
    def of(cls, seeds: NDArray[np.uint64], positions: Positions, steps: int) -> Drawn:
        """Draw them from `positions` [R] on."""
        every = positions + np.arange(steps)[:, None]
        drawn = uniform(np.tile(seeds, steps), every.ravel().astype(np.uint64))
        own = [some.tobytes() for some in every.astype(positions.dtype)]
        return cls(int(positions[0]), own, drawn.reshape(steps, -1))

    def find(self, positions: Positions) -> NDArray[np.float64] | None:
        """Return the numbers of rows at `positions` [R]; None: they are not all there."""
        step = int(positions[0]) - self.first
        if not 0 <= step < len(self.positions) or self.positions[step] != positions.tobytes():
            return None
        found: NDArray[np.float64] = self.numbers[step]
        return found
