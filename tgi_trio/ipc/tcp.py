"""The ends of a channel between two machines: the same frames as in a ring, over TCP.

A frame is a word with its length, then the bytes, padded to 8, as in a ring, so both ends read it
in place. The peer has been authenticated before (`peering.py`). The kernels notice when the other
machine vanishes (TCP keep-alive), whatever the processes are busy with.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from tgi_trio.errors import CorruptRing, PeerGone, RingFull, tell_reason
from tgi_trio.ipc.ring import LONGEST, WORD, pad_size

GONE_S: Final = 4  # seconds of silence after which the other machine counts as gone
_FIRST_BUFFER: Final = 2**16  # bytes; grows with the frames received
_KEPT_BUFFER: Final = 2**22  # bytes; a larger one is given back when its frame is released
_FULL_POLL_S: Final = 0.5  # how often a blocked writer sends a heartbeat
_PREFIX: Final = "tcp:"


@dataclass(frozen=True)
class TcpSpec:
    """What an end needs to attach: text on a command line; the descriptor is inherited."""

    socket: int  # descriptor of an authenticated connection
    rank: int  # at the lower end
    incarnation: int
    full_timeout_ms: int = 30_000  # how long a writer waits for a reader that makes no room

    def text(self) -> str:
        """Return the spec as one word without spaces; its prefix tells it from a `ChannelSpec`."""
        return _PREFIX + ",".join(f"{name}={value}" for name, value in vars(self).items())

    @staticmethod
    def is_one(text: str) -> bool:
        """Return whether a spec is of this kind."""
        return text.startswith(_PREFIX)

    @classmethod
    def parse(cls, text: str) -> TcpSpec:
        """Parse what `text()` returns. Raises ValueError."""
        pairs = dict(item.partition("=")[::2] for item in text.removeprefix(_PREFIX).split(","))
        names = tuple(cls.__dataclass_fields__)
        if not cls.is_one(text) or tuple(pairs) != names:
            raise ValueError(f"spec {text!r}; expected {_PREFIX} and the fields {', '.join(names)}")
        return cls(**{name: int(value) for name, value in pairs.items()})


class Optioned(Protocol):
    """A socket of the standard library or of trio."""

    def setsockopt(self, level: int, optname: int, value: int, /) -> None: ...


def prepare_connection(connection: Optioned) -> None:
    """Send frames without delay, and notice after `GONE_S` seconds that a machine has vanished.

    Both are done by the kernels, so a process that is busy or stopped does not count as gone.
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
    """Frames over a connection, without blocking: the common part of all ends."""

    max_payload: Final = LONGEST  # bytes of a frame; there is no ring into which it has to fit

    def __init__(self, connection: socket.socket, describe_peer: Callable[[], str]) -> None:
        """Take over `connection`."""
        connection.setblocking(False)
        self.connection = connection
        self.describe_peer = describe_peer
        self._data = memoryview(bytearray(_FIRST_BUFFER))
        self._start = self._end = 0  # bounds of the received bytes that are not released
        self._unsent = memoryview(b"")

    def try_receive(self) -> memoryview | None:
        """Return the next frame, valid until `release`; None if it has not arrived completely.

        Raises PeerGone if the other end has closed, CorruptRing for an impossible length.
        """
        while self._end - self._start < (wanted := self._wanted()):
            if not self._read(wanted):
                return None
        size = self._length()
        return self._data[self._start + WORD : self._start + WORD + size]

    def release(self) -> None:
        """Free the frame's bytes."""
        self._start += pad_size(self._length())
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._data) > _KEPT_BUFFER:
                self._data = memoryview(bytearray(_FIRST_BUFFER))

    def empty(self) -> bool:
        """Return whether no complete frame has been read yet, without a system call."""
        return self._end - self._start < self._wanted()

    def try_send(self, payload: bytes | memoryview) -> bool:
        """Send a frame; returns False if the previous one is still unsent. Never blocks.

        Raises PeerGone if the other end has closed, ValueError if the frame is too large.
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
        """Send the rest of the last frame; returns whether nothing is left."""
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
        """Return how many bytes are needed before the next frame can be read."""
        if self._end - self._start < WORD:
            return WORD
        if (size := self._length()) > self.max_payload:
            raise CorruptRing(
                self.describe_peer(), f"a frame of {size} bytes; at most {self.max_payload} may be"
            )
        return pad_size(size)

    def _read(self, wanted: int) -> bool:
        """Read what has arrived, with room for `wanted` bytes; returns False if nothing has."""
        there = self._end - self._start
        if self._start + wanted > len(self._data):
            data = self._data
            if wanted > len(data):  # not resized in place: views of the old one may still exist
                data = memoryview(bytearray(max(wanted, 2 * len(data))))
            data[:there] = bytes(self._data[self._start : self._end])
            self._data, self._start, self._end = data, 0, there
        try:
            count = self.connection.recv_into(self._data[self._end :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerGone(
                self.describe_peer(), f"its connection broke: {tell_reason(error)}"
            ) from error
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
            raise PeerGone(
                self.describe_peer(), f"its connection broke: {tell_reason(error)}"
            ) from error


class TcpEnd:
    """An end in a process without an event loop: rank 0's to a follower, or a shard's."""

    def __init__(self, spec: TcpSpec, describe_peer: Callable[[], str]) -> None:
        """Take over the descriptor that `spec` names."""
        self.incarnation = spec.incarnation
        self.describe_peer = describe_peer
        self.writer = FrameSocket(socket.socket(fileno=spec.socket), describe_peer)
        # Bound methods save a Python call on the hot path.
        self.try_receive: Callable[[], memoryview | None] = self.writer.try_receive
        self.release: Callable[[], None] = self.writer.release
        self.try_send: Callable[[bytes | memoryview], bool] = self.writer.try_send
        self._full_timeout = spec.full_timeout_ms / 1000
        self._reserved = bytearray()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(spec.socket, select.POLLIN)
        self._writable.register(spec.socket, select.POLLOUT)

    @property
    def max_payload(self) -> int:
        """Bytes of the longest frame."""
        return self.writer.max_payload

    def wait(self, timeout: float | None) -> bool:
        """Block until a frame may have arrived (True), or for `timeout` seconds at most (False).

        True may also mean that the other end has closed: `try_receive` raises then.
        """
        if not self.writer.empty():
            return True
        return bool(self._readable.poll(None if timeout is None else timeout * 1000))

    def reserve(self, size: int) -> memoryview:
        """Return `size` writable bytes for `commit` to send."""
        self._reserved = bytearray(size)
        return memoryview(self._reserved)

    def commit(self) -> None:
        """Send the reserved bytes; waits and raises as `send` does."""
        self.send(self._reserved)

    def send(self, payload: bytes | bytearray | memoryview) -> None:
        """Send a frame, waiting until the other end has room if necessary.

        Raises RingFull if it has none for `full_timeout_ms`, PeerGone if it closes meanwhile,
        ValueError if the frame is too large.
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
        """Called about twice a second while the other end has no room."""


class TcpShardEnd(TcpEnd):
    """The lower end: commands and replies go over the connection, vitals stay on this machine."""

    def __init__(self, spec: TcpSpec, beat: Callable[[int, int], None]) -> None:
        """`beat`: reports vitals to the process that has started this one (`ShardEnd.beat`)."""
        super().__init__(spec, lambda: "the leader" if spec.rank else "the router")
        self._tell = beat
        self._doing = (0, 0)

    def beat(self, step: int, phase: int) -> None:
        """Report a heartbeat, step and phase."""
        self._doing = (step, phase)
        self._tell(step, phase)

    def _on_full(self) -> None:
        # A shard that waits for a slow reader is alive: without this it would count as stalled.
        self._tell(*self._doing)


def tcp_leader_end(spec_text: str) -> TcpEnd:
    """Return rank 0's end to a follower on another machine. Raises ValueError for a bad spec."""
    spec = TcpSpec.parse(spec_text)
    return TcpEnd(spec, lambda: f"rank {spec.rank} (incarnation {spec.incarnation})")
