"""The ends of a channel between two machines: the ring's frames, over a connection.

A frame is one word with its length, then the bytes, padded to 8: as it lies in a ring, so both ends
read it in place. Who is at the other end has been proven before (`peering.py`), and a machine that
vanishes is the kernel's to notice: it asks the other one's, whatever the processes are busy with.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from tgi_trio.errors import CorruptRing, PeerGone, RingFull
from tgi_trio.ipc.ring import WORD, pad_size

GONE_S: Final = 4  # seconds without a sign of the other machine after which it counts as gone
_FIRST_BUFFER: Final = 2**16  # bytes; it grows with the frames that come
_FULL_POLL_S: Final = 0.5  # how often a blocked writer says that it lives
_PREFIX: Final = "tcp:"


@dataclass(frozen=True)
class TcpSpec:
    """What an end needs to attach: text on a command line; the descriptor is inherited."""

    socket: int  # descriptor of a connection whose other end is known
    rank: int  # at the lower end
    incarnation: int
    largest: int  # bytes of a frame at most
    full_timeout_ms: int = 30_000  # how long a writer waits for a reader that makes no room

    def text(self) -> str:
        """Return the spec as one word without spaces; no `ChannelSpec` begins as it does."""
        return _PREFIX + ",".join(f"{name}={value}" for name, value in vars(self).items())

    @staticmethod
    def is_one(text: str) -> bool:
        """Return whether a spec is of this kind."""
        return text.startswith(_PREFIX)

    @classmethod
    def parse(cls, text: str) -> TcpSpec:
        """Read `text()` back; raises ValueError when it is not ours."""
        pairs = dict(item.partition("=")[::2] for item in text.removeprefix(_PREFIX).split(","))
        names = tuple(cls.__dataclass_fields__)
        if not cls.is_one(text) or tuple(pairs) != names:
            raise ValueError(f"spec {text!r}; expected {_PREFIX} and the fields {', '.join(names)}")
        return cls(**{name: int(value) for name, value in pairs.items()})


class Optioned(Protocol):
    """What a socket's options are set on: the standard library's, or trio's."""

    def setsockopt(self, level: int, optname: int, value: int, /) -> None: ...


def prepare_connection(connection: Optioned) -> None:
    """Have frames leave at once, and a machine that vanishes be noticed after `GONE_S` seconds.

    Both by the kernels alone, so a process that is busy, or stopped, does not count as gone.
    """
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, GONE_S - 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000),
    )
    for level, name, value in options:
        connection.setsockopt(level, name, value)


class FrameSocket:
    """Frames over a connection, without ever blocking: the part that all ends share."""

    def __init__(
        self, connection: socket.socket, largest: int, describe_peer: Callable[[], str]
    ) -> None:
        """Take `connection` over; frames of more than `largest` bytes are neither sent nor read."""
        connection.setblocking(False)
        self.connection = connection
        self.max_payload = largest
        self.describe_peer = describe_peer
        self._data = memoryview(bytearray(_FIRST_BUFFER))
        self._start = self._end = 0  # what has come and is not released
        self._unsent = memoryview(b"")

    def try_receive(self) -> memoryview | None:
        """Return the next frame, valid until `release`; None when it is not there yet.

        Raises PeerGone when the other end has closed, CorruptRing for a length that cannot be true.
        """
        while self._end - self._start < (wanted := self._wanted()):
            if not self._read(wanted):
                return None
        size = self._length()
        return self._data[self._start + WORD : self._start + WORD + size]

    def release(self) -> None:
        """Give the frame's bytes back."""
        self._start += pad_size(self._length())
        if self._start == self._end:
            self._start = self._end = 0

    def empty(self) -> bool:
        """Return whether no whole frame has come yet, without asking the kernel."""
        return self._end - self._start < self._wanted()

    def try_send(self, payload: bytes | memoryview) -> bool:
        """Send a frame; False when the one before has not left yet. Never blocks.

        Raises PeerGone when the other end has closed, ValueError when it is too large.
        """
        size = len(payload)
        if size > self.max_payload:
            raise ValueError(f"a frame of {size} bytes; at most {self.max_payload} are sent")
        if not self.flush():
            return False
        padding = bytes(-size % WORD)
        parts = (size.to_bytes(WORD, "little"), payload, padding)
        sent = self._send(lambda: self.connection.sendmsg(parts))
        if sent < WORD + size + len(padding):
            self._unsent = memoryview(b"".join(parts))[sent:]
        return True

    def flush(self) -> bool:
        """Send what has not left; return whether nothing is left."""
        while self._unsent:
            sent = self._send(lambda: self.connection.send(self._unsent))
            if not sent:
                return False
            self._unsent = self._unsent[sent:]
        return True

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def _length(self) -> int:
        return int.from_bytes(self._data[self._start : self._start + WORD], "little")

    def _wanted(self) -> int:
        """Return how many bytes must be there before the next frame can be read."""
        if self._end - self._start < WORD:
            return WORD
        if (size := self._length()) > self.max_payload:
            raise CorruptRing(
                self.describe_peer(), f"a frame of {size} bytes; at most {self.max_payload} may be"
            )
        return pad_size(size)

    def _read(self, wanted: int) -> bool:
        """Read what is there into room for `wanted` bytes; False when nothing is."""
        there = self._end - self._start
        if self._start + wanted > len(self._data):
            data = self._data
            if wanted > len(data):  # a new one: nobody may look at the old any more, but could
                data = memoryview(bytearray(max(wanted, 2 * len(data))))
            data[:there] = bytes(self._data[self._start : self._end])
            self._data, self._start, self._end = data, 0, there
        try:
            count = self.connection.recv_into(self._data[self._end :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerGone(self.describe_peer(), f"its connection broke: {error}") from error
        if not count:
            raise PeerGone(self.describe_peer(), "it has closed its connection")
        self._end += count
        return True

    def _send(self, send: Callable[[], int]) -> int:
        try:
            return send()
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerGone(self.describe_peer(), f"its connection broke: {error}") from error


class TcpEnd:
    """An end in a process without an event loop: rank 0's to a follower, or a shard's own."""

    def __init__(self, spec: TcpSpec, describe_peer: Callable[[], str]) -> None:
        """Take over the descriptor that `spec` names."""
        self.incarnation = spec.incarnation
        self.describe_peer = describe_peer
        self.writer = FrameSocket(socket.socket(fileno=spec.socket), spec.largest, describe_peer)
        # Bound here: one Python call less on the hot path.
        self.try_receive: Callable[[], memoryview | None] = self.writer.try_receive
        self.release: Callable[[], None] = self.writer.release
        self.try_send: Callable[[bytes | memoryview], bool] = self.writer.try_send
        self._full_timeout = spec.full_timeout_ms / 1000
        self._reserved = bytearray()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(spec.socket, select.POLLIN)
        self._writable.register(spec.socket, select.POLLOUT)

    def wait(self, timeout: float | None) -> bool:
        """Block until a frame may be there (True), or for `timeout` seconds at most (False).

        It may be that the other end has closed, too: `try_receive` raises then.
        """
        if not self.writer.empty():
            return True
        return bool(self._readable.poll(None if timeout is None else timeout * 1000))

    def reserve(self, size: int) -> memoryview:
        """Return `size` writable bytes, which `commit` sends."""
        self._reserved = bytearray(size)
        return memoryview(self._reserved)

    def commit(self) -> None:
        """Send what was reserved; waits and raises as `send` does."""
        self.send(self._reserved)

    def send(self, payload: bytes | bytearray | memoryview) -> None:
        """Send a frame, waiting for the other end to make room if it must.

        Raises RingFull when it makes none for `full_timeout_ms`, PeerGone when it closes meanwhile,
        ValueError when the frame is too large.
        """
        deadline = time.monotonic() + self._full_timeout
        taken = self.try_send(memoryview(payload))
        while not (taken and self.writer.flush()):
            self._on_full()
            if time.monotonic() > deadline:
                raise RingFull(
                    self.describe_peer(),
                    f"has taken no more of a frame of {len(payload)} bytes in "
                    f"{self._full_timeout:g} s",
                )
            self._writable.poll(_FULL_POLL_S * 1000)
            taken = taken or self.try_send(memoryview(payload))

    def close(self) -> None:
        """Close the connection."""
        self.writer.close()

    def _on_full(self) -> None:
        """Called about twice a second while the other end makes no room."""


class TcpShardEnd(TcpEnd):
    """The lower end: commands come and replies go over a connection, signs of life stay here."""

    def __init__(self, spec: TcpSpec, beat: Callable[[int, int], None]) -> None:
        """`beat` tells whoever has started this process how it is doing (`ShardEnd.beat`)."""
        super().__init__(spec, lambda: "the leader" if spec.rank else "the router")
        self._tell = beat
        self._doing = (0, 0)

    def beat(self, step: int, phase: int) -> None:
        """Say "alive, in this phase of this step"."""
        self._doing = (step, phase)
        self._tell(step, phase)

    def _on_full(self) -> None:
        # A shard that waits for a slow reader is alive: without this it would count as stalled.
        self._tell(*self._doing)


def tcp_leader_end(spec_text: str) -> TcpEnd:
    """Return rank 0's end to a follower on another machine; raises ValueError for another spec."""
    spec = TcpSpec.parse(spec_text)
    return TcpEnd(spec, lambda: f"rank {spec.rank} (incarnation {spec.incarnation})")
