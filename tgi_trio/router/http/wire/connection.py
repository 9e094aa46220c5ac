"""One client connection: bytes in, bytes out, bounded sends, and disconnects noticed at once.

It does not interpret the bytes. What it adds to a plain stream:

* a send without progress is given up after `send_timeout`, so that nothing, least of all shutdown,
  waits for ever for a client that does not read;
* while the socket has room, bytes are written without a lock and without a pass of the scheduler;
* for a large body, the reader wakes only when many bytes have arrived, and receives them directly
  into the memory where they stay;
* one task per connection watches for idleness, whatever the number of requests;
* closing lingers, so that a client that is still sending its body can read the answer instead of a
  reset.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from tgi_trio.router.http.wire.idle import IdleConnections, IdleWatch
from tgi_trio.router.http.wire.pace import LoopPace
from tgi_trio.router.http.wire.readiness import Readiness
from tgi_trio.router.http.wire.transport import SEND_TIMEOUT, inner_socket

_RECEIVED = 1 << 16  # bytes received from the socket at once
_MOST_RECEIVED = 1 << 18  # bytes at once after a full read, since each turn of the loop has a cost

# For bytes that are received in place: how many are worth a turn of the loop, and the most that are
# received in one, which takes half a millisecond.
_WORTH = 1 << 20
_MOST_WRITTEN = 1 << 21

# Larger bodies are sent in pieces of this size, each with `send_timeout` to leave.
_PIECE = 1 << 16

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST and forgets unsent bytes

_HANDSHAKE_TIMEOUT = 10.0  # seconds for TLS

PeerAddress = tuple[str, int]


class BodyMemory(Protocol):
    """Memory into which the bytes of a body are received directly."""

    @property
    def wanted(self) -> int:
        """How many of the next bytes may be received in place."""

    async def ready(self) -> None:
        """Wait until more may be received."""

    def room(self, most: int) -> list[memoryview]:
        """Return where to write up to `most` bytes; empty: they are to be passed to `take`."""

    async def fill(self, count: int) -> bool:
        """Take note of `count` bytes written to `room`; return whether more may come."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Timeouts of a connection, in seconds."""

    send_timeout: float = SEND_TIMEOUT  # a client that reads nothing for so long is treated as gone
    head_timeout: float = 75.0  # for a request's head, and for the first one to begin
    # After we close, what the client still sends is read until it sends nothing for so long, and
    # for so long at most: many a client reads its answer only when it has sent everything.
    linger: float = 2.0
    longest_linger: float = 30.0


class Connection:
    """One accepted connection; see the module's docstring."""

    def __init__(
        self,
        stream: Any,  # trio.SocketStream or trio.SSLStream
        limits: ConnectionLimits,
        keep_alive_timeout: float,  # seconds that it may be idle between two requests
        draining: trio.Event,  # set when the server shuts down
        waiting: IdleConnections,  # all connections that wait for another request
        pace: LoopPace,  # of the loop: many clients may send something, or leave, at a time
        readiness: Readiness,  # the same
    ) -> None:
        self.stream = stream
        self.limits = limits
        self.draining = draining
        self.idle_watch = IdleWatch(draining, keep_alive_timeout, limits.head_timeout, waiting)
        self.plain: trio.SocketStream | None = (
            stream if isinstance(stream, trio.SocketStream) else None
        )
        self.protocol = "http/1.1"  # or what TLS has negotiated (ALPN)
        self.addresses: tuple[PeerAddress | None, PeerAddress | None] = (
            None,
            None,
        )  # client, server
        self.breathe = pace.breathe
        self._readiness = readiness
        self._on_end: Callable[[], Awaitable[None]] | None = None
        self._say_goodbye: Callable[[], Awaitable[None]] | None = None
        self._send_lock = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._reader: trio.lowlevel.Task | None = None
        self._reading = trio.CancelScope()
        self._room = _RECEIVED  # most bytes to receive next
        self._inner = None if self.plain is None else inner_socket(self.plain.socket)
        self._least = 1  # bytes that must arrive before the kernel wakes the reader
        self._holds = False  # bytes that have been received and wait for a young turn
        self._lingering = False  # our side is closed, and the client may still be sending

    async def run(self, speak: Callable[[Connection], Awaitable[None]]) -> None:
        """Do the TLS handshake, if any, and have `speak` serve; then close the connection."""
        try:
            if not (self.plain or await self._shake_hands()):
                return
            sock = self._transport_stream().socket
            try:
                self.addresses = _address(sock.getpeername()), _address(sock.getsockname())
            except OSError:
                return  # disconnected already
            async with trio.open_nursery() as self._nursery:
                self.idle_watch.begin()
                self._nursery.start_soon(self.idle_watch.run, self.hang_up, self.has_unread)
                await speak(self)
                self.idle_watch.end()
                await self.end()
        finally:
            self.idle_watch.end()  # also when cancelled
            try:
                await self._close_now()
            finally:  # they refer to this connection: no garbage may be left to be looked for
                self._on_end = self._say_goodbye = self._nursery = None

    async def _shake_hands(self) -> bool:
        try:
            with trio.fail_after(_HANDSHAKE_TIMEOUT):
                await self.stream.do_handshake()
        except (trio.BrokenResourceError, trio.TooSlowError):
            return False
        self.protocol = self.stream.selected_alpn_protocol() or self.protocol
        return True

    def _transport_stream(self) -> trio.SocketStream:
        found: trio.SocketStream = self.plain or self.stream.transport_stream
        return found

    def spawn(self, function: Callable[[], Awaitable[None]]) -> None:
        """Run `function` as a task of this connection. Raises RuntimeError before `run`."""
        if self._nursery is None:
            raise RuntimeError("the connection does not run")
        self._nursery.start_soon(function)

    def on_end(
        self,
        callback: Callable[[], Awaitable[None]],
        say_goodbye: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Have `callback` called, perhaps more than once, when the connection has ended.

        `say_goodbye` closes it for us when it is idle.
        """
        self._on_end, self._say_goodbye = callback, say_goodbye

    async def end(self) -> None:
        """Call the callback of `on_end`: the connection has ended."""
        if self._on_end is not None:
            await self._on_end()

    # ---- sending ------------------------------------------------------------------------------

    async def send(self, data: bytes) -> None:
        """Send all of `data`; if the client has left, call the callback of `on_end`."""
        if not data:
            return
        try:
            sent = 0 if self._send_lock.locked() else self._send_now(data)
            if sent != len(data):
                # Shielded, since half a frame would break the connection; and bounded in time.
                with trio.CancelScope(shield=True):
                    async with self._send_lock:
                        await self._send_patiently(memoryview(data)[sent:])
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self.end()

    def _send_now(self, data: bytes) -> int:
        """Write as much as the socket takes without waiting; return the number of bytes."""
        if self.plain is None:
            return 0
        try:
            return os.write(self.plain.socket.fileno(), data)
        except BlockingIOError:
            return 0

    async def _send_patiently(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE):
            with trio.move_on_after(self.limits.send_timeout) as scope:
                await self.stream.send_all(data[start : start + _PIECE])
            if scope.cancelled_caught:
                self.abort()
                raise trio.ClosedResourceError("the client stopped reading")

    def abort(self) -> None:
        """Reset the connection at once, which wakes every task that waits on it.

        Synchronous, idempotent.
        """
        stream = self._transport_stream()
        if stream.socket.fileno() != -1:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._forget()
            stream.socket.close()

    def _forget(self) -> None:
        """Wake the reader, as the socket is about to be closed."""
        if self._inner is not None:
            self._readiness.forget(self._inner)

    # ---- receiving ----------------------------------------------------------------------------

    async def read(
        self, take: Callable[[bytes], Awaitable[bool]], memory: BodyMemory | None = None
    ) -> None:
        """Pass received bytes to `take`, until the client leaves, we close or `take` is False.

        Bytes that `memory` wants are received into it instead, on connections without TLS.
        """
        self._reader = trio.lowlevel.current_task()
        try:
            with trio.CancelScope() as self._reading:
                while not self._lingering:
                    if memory is not None and memory.wanted and self._inner is not None:
                        more = await self._read_into(memory, self._inner, take)
                    else:
                        data = await self._receive()
                        more = bool(data) and await take(data)
                    if not more:
                        break
            if self._lingering:
                with trio.move_on_after(self.limits.longest_linger):
                    while await self._drop():
                        pass
        finally:
            self._reader = None

    async def _drop(self) -> bool:
        """Drop what the client still sends; return whether more may come soon."""
        with trio.move_on_after(self.limits.linger):
            return bool(await self._receive())
        return False

    async def _read_into(
        self, memory: BodyMemory, sock: socket.socket, take: Callable[[bytes], Awaitable[bool]]
    ) -> bool:
        """Receive the next bytes, most of them into `memory`; return whether more may come."""
        try:
            self._wake_for(min(memory.wanted, _WORTH))
            await self._readiness.wait(sock)
            await memory.ready()
            if room := memory.room(_MOST_WRITTEN):
                count = _receive_into(room, sock)
                return count > 0 and await memory.fill(count)
            data = sock.recv(_RECEIVED)
        except BlockingIOError:
            return True
        except (OSError, trio.ClosedResourceError):
            return False
        return bool(data) and await take(data)

    def _wake_for(self, least: int) -> None:
        """Have the kernel wake the reader only when `least` bytes have arrived, or the end.

        Each wake costs a turn of the loop, and a body of megabytes may arrive in a thousand
        packets.
        """
        if self._inner is not None and least != self._least:
            self._inner.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def has_unread(self) -> bool:
        """Return whether bytes have arrived that nobody has taken, TLS's own among them."""
        if self._holds:
            return True
        sock = inner_socket(self._transport_stream().socket)
        try:
            return sock is not None and bool(sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    async def _receive(self) -> bytes:
        """Return the next bytes, when the turn of the loop is young; none: the client has left."""
        try:
            self._wake_for(1)
            if self._inner is None:
                data = bytes(await self.stream.receive_some(self._room))
                self._holds = bool(data)
                try:
                    await self.breathe()
                finally:
                    self._holds = False
            else:
                data = await self._receive_plain(self._inner)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self.breathe()  # a step may have found many that have left at one time
            return b""
        self._room = _RECEIVED if len(data) < _RECEIVED else _MOST_RECEIVED
        return data

    async def _receive_plain(self, sock: socket.socket) -> bytes:
        """Do so without TLS. Raises OSError and trio.ClosedResourceError."""
        while True:
            await self._readiness.wait(sock)
            await self.breathe()
            try:
                return sock.recv(self._room)
            except BlockingIOError:
                continue

    # ---- closing ------------------------------------------------------------------------------

    async def close(self, linger: bool = False) -> None:
        """Close the connection. Idempotent.

        `linger`: the client may still be sending; close so that it can read the answer.
        """
        if self._reader is None or not linger:
            await self._close_now()
            return
        # The reader continues for a moment: closing now, with unread bytes in the socket's buffer,
        # would send a reset that can overtake our answer.
        self._lingering = True
        with contextlib.suppress(OSError):
            self._transport_stream().socket.shutdown(socket.SHUT_WR)
        if trio.lowlevel.current_task() is not self._reader:
            self._reading.cancel()

    async def _close_now(self) -> None:
        try:
            if self.plain is not None:
                with contextlib.suppress(
                    trio.BrokenResourceError, trio.BusyResourceError, trio.ClosedResourceError
                ):
                    await self.plain.send_eof()
        finally:  # also when cancelled: the descriptor is not left to whoever collects garbage
            self._forget()
            await self.stream.aclose()

    async def hang_up(self) -> None:
        """Close an idle connection."""
        with trio.CancelScope(shield=True):
            if self._say_goodbye is not None:
                await self._say_goodbye()
                return
            await self.end()
            await self._close_now()


def _receive_into(room: list[memoryview], sock: socket.socket) -> int:
    """Receive from a socket into `room`; return the number of bytes, 0 at the end.

    The views of `room` are released, since its memory may move. Raises OSError.
    """
    try:
        return sock.recvmsg_into(room)[0]
    finally:
        for view in room:
            view.release()


def _address(name: Any) -> PeerAddress | None:
    """Return the host and port of a socket's address; None for a Unix socket."""
    return (name[0], name[1]) if isinstance(name, tuple) else None
