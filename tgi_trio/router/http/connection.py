"""One client connection: hypercorn's TCPServer with bounded sends and a prompt ear for goodbyes.

What differs from hypercorn's own, and why:

* a send that makes no progress is given up after `send_timeout` (hypercorn waits for ever, and so
  does its shutdown);
* bytes go out without a lock or a scheduler pass while the socket takes them, and a whole response
  leaves in one write (`cork`);
* one task per connection watches for idleness, where hypercorn starts and cancels one per request;
* a client that leaves is noticed even behind a pipelined request that waits its turn;
* the application decides whether a client that asks (`Expect: 100-continue`) may send its body;
* closing lingers, so that a client still sending its body reads the answer instead of a reset.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState

# A body larger than this goes out in pieces, each of which has `send_timeout` to leave.
_PIECE = 1 << 16

# Bytes of pipelined requests taken from a client whose current request is still being answered.
_READ_AHEAD = 1 << 18

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST and forgets unsent bytes

_CONTINUE = b"HTTP/1.1 100 "

SEND_TIMEOUT = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Patience with one connection, in seconds."""

    send_timeout: float = SEND_TIMEOUT  # a reader that takes nothing for so long counts as gone
    linger: float = 2.0  # how long a closing connection still reads what the client sends


class Connection(TCPServer):
    """One accepted connection; see the module's docstring for what it changes."""

    def __init__(
        self,
        app: AppWrapper,
        config: Config,
        context: WorkerContext,
        stream: Any,  # trio.SocketStream or trio.SSLStream
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(app, config, context, ConnectionState({}), stream)
        self._idle_watch = IdleWatch(self)
        self.idle_task = self._idle_watch  # type: ignore[assignment]  # what TCPServer calls it
        self.limits = limits
        self.early = bytearray()  # read while a pipelined request waited
        self.plain: trio.SocketStream | None = (
            stream if isinstance(stream, trio.SocketStream) else None
        )
        self.on_leave: Callable[[], None] | None = None  # set by the request being answered
        self._corked: list[bytes] | None = None
        self._block = b""
        self._invitation = b""  # "100 Continue", while the client waits for it
        self._reader: trio.lowlevel.Task | None = None
        self._reading = trio.CancelScope()
        self._lingering = False  # we have said goodbye to a client that is still sending

    # ---- sending ------------------------------------------------------------------------------

    def cork(self, block: bytes) -> None:
        """Hold the response from its head on, until it ends or `uncork`.

        `block` holds header lines that go into the head beside h11's own: for each header that it
        is given, h11 spends as much as an event costs.
        """
        self._corked = []
        self._block = block

    async def uncork(self) -> None:
        """Send what is held, in one write."""
        held, self._corked = self._corked, None
        if not held:
            return
        if self._block:
            held[0] = b"%b%b\r\n" % (held[0][:-2], self._block)
            self._block = b""
        await self._send(b"".join(held))

    async def protocol_send(self, event: Event) -> None:
        """Called by the protocol with bytes to send, or with a change of its state."""
        if isinstance(event, RawData):
            if event.data.startswith(_CONTINUE) and self._corked is None:
                self._invitation = event.data  # for the application to send, or not
                return
            if self._corked is not None:
                self._corked.append(event.data)
            else:
                await self._send(event.data)
            return
        await self.uncork()
        await super().protocol_send(event)

    async def invite_body(self) -> None:
        """Send the 100 that hypercorn would have sent without asking whether we want the body."""
        invitation, self._invitation = self._invitation, b""
        await self._send(invitation)

    async def _send(self, data: bytes) -> None:
        if not data:
            return
        try:
            sent = 0 if self.send_lock.locked() else self._send_now(data)
            if sent != len(data):
                # Shielded: half a frame on the wire would spoil the connection. It is bounded.
                with trio.CancelScope(shield=True):
                    async with self.send_lock:
                        await self._send_patiently(memoryview(data)[sent:])
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self._left()

    def _send_now(self, data: bytes) -> int:
        """Write what the socket takes without waiting; returns how many bytes that were."""
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
        """Reset the connection now; whoever waits on it is woken. Synchronous, idempotent."""
        stream = self.plain or self.stream.transport_stream
        if stream.socket.fileno() != -1:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            stream.socket.close()

    # ---- receiving ----------------------------------------------------------------------------

    async def receive(self) -> bytes:
        """Return the next bytes from the client, b"" when it has left."""
        if self.early:
            data, self.early = bytes(self.early), bytearray()
            return data
        try:
            return bytes(await self.stream.receive_some(MAX_RECV))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    def client_left(self) -> None:
        """The client has hung up while the protocol was not listening."""
        self._reading.cancel()

    async def _read_data(self) -> None:
        self._reader = trio.lowlevel.current_task()
        inner = self.protocol.protocol
        if isinstance(inner, H11Protocol):
            inner.can_read = Turn(self)
        try:
            with self._reading:
                while not self._lingering and (data := await self.receive()):
                    await self.protocol.handle(RawData(data))
            if self._lingering:
                with trio.move_on_after(self.limits.linger):
                    while await self.receive():
                        pass  # the client's rest is read and dropped
        finally:
            self._reader = None
        self._idle_watch.end()
        await self._left()

    async def _left(self) -> None:
        """The client has left: tell the request being answered, then the protocol."""
        if self.on_leave is not None:
            self.on_leave()
        await self.protocol.handle(Closed())

    # ---- closing ------------------------------------------------------------------------------

    async def _close(self) -> None:
        if self._reader is None or self.plain is None or not self._still_sending():
            await super()._close()
            return
        # The reader goes on for a moment: closing now, with unread bytes in the socket's buffer,
        # would send a reset that can overtake our answer.
        self._lingering = True
        with contextlib.suppress(OSError):
            self.plain.socket.shutdown(socket.SHUT_WR)
        if trio.lowlevel.current_task() is not self._reader:
            self._reading.cancel()

    def _still_sending(self) -> bool:
        """Whether the client may be in the middle of a request that was answered already."""
        inner = self.protocol.protocol
        if not isinstance(inner, H11Protocol):
            return False
        return inner.connection.their_state in (h11.SEND_BODY, h11.ERROR)

    async def hang_up(self) -> None:
        """Close an idle connection."""
        with trio.CancelScope(shield=True):
            await self.protocol.handle(Closed())
            await self._close()


class IdleWatch:
    """Closes a connection that stays idle for `keep_alive_timeout`, or when the server drains."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._deadline = math.inf  # trio clock; infinite while a request is being served
        self._scope = trio.CancelScope()  # of the watch's present wait
        self._started = False
        self._ended = False

    async def restart(self, task_group: Any, action: object) -> None:
        """The connection is idle from now on. Called by TCPServer."""
        self._set(trio.current_time() + self._connection.config.keep_alive_timeout)
        if not self._started:
            self._started = True
            task_group.spawn(self._watch)

    async def stop(self) -> None:
        """A request is being served. Called by TCPServer."""
        self._set(math.inf)

    def end(self) -> None:
        """The connection has ended; without this its nursery would wait for the watch."""
        self._ended = True
        self._scope.cancel()

    def _set(self, deadline: float) -> None:
        self._deadline = self._scope.deadline = deadline

    async def _watch(self) -> None:
        terminated = self._connection.context.terminated
        while not self._ended:
            with trio.CancelScope(deadline=self._deadline) as self._scope:
                await terminated.wait()
            if self._ended:
                return
            if self._deadline != math.inf:
                await self._connection.hang_up()
                return
            if terminated.is_set():
                return  # the protocol closes after the response under way
            # The time ran out in the very moment in which a request came: watch on.


class Turn:
    """The `can_read` event of an HTTP/1.1 protocol: set when the next request may be read.

    hypercorn's reader waits here while a pipelined request stands behind one being answered, deaf
    to a client that hangs up. This one reads on meanwhile, up to a bound.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._event = trio.Event()

    async def clear(self) -> None:
        """Begin to wait for the turn."""
        self._event = trio.Event()

    async def set(self) -> None:
        """It is the next request's turn."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether the next request may be read."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Wait for the turn, listening for a client that leaves."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            await self._event.wait()
            nursery.cancel_scope.cancel()

    async def _listen(self) -> None:
        connection = self._connection
        held = bytearray()
        try:
            while len(held) < _READ_AHEAD:
                data = await connection.receive()
                if not data:
                    connection.client_left()
                    return
                held += data
        finally:
            connection.early = held + connection.early
