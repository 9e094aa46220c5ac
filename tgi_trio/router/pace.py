"""How long a turn of the router's loop has lasted: while it lasts nothing else of it can run.

A turn is all that is ready between two looks at the sockets. Requests that become ready together
would be taken on together, each for a millisecond or two, and streams would wait for all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

_MOST_S: Final = 1e-3  # of a turn, before nobody begins anything long in it
_TURNS: Final = 64  # that somebody waits at most


class LoopPace(trio.abc.Instrument):
    """The pace of the loop in which `watching` runs; elsewhere nobody ever waits."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: in seconds."""
        self._clock = clock
        self._began = math.inf  # of the present turn

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the turns of this loop for the block."""
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
        """Return at once where the turn is young, else in a later one; before a long computation.

        A checkpoint only where it waits.
        """
        for _ in range(_TURNS):
            if self._clock() - self._began < _MOST_S:
                return
            await trio.lowlevel.checkpoint()
