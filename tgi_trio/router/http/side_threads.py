"""What takes long and holds the interpreter, beside the loop: large bodies read and rendered.

Python gives one thread at a time the interpreter (GIL), and takes it away only between two
instructions, when somebody has waited for the switch interval. So what runs here has to call
nothing that takes long in one piece, and few may run at a time: the loop waits for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import trio

Result = TypeVar("Result")

# Two, so that a short one need not wait for a long one; more would bring nothing.
_THREADS: Final = 2
_SWITCH_S: Final = 0.0005  # Python's own is 5 ms, for so long the loop would wait each time


class SideThreads:
    """Computes in threads, for all requests of a server."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(_THREADS)

    @property
    def running(self) -> int:
        """How many threads compute, those of clients that have left among them."""
        return self._limiter.borrowed_tokens

    async def run(self, compute: Callable[[], Result]) -> Result:
        """Return what `compute` returns, or raise what it raises. A checkpoint.

        Nothing waits for the thread of a client that has left: its result is dropped.
        """
        return await trio.to_thread.run_sync(compute, abandon_on_cancel=True, limiter=self._limiter)


@contextmanager
def switching_soon() -> Iterator[None]:
    """Have a thread that wants the interpreter get it soon within the block."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
