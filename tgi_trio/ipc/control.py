"""The control page, the first one of a segment: sizes, the shard's vital words, the alive mutex."""

from __future__ import annotations

from typing import NamedTuple

from tgi_trio.errors import ProtocolMismatch
from tgi_trio.ipc import layout, robust
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.ring import RingMemory
from tgi_trio.ipc.segment import Segment


class Vitals(NamedTuple):
    """The shard's last report of itself. Fields are loaded one by one: they may be a beat apart."""

    heartbeat: int
    phase: int
    step: int
    pid: int


class ControlPage:
    """The first page of a segment: sizes, the shard's vital words, the alive mutex."""

    def __init__(self, segment: Segment, rank: int) -> None:
        """Read the sizes. Raises ProtocolMismatch if the segment has another layout than ours."""
        self.segment = segment
        self.rank = rank
        self._identity = segment.words(layout.find_offset("layout_id"), 5)
        self.vital_words = segment.words(layout.find_offset("heartbeat"), 5)
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
        """Write a new control page; called by the creator before anyone else maps the segment."""
        identity = segment.words(layout.find_offset("layout_id"), 5)
        values = (layout.layout_id(), segment.size, request_bytes, reply_bytes, incarnation)
        for i, value in enumerate(values):
            identity[i] = value
        for name in ("request_sleeping", "reply_sleeping"):
            segment.words(layout.find_offset(name))[0] = layout.ALWAYS
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
            head=words(layout.find_offset(f"{name}_head")),
            tail=words(layout.find_offset(f"{name}_tail")),
            data=self.segment.buf[start : start + size],
        )

    def sleeping(self, name: str) -> memoryview:
        """Return the sleeping word (u64 [1]) of the reader of the "request" or "reply" ring."""
        return self.segment.words(layout.find_offset(f"{name}_sleeping"))

    def alive_mutex(self) -> robust.RobustMutex:
        """Return the mutex that the shard holds while it lives."""
        return robust.RobustMutex(self.segment.map, layout.find_offset("alive_mutex"))

    @property
    def vitals(self) -> Vitals:
        """The shard's present vitals."""
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
