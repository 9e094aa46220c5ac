"""Spreads long computations over turns of the router's event loop, so that streams need not wait.

A turn is everything that runs between two polls of the sockets. Without this, requests that become
ready together would all be prepared in the same turn, a millisecond or two each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

_MOST_S: Final = 1e-3  # age of a turn from which no long computation is begun in it
_TURNS: Final = 64  # most turns that a computation is put off


class LoopPace(trio.abc.Instrument):
    """Measures the turns of the loop in which `watching` runs; elsewhere `breathe` never waits."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._began = math.inf  # when the current turn did

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the turns of this loop within the block."""
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)
            self._began = math.inf

    def after_io_wait(self, timeout: float) -> None:
        """Called by trio: a turn begins."""
        self._began = self._clock()

    async def breathe(self) -> None:
        """Wait for a young turn; to be called before a long computation.

        It is a trio checkpoint only if it has to wait.
        """
        for _ in range(_TURNS):
            if self._clock() - self._began < _MOST_S:
                return
            await trio.lowlevel.checkpoint()
