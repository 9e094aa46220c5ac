"""The router's end of a channel, for trio: never blocks; one descriptor wakes it for all shards."""

from __future__ import annotations

import os
import time

import trio

from tgi_trio.errors import RingFull
from tgi_trio.ipc.channel import End
from tgi_trio.ipc.control import ControlPage
from tgi_trio.ipc.doorbell import AwakeBudget, drain, spin_while
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.fence import find_ordering

_STARVE_NS = 1_000_000  # while it spins, the router runs its other tasks at least this often
_FULL_POLL_S = 0.001


class ReplyBell:
    """One eventfd for the replies of any number of shards. A context manager.

    Only one task at a time may wait; after each wake-up it has to drain every end.
    """

    def __init__(self, *, spin_us: int = 0, poll_us: int = 0) -> None:
        """Choose how long to poll the rings before sleeping; both 0 if cores are scarce.

        `spin_us`: microseconds in a tight loop, in which other tasks do not run. `poll_us`:
        microseconds with one poll per turn of the event loop, in which they do.
        """
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._spin = AwakeBudget(spin_us)
        self._poll = AwakeBudget(poll_us)
        self._ends: list[RouterEnd] = []
        self._asleep = False
        self._yielded = 0  # perf_counter_ns when other tasks last had a turn

    def add(self, end: RouterEnd) -> None:
        """Wake up for this end's replies from now on."""
        self._ends.append(end)
        if self._asleep:  # the sleeping task has set the other shards' flags, but not this one's
            os.eventfd_write(self.fd, 1)

    def remove(self, end: RouterEnd) -> None:
        """Stop waking up for this end."""
        self._ends.remove(end)

    def quiet(self) -> bool:
        """Return whether no end has a reply to read."""
        return all(end.empty() for end in self._ends)

    async def wait(self) -> None:
        """Return when some end may have a reply, or earlier; a checkpoint, except after a spin.

        Sleeps without a timeout: the caller's cancel scope and `watch.wait_for_death` end it.
        """
        quiet = self._ends[0].empty if len(self._ends) == 1 else self.quiet
        if spin_ns := self._spin.take():
            found = spin_while(quiet, spin_ns)
            self._spin.settle(found)
            if found and time.perf_counter_ns() - self._yielded < _STARVE_NS:
                return
        await trio.lowlevel.checkpoint()
        self._yielded = time.perf_counter_ns()
        if quiet() and (poll_ns := self._poll.take()):
            deadline = self._yielded + poll_ns
            while quiet() and time.perf_counter_ns() < deadline:
                await trio.lowlevel.checkpoint()
            self._poll.settle(not quiet())
        if quiet():
            await self._sleep()

    async def _sleep(self) -> None:
        ends = list(self._ends)
        self._asleep = True
        try:
            for end in ends:
                end.flag.set()
            if all(end.empty() for end in ends):
                await trio.lowlevel.wait_readable(self.fd)
                drain(self.fd)
        finally:
            self._asleep = False
            for end in ends:
                end.flag.clear()

    def close(self) -> None:
        """Close the eventfd; a task that waits gets trio.ClosedResourceError."""
        if self.fd >= 0:
            if trio.lowlevel.in_trio_run():
                trio.lowlevel.notify_closing(self.fd)
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> ReplyBell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RouterEnd(End):
    """The upper end of one shard's channel. A context manager that removes it from its bell."""

    def __init__(self, endpoints: Endpoints, bell: ReplyBell) -> None:
        """`endpoints` must have been created with `reply_bell=bell.fd`."""
        page: ControlPage = endpoints.page
        super().__init__(
            page,
            find_ordering(endpoints.spec.ordering),
            reads="reply",
            writes="request",
            bell_fd=endpoints.spec.request_bell,
            describe_peer=page.describe_shard,
        )
        self.bell = bell
        bell.add(self)

    def reserve(self, size: int) -> memoryview | None:
        """Return `size` writable bytes, or None if the ring has no room now. Never blocks.

        Raises ValueError if they can never fit, CorruptRing if the shard has corrupted the ring.
        """
        return self._reserve(size)

    async def send(self, payload: bytes | memoryview, timeout: float) -> None:
        """Send `payload`, waiting at most `timeout` seconds for room; raises RingFull after that.

        For the control path; the hot path uses `try_send`.
        """
        deadline = trio.current_time() + timeout
        while not self.try_send(payload):
            if trio.current_time() >= deadline:
                raise RingFull(
                    self.describe_peer(),
                    f"has made no room for {len(payload)} bytes in {timeout:g} s; "
                    f"{self.writer.free} of {self.writer.capacity} bytes are free",
                )
            await trio.sleep(_FULL_POLL_S)
        await trio.lowlevel.checkpoint()

    async def wait(self) -> None:
        """Wait until some end on the bell, this one or another, may have a reply."""
        await self.bell.wait()

    def close(self) -> None:
        """Leave the bell. The segment belongs to `Endpoints`."""
        self.bell.remove(self)

    def __enter__(self) -> RouterEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
