"""How much of a multiprocessor's memory kernels of few rows have shared, by what their step takes.

A kernel for which the driver wants another carve-out than the present one can begin only where
nothing runs, however early it might. One for all kernels of a step spares that, and takes from
those that would have had more of a cache: an H200 took less time for a row of a 1B model with all
of it shared, more for one of 8B, and wanted another share for four rows. So it is measured for
each number of rows, by whole steps as they are recorded, and the driver decides where that takes
no more. See `graph_nodes.py` for how kernels are told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import torch

from tgi_trio.shard.torch_backend.layers.few_rows import CLASSES, agree
from tgi_trio.shard.torch_backend.recordings.graph_nodes import DriverError
from tgi_trio.shard.torch_backend.recordings.recorded_steps import Compute, Graph, IdleSteps

_TRIED: Final = (100, 72, 44)  # per cent: of the 228 KB that Hopper has, 228, 164 and 100
_MOST_ROWS: Final = CLASSES[-1][-1]  # beyond, few kernels begin before another has ended
_WORTH: Final = 0.99  # of a step's time by the driver's own, from which on another is taken
_MOST_SECONDS: Final = 0.2  # of the device, for all that is tried
_RUNS: Final = 8  # of a step to try one
_LEFT: Final = "shared memory of kernels is left to the driver"


class CarvingCapture(Protocol):
    """Records work as `Capture` does; with a carve-out, in per cent, that its kernels prefer.

    Raises DriverError where they cannot be told so.
    """

    def __call__(
        self, compute: Compute, /, carveout: int | None = None
    ) -> tuple[Graph, torch.Tensor]: ...


class Carveouts:
    """The carve-outs that recordings of few rows have, other than the driver's own."""

    def __init__(self, capture: CarvingCapture, seconds: Callable[[Graph], float]) -> None:
        """`seconds`: the least that a replay takes on the device, of several."""
        self._capture = capture
        self._seconds = seconds
        self.chosen: dict[int, int] = {}  # per cent, by rows

    def choose(self, sizes: Iterable[int], idle: IdleSteps) -> None:
        """Find the carve-outs by which steps of so many rows take a hundredth less.

        `sizes`: of what will be recorded, of which the fewest rows go first: as many as there is
        time for. What has been chosen before is forgotten.
        """
        self.chosen = {}
        left = _MOST_SECONDS
        try:
            for rows in sorted(size for size in sizes if size <= _MOST_ROWS):
                left -= self._choose(rows, idle(rows), left)
                if left <= 0:
                    return
        except DriverError as error:
            self._leave(error)

    def record(self, rows: int, compute: Compute) -> tuple[Graph, torch.Tensor]:
        """Record a step of so many rows, by what has been chosen for them."""
        chosen = self.chosen.get(rows)
        if chosen is not None:
            try:
                return self._capture(compute, chosen)
            except DriverError as error:
                self._leave(error)
        return self._capture(compute)

    def _choose(self, rows: int, step: Compute, left: float) -> float:
        """Choose for `rows`; return the seconds of the device that it took, `left` at most."""
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

    def _leave(self, error: DriverError) -> None:
        self.chosen = {}
        print(f"{_LEFT}: {error}", file=sys.stderr, flush=True)
