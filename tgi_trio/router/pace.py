"""How long the current turn of the router's event loop has lasted: streams wait until it ends.

A turn is everything that is ready between two looks at the sockets. Requests that become ready
together would all begin in the same turn, each for a millisecond or two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

_MOST_S: Final = 1e-3  # age of a turn from which on nothing long is begun in it
_TURNS: Final = 64  # turns to wait at most


class LoopPace(trio.abc.Instrument):
    """The pace of the loop in which `watching` runs; elsewhere `breathe` never waits."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._began = math.inf  # when the current turn did

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the turns of this loop for the length of the block."""
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
        """Call before a long computation: return at once in a young turn, else in a later one.

        It is a checkpoint only where it waits.
        """
        for _ in range(_TURNS):
            if self._clock() - self._began < _MOST_S:
                return
            await trio.lowlevel.checkpoint()
