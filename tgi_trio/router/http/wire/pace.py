"""Spreads what many tasks do at a time over turns of the event loop, so that streams need not wait.

A turn is everything that runs between two polls of the sockets. Without this, requests that arrive
together would all be read, prepared or forgotten in the same turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

_MOST_S: Final = 1e-3  # age of a turn from which nothing more is begun in it
# Tasks that look, turn by turn, whether they may begin. The others sleep meanwhile: being woken
# costs several microseconds, and there may be thousands.
_LOOKING: Final = 8


class LoopPace(trio.abc.Instrument):
    """Measures the turns of the loop in which `watching` runs; elsewhere `breathe` never waits."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._began = math.inf  # when the current turn did
        self._used = False  # something was begun in it
        self._looking = trio.Semaphore(_LOOKING)  # the first to come is the first to look

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
        self._began, self._used = self._clock(), False

    async def breathe(self) -> None:
        """Wait for a young turn; to be called before what takes long, or what many do at a time.

        Where others make every turn long, one task begins in each. It is a trio checkpoint only if
        it has to wait.
        """
        if self._clock() - self._began < _MOST_S:
            self._used = True
            return
        async with self._looking:
            while self._used and self._clock() - self._began >= _MOST_S:
                await trio.lowlevel.checkpoint()
            self._used = True
