"""Doorbells: wake a reader that sleeps, and only then. The only place in the project that spins.

A reader that finds its ring empty spins for a bounded time, then sets its sleeping word, fences,
looks at the ring once more, and blocks on its eventfd. A writer stores the head, fences, and rings
only if the sleeping word is set. While both are awake there are no system calls.
`STATES` is the protocol as a table; `docs/ipc.md` prints it with the reason for each fence.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from tgi_trio.ipc.fence import Fence, Ordering
from tgi_trio.ipc.layout import ALWAYS, ASLEEP, AWAKE

_MISSES_ALLOWED = 4  # unsuccessful spins in a row before a reader begins to sleep at once
_LONGEST_SKIP = 256  # most waits without spinning before it is tried again

# (who, sees or does, sleeping word before, after, why)
STATES: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "reader",
        "attaches, has a fence",
        "ALWAYS",
        "AWAKE",
        "a segment is born ALWAYS, so a reader that never gets this far is still woken",
    ),
    (
        "reader",
        "attaches, has no fence",
        "ALWAYS",
        "ALWAYS",
        "without a fence its last look at the head could be answered from before its word was seen",
    ),
    (
        "reader",
        "ring empty after spinning: store ASLEEP, **full fence**, look at the head again",
        "AWAKE",
        "ASLEEP",
        "the fence makes the word visible before the head is read: a writer that publishes after "
        "that look is certain to see ASLEEP",
    ),
    (
        "reader",
        "second look finds a frame: do not block",
        "ASLEEP",
        "AWAKE",
        "a bell may still ring; it wakes the next sleep once for nothing",
    ),
    (
        "reader",
        "second look finds nothing: block on the eventfd",
        "ASLEEP",
        "ASLEEP",
        "the bell, the peer's death or the timeout ends it",
    ),
    (
        "reader",
        "woken: read the eventfd, look at the ring",
        "any but ALWAYS",
        "AWAKE",
        "the count of rings means nothing; only the ring says what is there",
    ),
    (
        "writer",
        "store the head, **full fence**, sees AWAKE: do nothing",
        "AWAKE",
        "AWAKE",
        "the fence makes the head visible before the word is read: a reader that goes to sleep "
        "after that read is certain to see the head",
    ),
    (
        "writer",
        "store the head, **full fence**, sees ASLEEP: clear it, then ring",
        "ASLEEP",
        "AWAKE",
        "cleared first: a reader that falls asleep again in between is woken by this very ring",
    ),
    (
        "writer",
        "store the head, sees ALWAYS: ring",
        "ALWAYS",
        "ALWAYS",
        "costs one system call per frame and cannot lose a wake-up",
    ),
    (
        "writer",
        "has no fence: ring whatever the word says",
        "any",
        "unchanged",
        "it could read the word from before its head was visible",
    ),
)


class Bell:
    """The writer's side: wakes the reader if it sleeps."""

    __slots__ = ("_fd", "_fence", "_sleeping")

    def __init__(self, fd: int, sleeping: memoryview, ordering: Ordering) -> None:
        """`fd`: the reader's eventfd, non-blocking. `sleeping`: its word, u64 [1]."""
        self._fd = fd
        self._sleeping = sleeping
        self._fence = ordering.full

    def ring_if_asleep(self) -> None:
        """Call after every publication. No system call unless the reader sleeps."""
        fence = self._fence
        if fence is None:
            self._ring()
            return
        fence()
        state = self._sleeping[0]
        if state != AWAKE:
            if state == ASLEEP:
                self._sleeping[0] = AWAKE
            self._ring()

    def _ring(self) -> None:
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:
            # The eventfd's count is at its maximum, so the reader will wake up anyway. Only a
            # faulty peer can cause that; a blocking eventfd would hang here.
            return


class SleepFlag:
    """The reader's sleeping word."""

    __slots__ = ("_fence", "_sleeping")

    def __init__(self, sleeping: memoryview, ordering: Ordering) -> None:
        """`sleeping`: u64 [1]; set to AWAKE by readers with a fence, to ALWAYS by others."""
        self._sleeping = sleeping
        self._fence: Fence | None = ordering.full
        sleeping[0] = ALWAYS if self._fence is None else AWAKE

    def set(self) -> None:
        """Announce that the reader sleeps; it must check its ring again before it blocks."""
        if self._fence is not None:
            self._sleeping[0] = ASLEEP
            self._fence()

    def clear(self) -> None:
        """Announce that the reader is awake."""
        if self._fence is not None:
            self._sleeping[0] = AWAKE


def drain(fd: int) -> None:
    """Reset a non-blocking eventfd, whether it has been rung or not."""
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return


def spin_while(empty: Callable[[], bool], spin_ns: int) -> bool:
    """Spin while `empty()`, at most `spin_ns` nanoseconds; returns whether it became false.

    Spinning in Python holds the GIL, so the bound matters to this process's other threads.
    """
    clock = time.perf_counter_ns
    deadline = clock() + spin_ns
    while empty():
        if clock() > deadline:
            return False
    return True


class AwakeBudget:
    """Adaptive spinning: how long a reader spins before it sleeps.

    Spinning pays if the peer answers within that time. It never does if the peer shares our core,
    where it cannot run before we sleep, or works for longer; then a spin costs ten times the
    wake-up that it tries to save. After a few misses in a row the reader sleeps at once, and tries
    spinning again only now and then.
    """

    __slots__ = ("_limit_ns", "_misses", "_skip")

    def __init__(self, limit_us: int) -> None:
        """`limit_us`: microseconds to spin at most; 0: never spin."""
        self._limit_ns = limit_us * 1000
        self._misses = 0
        self._skip = 0  # waits left without spinning

    def take(self) -> int:
        """Return the nanoseconds to spin this time, possibly 0."""
        if self._skip:
            self._skip -= 1
            return 0
        return self._limit_ns

    def settle(self, paid: bool) -> None:
        """Note whether spinning has found a frame; only after a `take()` that was not 0."""
        if paid:
            self._misses = 0
            return
        self._misses += 1
        if self._misses >= _MISSES_ALLOWED:
            self._skip = min(_LONGEST_SKIP, 1 << (self._misses - _MISSES_ALLOWED))


def affordable_spin_us(wanted_us: int, shards: int) -> int:
    """Return `wanted_us` if router and shards can have a core each, otherwise 0.

    On a shared core a spinning reader keeps the writer for which it waits from running.
    """
    return wanted_us if len(os.sched_getaffinity(0)) > shards else 0


class BlockingWaiter:
    """The reader's side in a process without an event loop: an eventfd and a death pipe."""

    def __init__(
        self,
        bell_fd: int,
        death_fd: int,
        flag: SleepFlag,
        empty: Callable[[], bool],
        spin_us: int,
    ) -> None:
        """`death_fd`: the read end of a pipe whose other end only the peer holds, -1 for none."""
        self._bell_fd = bell_fd
        self._death_fd = death_fd
        self._flag = flag
        self._empty = empty
        self._awake = AwakeBudget(spin_us)
        self._poll = select.poll()
        self._poll.register(bell_fd, select.POLLIN)
        if death_fd >= 0:
            self._poll.register(death_fd, select.POLLIN)

    def wait(self, timeout: float | None) -> bool:
        """Return True if the ring has a frame, False after `timeout` seconds or a spurious wake-up.

        Raises ConnectionResetError when the peer's end of the death pipe has closed.
        """
        if not self._empty():
            return True
        if timeout != 0 and (spin_ns := self._awake.take()):
            found = spin_while(self._empty, spin_ns)
            self._awake.settle(found)
            if found:
                return True
        self._flag.set()
        if self._empty():
            ready = self._poll.poll(None if timeout is None else timeout * 1000)
        else:
            ready = []
        self._flag.clear()
        for fd, _ in ready:
            if fd == self._bell_fd:
                drain(fd)
            elif self._empty():  # frames that a dead peer has published are read first
                raise ConnectionResetError
        return not self._empty()

    def peer_died_within(self, seconds: float) -> bool:
        """Sleep for `seconds`; returns True early if the peer's end of the death pipe closes."""
        if self._death_fd < 0:
            time.sleep(seconds)
            return False
        death = select.poll()
        death.register(self._death_fd, select.POLLIN)
        return bool(death.poll(seconds * 1000))
