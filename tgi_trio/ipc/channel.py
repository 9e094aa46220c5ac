"""Two rings and two doorbells: what both ends of a channel share, and the ends that block.

The router creates an `Endpoints` per shard and keeps the upper end (`router_end.RouterEnd`, the
trio one). The shard attaches the lower end, `ShardEnd`, from one string on its command line. When
several ranks form a group, rank 0 attaches `LeaderEnd`s: the upper end of its followers' channels,
without an event loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tgi_trio.errors import PeerGone, ProtocolMismatch, RingFull
from tgi_trio.ipc import layout, robust
from tgi_trio.ipc.doorbell import Bell, BlockingWaiter, SleepFlag
from tgi_trio.ipc.fence import Ordering, choose_ordering, ordering_named
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.memory import Segment
from tgi_trio.ipc.ring import RingMemory, RingReader, RingWriter

DEFAULT_RING_BYTES = 2 * 2**20
_FULL_POLL_S = 0.001  # how often a blocked writer looks whether its reader has made room


class Vitals(NamedTuple):
    """What the shard last said about itself; four plain loads, so fields may be a beat apart."""

    heartbeat: int
    phase: int
    step: int
    pid: int


class ControlPage:
    """The first page of a segment: sizes, the shard's vital words, the alive mutex."""

    def __init__(self, segment: Segment, rank: int) -> None:
        """Read the sizes. Raises ProtocolMismatch when the segment is not laid out as ours."""
        self.segment = segment
        self.rank = rank
        self._identity = segment.words(layout.offset_of("layout_id"), 5)
        self.vital_words = segment.words(layout.offset_of("heartbeat"), 5)
        found, size, self.request_bytes, self.reply_bytes, self.incarnation = self._identity
        wanted = layout.layout_id()
        if found != wanted or size != segment.size:
            raise ProtocolMismatch(
                f"rank {rank}",
                f"the segment has layout {found:016x} and {size} bytes, expected {wanted:016x} and "
                f"{segment.size}; router and shard must be the same tgi-trio",
            )
        if layout.CONTROL_BYTES + self.request_bytes + self.reply_bytes != size:
            raise ProtocolMismatch(
                f"rank {rank}",
                f"rings of {self.request_bytes} and {self.reply_bytes} bytes in {size} bytes",
            )

    @classmethod
    def format(
        cls, segment: Segment, rank: int, incarnation: int, request_bytes: int, reply_bytes: int
    ) -> ControlPage:
        """Write a fresh control page; by the creator, before anyone else maps the segment."""
        identity = segment.words(layout.offset_of("layout_id"), 5)
        values = (layout.layout_id(), segment.size, request_bytes, reply_bytes, incarnation)
        for i, value in enumerate(values):
            identity[i] = value
        for name in ("request_sleeping", "reply_sleeping"):
            segment.words(layout.offset_of(name))[0] = layout.ALWAYS
        page = cls(segment, rank)
        if robust.available():
            page.alive_mutex().initialise()
        return page

    def ring(self, name: str) -> RingMemory:
        """Return the memory of the "request" or "reply" ring."""
        start, size = layout.CONTROL_BYTES, self.request_bytes
        if name == "reply":
            start, size = start + size, self.reply_bytes
        words = self.segment.words
        return RingMemory(
            head=words(layout.offset_of(f"{name}_head")),
            tail=words(layout.offset_of(f"{name}_tail")),
            data=self.segment.buf[start : start + size],
        )

    def sleeping(self, name: str) -> memoryview:
        """Return the sleeping word (u64 [1]) of the reader of the "request" or "reply" ring."""
        return self.segment.words(layout.offset_of(f"{name}_sleeping"))

    def alive_mutex(self) -> robust.RobustMutex:
        """Return the mutex that the shard holds while it lives."""
        return robust.RobustMutex(self.segment.map, layout.offset_of("alive_mutex"))

    @property
    def vitals(self) -> Vitals:
        """What the shard says about itself right now."""
        heartbeat, phase, step, pid, _ = self.vital_words
        return Vitals(heartbeat, phase, step, pid)

    @property
    def alive_held(self) -> bool:
        """True once the shard holds its alive mutex."""
        return bool(self.vital_words[4])

    def describe_shard(self) -> str:
        """Return rank, pid, phase and step of the shard, for error messages."""
        vitals = self.vitals
        phases = {phase.value: phase.name for phase in Phase}
        return (
            f"rank {self.rank} (pid {vitals.pid}, incarnation {self.incarnation}, phase "
            f"{phases.get(vitals.phase, str(vitals.phase))}, step {vitals.step})"
        )


@dataclass(frozen=True)
class ChannelSpec:
    """What an end needs to attach; travels as text on the command line, `fds` by `pass_fds`."""

    segment: int  # descriptors
    request_bell: int
    reply_bell: int
    death: int  # read end of the death pipe, -1 when there is none
    rank: int
    router_pid: int
    ordering: str  # fence.Ordering.name, chosen once by the router's self-test
    spin_us: int  # how long the blocking reader spins before it sleeps
    full_timeout_ms: int  # how long a writer waits for a reader that makes no room

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that the child must inherit."""
        everything = (self.segment, self.request_bell, self.reply_bell, self.death)
        return tuple(fd for fd in everything if fd >= 0)

    def text(self) -> str:
        """Return the spec as one word without spaces."""
        return ",".join(f"{name}={value}" for name, value in vars(self).items())

    @classmethod
    def parse(cls, text: str) -> ChannelSpec:
        """Read `text()` back; raises ValueError when it is not ours."""
        pairs = dict(item.partition("=")[::2] for item in text.split(","))
        names = tuple(cls.__dataclass_fields__)
        if tuple(pairs) != names:
            raise ValueError(f"channel spec {text!r}; expected the fields {', '.join(names)}")
        ordering = pairs.pop("ordering")
        return cls(ordering=ordering, **{name: int(value) for name, value in pairs.items()})


class Endpoints:
    """Everything one channel consists of, created by the router. A context manager.

    `spec` is for the child; after the spawn `release_child_ends()` closes what only the child
    needs. The write end of the death pipe stays open here as long as the router lives.
    """

    def __init__(self, page: ControlPage, spec: ChannelSpec, death_write: int, bell: int) -> None:
        """Take over all descriptors; `bell` is the reply eventfd when nobody else owns it."""
        self.page = page
        self.spec = spec
        self._own = {spec.request_bell, spec.death, death_write, bell} - {-1}

    @classmethod
    def create(
        cls,
        rank: int,
        incarnation: int,
        *,
        reply_bell: int = -1,
        request_bytes: int = DEFAULT_RING_BYTES,
        reply_bytes: int = DEFAULT_RING_BYTES,
        ordering: Ordering | None = None,
        spin_us: int = 50,
        full_timeout: float = 30.0,
    ) -> Endpoints:
        """Create segment, eventfds and death pipe; `reply_bell` shares an existing eventfd.

        Sizes in bytes, powers of two. Raises SegmentError when memory is not to be had.
        """
        layout.check_ring_bytes("request_bytes", request_bytes)
        layout.check_ring_bytes("reply_bytes", reply_bytes)
        size = layout.CONTROL_BYTES + request_bytes + reply_bytes
        segment = Segment.create(size, label=f"channel of rank {rank}")
        page = ControlPage.format(segment, rank, incarnation, request_bytes, reply_bytes)
        death_read, death_write = os.pipe2(os.O_CLOEXEC)
        own_bell = _new_bell() if reply_bell < 0 else -1
        spec = ChannelSpec(
            segment=segment.fd,
            request_bell=_new_bell(),
            reply_bell=own_bell if reply_bell < 0 else reply_bell,
            death=death_read,
            rank=rank,
            router_pid=os.getpid(),
            ordering=(ordering or choose_ordering()).name,
            spin_us=spin_us,
            full_timeout_ms=round(full_timeout * 1000),
        )
        return cls(page, spec, death_write, own_bell)

    def release_child_ends(self) -> None:
        """Close the descriptors that only the child uses; call after the spawn."""
        self._close({self.spec.death})

    def close(self) -> None:
        """Close everything, the death pipe included: a child that still lives ends itself."""
        self._close(set(self._own))
        self.page.segment.close()

    def _close(self, fds: set[int]) -> None:
        for fd in fds & self._own:
            os.close(fd)
        self._own -= fds

    def __enter__(self) -> Endpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        # Bound here: one Python call less on the hot path.
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
        """Copy and publish `payload`; False when the ring has no room now. Never blocks.

        Raises ValueError when it can never fit, CorruptRing when the peer broke the ring.
        """
        if not self.writer.try_write(payload):
            return False
        self._ring()
        return True

    @property
    def vitals(self) -> Vitals:
        """(heartbeat, phase, step, pid) of the shard at the lower end."""
        return self.page.vitals

    def check(self) -> None:
        """Raise CorruptRing unless both rings' counters can be true."""
        self.reader.check()
        self.writer.check()


class BlockingEnd(End):
    """An end in a process without an event loop."""

    def __init__(
        self, spec: ChannelSpec, page: ControlPage, *, upper: bool, describe_peer: Callable[[], str]
    ) -> None:
        """`upper`: the commanding end, which writes requests and reads replies."""
        ordering = ordering_named(spec.ordering)
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

        Spins for the spec's `spin_us` first. A False without a timeout is a stray ring: ask again.
        Raises PeerGone when the router has died and everything it sent has been read.
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
        dies meanwhile, ValueError when `size` can never fit.
        """
        view = self._reserve(size)
        return self._reserve_slowly(size) if view is None else view

    def send(self, payload: bytes | memoryview) -> None:
        """Copy and publish `payload`; waits and raises as `reserve()` does."""
        self.reserve(len(payload))[:] = payload
        self.commit()

    def _reserve_slowly(self, size: int) -> memoryview:
        deadline = time.monotonic() + self.spec.full_timeout_ms / 1000
        while (view := self._reserve(size)) is None:
            self._on_full()
            if time.monotonic() > deadline:
                raise RingFull(
                    self.describe_peer(),
                    f"has made no room for {size} bytes in "
                    f"{self.spec.full_timeout_ms / 1000:g} s; {self.writer.free} of "
                    f"{self.writer.capacity} bytes are free",
                )
            if self._waiter.peer_died_within(_FULL_POLL_S):
                raise PeerGone(
                    f"router (pid {self.spec.router_pid})", "it died while its ring was full"
                )
        return view

    def _on_full(self) -> None:
        """Called about every millisecond while the ring stays full."""


class ShardEnd(BlockingEnd):
    """The lower end: receives commands, sends replies, says how it is doing."""

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
        """Say "alive, in this phase of this step": three stores, no system call."""
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
        """Let go of the mutex and unmap; the process need not call this before it exits."""
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

    @classmethod
    def attach(cls, spec_text: str) -> LeaderEnd:
        """Map the segment that `spec_text` names; raises ProtocolMismatch, ValueError."""
        spec = ChannelSpec.parse(spec_text)
        return cls(spec, ControlPage(Segment.open(spec.segment), spec.rank))

    def close(self) -> None:
        """Unmap."""
        self.page.segment.close()


def _new_bell() -> int:
    # Both directions are non-blocking: O_NONBLOCK belongs to the open file, which both processes
    # share, and a blocking write to an eventfd that the peer has filled would never return.
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
