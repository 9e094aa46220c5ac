"""Random numbers of rows, drawn for many steps at a time. No tensor in this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.sampling.philox import uniform

Positions: TypeAlias = NDArray[np.int64] | NDArray[np.int32]

_AHEAD: Final = 64  # most positions of a row for which numbers are drawn together
_DRAWN: Final = 2048  # most numbers that are drawn together, unless there are more rows


def most_steps(rows: int) -> int:
    """Return the number of steps for which the numbers of so many rows are drawn together."""
    return max(1, min(_AHEAD, _DRAWN // rows))


@dataclass(frozen=True, slots=True)
class Drawn:
    """The random numbers of some rows in N consecutive steps."""

    first: int  # the first row's position in the first step
    positions: list[bytes]  # [N]: all rows' positions
    numbers: NDArray[np.float64]  # [N, R]

    @classmethod
    def of(cls, seeds: NDArray[np.uint64], positions: Positions, steps: int) -> Drawn:
        """Draw the numbers of `positions` [R] and those that follow."""
        every = positions + np.arange(steps)[:, None]
        drawn = uniform(np.tile(seeds, steps), every.ravel().astype(np.uint64))
        own = [some.tobytes() for some in every.astype(positions.dtype)]
        return cls(int(positions[0]), own, drawn.reshape(steps, -1))

    def find(self, positions: Positions) -> NDArray[np.float64] | None:
        """Return the rows' numbers at `positions` [R]; None if they have not been drawn."""
        step = int(positions[0]) - self.first
        if not 0 <= step < len(self.positions) or self.positions[step] != positions.tobytes():
            return None
        found: NDArray[np.float64] = self.numbers[step]
        return found
