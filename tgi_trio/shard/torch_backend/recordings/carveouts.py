"""Shared-memory carve-outs of the kernels of recorded steps of few rows, measured by the warm-up.

A kernel that wants another carve-out (split between shared memory and the level 1 cache) than the
present one can begin only when nothing runs, even where it could begin early by programmatic
dependent launch. One carve-out for all kernels of a step avoids that, but leaves some kernels with
less cache than they would have had: with all of it shared, an H200 took less time for one row of a
1B model and more for one of 8B, and four rows wanted another share. So whole recorded steps are
measured for each number of rows, and the driver's own choice is kept where no other is faster. See
`graph_nodes.py` for how carve-outs are set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import torch

from tgi_trio.shard.torch_backend.layers.linears.few_rows import FEW, agree
from tgi_trio.shard.torch_backend.recordings.graph_nodes import DriverError
from tgi_trio.shard.torch_backend.recordings.recorded_steps import (
    CaptureError,
    Compute,
    Graph,
    IdleSteps,
)

_TRIED: Final = (100, 72, 44)  # per cent: of Hopper's 228 KB, these are 228, 164 and 100
_MOST_ROWS: Final = FEW[-1][-1]  # with more, few kernels begin before the last one has ended
_WORTH: Final = 0.99  # another carve-out must take at most this part of the time with the driver's
_MOST_SECONDS: Final = 0.2  # of the device, for all measurements
_RUNS: Final = 8  # runs of a step that trying one carve-out takes
_REFUSED: Final = DriverError, CaptureError  # the latter again, without one, where nothing helps
_LEFT: Final = "shared memory of kernels is left to the driver"


class CarvingCapture(Protocol):
    """As `Capture`; with `carveout`, in per cent, all kernels of the graph prefer that one.

    Raises DriverError if it cannot be set.
    """

    def __call__(
        self, compute: Compute, /, carveout: int | None = None
    ) -> tuple[Graph, torch.Tensor]: ...


class Carveouts:
    """The carve-outs chosen for recordings of few rows, where they differ from the driver's."""

    def __init__(self, capture: CarvingCapture, seconds: Callable[[Graph], float]) -> None:
        """`seconds`: measures a graph: the least device time of several replays."""
        self._capture = capture
        self._seconds = seconds
        self.chosen: dict[int, int] = {}  # per cent, by rows

    def choose(self, sizes: Iterable[int], idle: IdleSteps) -> None:
        """Measure which carve-outs make steps take a hundredth less time, and keep those.

        `sizes`: the numbers of rows to be recorded, tried in ascending order while time is left.
        Earlier choices are forgotten.
        """
        self.chosen = {}
        left = _MOST_SECONDS
        try:
            for rows in sorted(size for size in sizes if size <= _MOST_ROWS):
                left -= self._choose(rows, idle(rows), left)
                if left <= 0:
                    return
        except _REFUSED as error:
            self._leave(error)

    def record(self, rows: int, compute: Compute) -> tuple[Graph, torch.Tensor]:
        """Record a step of so many rows, with the carve-out chosen for it."""
        chosen = self.chosen.get(rows)
        if chosen is not None:
            try:
                return self._capture(compute, chosen)
            except _REFUSED as error:
                self._leave(error)
        return self._capture(compute)

    def _choose(self, rows: int, step: Compute, left: float) -> float:
        """Choose for `rows`; return the device seconds that were spent, at most `left`."""
        graph, found = self._capture(step)
        own = least = self._seconds(graph)
        wanted, spent = found.clone(), _RUNS * own
        for percent in _TRIED:
            if spent + _RUNS * own > left:
                return left
            graph, found = self._capture(step, percent)
            took = self._seconds(graph)
            spent += _RUNS * took
            if took < least and took < _WORTH * own and agree(found, wanted, _LEFT):
                least, self.chosen[rows] = took, percent
        return spent

    def _leave(self, error: DriverError | CaptureError) -> None:
        self.chosen = {}
        print(f"{_LEFT}: {error}", file=sys.stderr, flush=True)
