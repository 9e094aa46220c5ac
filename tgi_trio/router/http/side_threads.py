"""What takes long and holds the interpreter, beside the loop: large bodies read and rendered.

Python gives one thread at a time the interpreter (GIL), and takes it away only between two
instructions, when somebody has waited for the switch interval. So what runs here has to call
nothing that takes long in one piece, and few may run at a time: the loop waits for all of them.

Freeing is such a call: the last reference to a list of 40,000 tools takes 25 ms to drop. So what a
large request was made of is freed here as well, object by object.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Final, TypeVar

import trio
from msgspec import Struct
from outcome import Outcome

from tgi_trio.process.threads import run_in_thread

Result = TypeVar("Result")

# Two, so that a short one need not wait for a long one; more would bring nothing.
_THREADS: Final = 2
_SWITCH_S: Final = 0.0005  # Python's own is 5 ms, for so long the loop would wait each time


class SideThreads:
    """Computes in threads, for all requests of a server."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(_THREADS)
        self._made: deque[object] = deque()  # what is to be freed
        self._freeing = False  # a thread does
        self._lock = threading.Lock()  # of these two

    @property
    def running(self) -> int:
        """How many threads compute, those of clients that have left among them, or free."""
        return self._limiter.borrowed_tokens + self._freeing

    async def run(self, compute: Callable[[], Result]) -> Result:
        """Return what `compute` returns, or raise what it raises. A checkpoint.

        Nothing waits for the thread of a client that has left: its result is dropped.
        """
        return await run_in_thread(compute, self._limiter)

    def free(self, made: list[object]) -> None:
        """Free what requests were made of, each a tree of lists, dictionaries and records.

        Returns at once, and leaves `made` empty. What others refer to stays.
        """
        with self._lock:
            self._made += made
            made.clear()
            if not self._made or self._freeing:
                return
            self._freeing = True
        trio.lowlevel.start_thread_soon(self._free, Outcome.unwrap, "tgi_trio frees")

    def _free(self) -> None:
        while True:
            with self._lock:
                if not self._made:
                    self._freeing = False
                    return
                root = self._made.popleft()
            parts = _list_parts(root)  # without the lock: the loop takes it
            del root
            while parts:
                parts.popleft()


def _list_parts(root: object) -> deque[object]:
    """Return the lists, dictionaries and records of a tree, each before those that it holds.

    One that is held twice, or by what it holds, is there once.
    """
    parts, fresh, known = deque([root]), deque([root]), {id(root)}
    holds: dict[type, bool] = {}
    while fresh:
        for each in gc.get_referents(fresh.popleft()):
            kind = type(each)
            if kind not in holds:
                holds[kind] = issubclass(kind, list | tuple | dict | Struct) or is_dataclass(kind)
            if holds[kind] and id(each) not in known:
                known.add(id(each))
                parts.append(each)
                fresh.append(each)
    return parts


@contextmanager
def switching_soon() -> Iterator[None]:
    """Have a thread that wants the interpreter get it soon within the block."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
