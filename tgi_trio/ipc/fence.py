"""Memory ordering from Python: which fence this machine has, if any.

Two orders matter to the rings.

*Publish*: a frame's bytes before the head that announces it, and the head before the bytes on the
reading side. x86-64 keeps both by itself (stores are never reordered with stores, loads never with
loads); weaker machines need a fence.

*Full*: the head before the look at the reader's sleeping word, and the sleeping word before the
reader's last look at the head (Dekker's pattern). Every machine reorders a store with a later
load, x86-64 too, also from interpreted code; without this fence a wake-up gets lost now and then.

| fence | machines | why it is one |
|---|---|---|
| `lock` | x86-64 | acquiring a free `threading.Lock` is an atomic exchange, a full barrier there |
| `libatomic` | all | `atomic_thread_fence(seq_cst)` of GCC's runtime, called through ctypes |
| `none` | x86-64 | no fence: writers ring for every frame and readers ask for it |
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass

Fence = Callable[[], None]

_SEQ_CST = 5  # memory_order_seq_cst, the same number in every C11 implementation
_TSO_MACHINES = frozenset({"x86_64", "amd64"})


@dataclass(frozen=True)
class Ordering:
    """The fences of one process. `full` None: always ring. `publish` None: the machine is TSO."""

    name: str
    full: Fence | None
    publish: Fence | None


def orderings(machine: str | None = None) -> tuple[Ordering, ...]:
    """Return what this process can use, best first; never empty.

    Raises RuntimeError on a machine that is not x86-64 and has no libatomic: there the payload
    could become visible after the head, and no amount of ringing repairs that.
    """
    tso = (machine or platform.machine()).lower() in _TSO_MACHINES
    libatomic = _libatomic_fence()
    found = []
    if tso:
        found.append(Ordering("lock", _lock_fence(), None))  # 56 ns; the ctypes call takes 111
    if libatomic is not None:
        found.append(Ordering("libatomic", libatomic, None if tso else libatomic))
    if tso:
        found.append(Ordering("none", None, None))
    if not found:
        raise RuntimeError(
            f"{platform.machine()} needs a memory fence and libatomic.so.1 is not installed; "
            "install it (Debian: libatomic1, Fedora: libatomic)."
        )
    return tuple(found)


def find_ordering(name: str) -> Ordering:
    """Return the ordering that a peer has chosen, or the most conservative one if not available."""
    found = orderings()
    return next((ordering for ordering in found if ordering.name == name), found[-1])


def choose_ordering(holds: Callable[[Ordering], bool] | None = None) -> Ordering:
    """Return the first ordering for which `holds` (a self-test such as `litmus.holds`) is true.

    Without a self-test the first one is chosen. The last one is not tested: there is no other.
    """
    found = orderings()
    for ordering in found[:-1]:
        if holds is None or holds(ordering):
            return ordering
    return found[-1]


def _lock_fence() -> Fence:
    # One lock per end of a channel: it is never contended, so acquire() is always the fast path.
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release  # half the time of a `with`

    def fence() -> None:
        acquire()
        release()

    return fence


def _libatomic_fence() -> Fence | None:
    try:
        # PyDLL keeps the GIL: dropping it costs more than the fence itself.
        function = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int]
    function.restype = None

    def fence() -> None:
        function(_SEQ_CST)

    return fence
