"""The ends of a channel (two rings and two doorbells): their common base, and the blocking ends.

The router creates `Endpoints` for each shard and keeps the upper, commanding end
(`router_end.RouterEnd`, for trio). The shard attaches the lower end, `ShardEnd`, from a spec on its
command line. Rank 0 of several ranks attaches a `LeaderEnd` for each follower: the upper end of
that channel, without an event loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from tgi_trio.errors import PeerGone, RingFull
from tgi_trio.ipc import robust
from tgi_trio.ipc.control import ControlPage, Vitals
from tgi_trio.ipc.doorbell import Bell, BlockingWaiter, SleepFlag
from tgi_trio.ipc.endpoints import ChannelSpec
from tgi_trio.ipc.fence import Ordering, find_ordering
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.ring import RingReader, RingWriter
from tgi_trio.ipc.segment import Segment

Found = TypeVar("Found")

_FULL_POLL_S = 0.001  # how often a blocked writer looks whether its reader has made room


class End:
    """One end of a channel: a reader, a writer, and the bell of the other side."""

    def __init__(
        self,
        page: ControlPage,
        ordering: Ordering,
        *,
        reads: str,
        writes: str,
        bell_fd: int,
        describe_peer: Callable[[], str],
    ) -> None:
        """`reads` and `writes` name the rings; `bell_fd` is the peer's eventfd."""
        self.page = page
        self.describe_peer = describe_peer
        self.reader = RingReader(page.ring(reads), ordering.publish, describe_peer)
        self.writer = RingWriter(page.ring(writes), ordering.publish, describe_peer)
        self.flag = SleepFlag(page.sleeping(reads), ordering)
        self._bell = Bell(bell_fd, page.sleeping(writes), ordering)
        # Bound methods save a Python call on the hot path.
        self.try_receive: Callable[[], memoryview | None] = self.reader.try_read
        self.release: Callable[[], None] = self.reader.release
        self.empty: Callable[[], bool] = self.reader.empty
        self._reserve = self.writer.reserve
        self._commit = self.writer.commit
        self._ring = self._bell.ring_if_asleep

    def commit(self) -> None:
        """Publish what was reserved and wake the peer if it sleeps."""
        self._commit()
        self._ring()

    def try_send(self, payload: bytes | memoryview) -> bool:
        """Copy and publish `payload`; returns False if the ring has no room now. Never blocks.

        Of one that is longer than half the ring parts may have been published then: it has to be
        given again until this is True, before any other. Raises ValueError if another is given,
        CorruptRing if the peer has corrupted the ring.
        """
        sent = self.writer.try_write(payload)
        if sent or len(payload) > self.writer.max_payload:
            self._ring()
        return sent

    @property
    def max_payload(self) -> int:
        """Bytes of the longest frame that goes in one piece."""
        return self.writer.max_payload

    @property
    def vitals(self) -> Vitals:
        """(heartbeat, phase, step, pid) of the shard at the lower end."""
        return self.page.vitals

    def check(self) -> None:
        """Raise CorruptRing if a ring's counters are impossible."""
        self.reader.check()
        self.writer.check()


class BlockingEnd(End):
    """An end in a process without an event loop."""

    def __init__(
        self, spec: ChannelSpec, page: ControlPage, *, upper: bool, describe_peer: Callable[[], str]
    ) -> None:
        """`upper`: the commanding end, which writes requests and reads replies."""
        ordering = find_ordering(spec.ordering)
        bells = {"request": spec.request_bell, "reply": spec.reply_bell}
        reads, writes = ("reply", "request") if upper else ("request", "reply")
        super().__init__(
            page,
            ordering,
            reads=reads,
            writes=writes,
            bell_fd=bells[writes],
            describe_peer=describe_peer,
        )
        self.spec = spec
        self._waiter = BlockingWaiter(
            bells[reads], spec.death, self.flag, self.reader.empty, spec.spin_us
        )

    def wait(self, timeout: float | None) -> bool:
        """Block until a frame may be there (True), or for `timeout` seconds at most (False).

        Spins for the spec's `spin_us` first. May return False early, after a spurious wake-up.
        Raises PeerGone when the router has died and everything that it sent has been read.
        """
        try:
            return self._waiter.wait(timeout)
        except ConnectionResetError:
            raise PeerGone(
                f"router (pid {self.spec.router_pid})", "its end of the death pipe has closed"
            ) from None

    def reserve(self, size: int) -> memoryview:
        """Return `size` writable bytes, waiting for the peer to make room if it must.

        Raises RingFull when the peer makes none for `full_timeout_ms`, PeerGone when the router
        dies meanwhile, ValueError when `size` can never fit in one piece.
        """
        view = self._reserve(size)
        return self._insist(lambda: self._reserve(size), size) if view is None else view

    def send(self, payload: bytes | memoryview) -> None:
        """Copy and publish `payload`, of any length; waits and raises as `reserve()` does."""
        if not self.try_send(payload):
            self._insist(lambda: self.try_send(payload) or None, len(payload))

    def _insist(self, attempt: Callable[[], Found | None], size: int) -> Found:
        """Return what `attempt` does once the peer has made room for `size` bytes."""
        sent, patience = self.writer.sent, self.spec.full_timeout_ms / 1000
        deadline = time.monotonic() + patience
        while (found := attempt()) is None:
            self._on_full()
            if self.writer.sent != sent:  # room for another part
                sent, deadline = self.writer.sent, time.monotonic() + patience
            if time.monotonic() > deadline:
                raise RingFull(
                    self.describe_peer(),
                    f"has made no room for {size} bytes in "
                    f"{patience:g} s; {self.writer.free} of "
                    f"{self.writer.capacity} bytes are free",
                )
            if self._waiter.peer_died_within(_FULL_POLL_S):
                raise PeerGone(
                    f"router (pid {self.spec.router_pid})", "it died while its ring was full"
                )
        return found

    def _on_full(self) -> None:
        """Called about every millisecond while the ring stays full."""


class ShardEnd(BlockingEnd):
    """The lower end: receives commands, sends replies, writes the shard's vital words."""

    def __init__(self, spec: ChannelSpec, page: ControlPage) -> None:
        """Use `attach`."""
        super().__init__(
            spec, page, upper=False, describe_peer=lambda: f"router (pid {spec.router_pid})"
        )
        self._vitals = page.vital_words
        self._heartbeat = 0
        self._mutex: robust.RobustMutex | None = None

    @classmethod
    def attach(cls, spec_text: str) -> ShardEnd:
        """Map the segment that `spec_text` names; raises ProtocolMismatch, ValueError."""
        spec = ChannelSpec.parse(spec_text)
        end = cls(spec, ControlPage(Segment.open(spec.segment), spec.rank))
        end._vitals[3] = os.getpid()
        end.beat(0, Phase.STARTING)
        return end

    def beat(self, step: int, phase: int) -> None:
        """Update heartbeat, phase and step: three stores, no system call."""
        self._heartbeat += 1
        vitals = self._vitals
        vitals[2] = step
        vitals[1] = phase
        vitals[0] = self._heartbeat

    def hold_alive_mutex(self) -> None:
        """Take the robust mutex whose release tells the router of our death.

        Call from the main thread: the mutex is released when the *thread* that holds it ends.
        Where libc has no robust mutexes this does nothing, and the router relies on its pidfd.
        """
        if not robust.available():
            return
        self._mutex = self.page.alive_mutex()
        self._mutex.hold()
        self._vitals[4] = 1

    def close(self) -> None:
        """Release the mutex and unmap; not needed before the process exits."""
        if self._mutex is not None:
            self._vitals[4] = 0
            self._mutex.let_go()
            self._mutex = None
        self.page.segment.close()

    def _on_full(self) -> None:
        # A shard that waits for a slow router is alive: without this it would count as stalled.
        self._heartbeat += 1
        self._vitals[0] = self._heartbeat


class LeaderEnd(BlockingEnd):
    """The upper end without an event loop: rank 0's, to one of its followers."""

    def __init__(self, spec: ChannelSpec, page: ControlPage) -> None:
        """Use `attach`."""
        super().__init__(spec, page, upper=True, describe_peer=page.describe_shard)
        self.incarnation = page.incarnation

    @classmethod
    def attach(cls, spec_text: str) -> LeaderEnd:
        """Map the segment that `spec_text` names; raises ProtocolMismatch, ValueError."""
        spec = ChannelSpec.parse(spec_text)
        return cls(spec, ControlPage(Segment.open(spec.segment), spec.rank))

    def close(self) -> None:
        """Unmap."""
        self.page.segment.close()
