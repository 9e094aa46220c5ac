"""One client connection: hypercorn's TCPServer with bounded sends and a prompt ear for goodbyes.

What differs from hypercorn's own, and why:

* a send that makes no progress is given up after `send_timeout` (hypercorn waits for ever, and so
  does its shutdown);
* bytes go out without a lock or a scheduler pass while the socket takes them;
* HTTP/1.1 is our own (`http1.py`), HTTP/2 is hypercorn's;
* one task per connection watches for idleness, where hypercorn starts and cancels one per request;
* closing lingers, so that a client still sending its body reads the answer instead of a reset.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState

from tgi_trio.router.http.http1 import Http1Protocol
from tgi_trio.router.http.transport import SEND_TIMEOUT

# A body larger than this goes out in pieces, each of which has `send_timeout` to leave.
_PIECE = 1 << 16

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST and forgets unsent bytes


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
        self.idle_watch = IdleWatch(self)
        self.idle_task = self.idle_watch  # type: ignore[assignment]  # what TCPServer calls it
        self.limits = limits
        self.plain: trio.SocketStream | None = (
            stream if isinstance(stream, trio.SocketStream) else None
        )
        self._reader: trio.lowlevel.Task | None = None
        self._reading = trio.CancelScope()
        self._lingering = False  # we have said goodbye to a client that is still sending

    # ---- sending ------------------------------------------------------------------------------

    async def protocol_send(self, event: Event) -> None:
        """Called by hypercorn's protocol with bytes to send, or with a change of its state."""
        if isinstance(event, RawData):
            await self.send(event.data)
        else:
            await super().protocol_send(event)

    async def send(self, data: bytes) -> None:
        """Send all of `data`; that the client has left is told to the protocol."""
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

    async def _receive(self) -> bytes:
        try:
            return bytes(await self.stream.receive_some(MAX_RECV))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def _read_data(self) -> None:
        self._reader = trio.lowlevel.current_task()
        inner = self.protocol.protocol
        if isinstance(inner, H11Protocol):
            ours = Http1Protocol(self, inner.client, inner.server, inner.ssl)
            self.protocol.protocol = ours  # type: ignore[assignment]
        try:
            with self._reading:
                while not self._lingering and (data := await self._receive()):
                    await self.protocol.handle(RawData(data))
            if self._lingering:
                with trio.move_on_after(self.limits.linger):
                    while await self._receive():
                        pass  # the client's rest is read and dropped
        finally:
            self._reader = None
        self.idle_watch.end()
        await self._left()

    async def _left(self) -> None:
        await self.protocol.handle(Closed())

    def spawn(self, function: Callable[[], Awaitable[None]]) -> None:
        """Run `function` as a task of this connection."""
        self._task_group.spawn(function)

    # ---- closing ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the connection in a way that lets the client read what was sent. Idempotent."""
        await self._close()

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
        protocol: object = self.protocol.protocol
        return isinstance(protocol, Http1Protocol) and protocol.still_sending

    async def hang_up(self) -> None:
        """Close an idle connection."""
        with trio.CancelScope(shield=True):
            await self.protocol.handle(Closed())
            await self._close()


class IdleWatch:
    """Closes a connection that stays idle for `keep_alive_timeout`, or when the server drains.

    The watch looks up the deadline whenever it wakes. Idle time always ends later than a wait that
    began before it, so that beginning and ending it costs an assignment and not a timer.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._deadline = math.inf  # trio clock; infinite while a request is being served
        self._scope = trio.CancelScope()  # of the watch's present wait
        self._started = False
        self._ended = False

    def idle(self) -> None:
        """The connection is idle from now on."""
        self._deadline = trio.current_time() + self._connection.config.keep_alive_timeout

    def busy(self) -> None:
        """A request is being served."""
        self._deadline = math.inf

    async def restart(self, task_group: Any, action: object) -> None:
        """`idle`, as TCPServer calls it."""
        self.idle()
        if not self._started:
            self._started = True
            task_group.spawn(self._watch)

    async def stop(self) -> None:
        """`busy`, as TCPServer calls it."""
        self.busy()

    def end(self) -> None:
        """The connection has ended; without this its nursery would wait for the watch."""
        self._ended = True
        self._scope.cancel()

    async def _watch(self) -> None:
        context, patience = self._connection.context, self._connection.config.keep_alive_timeout
        while not self._ended:
            until = min(self._deadline, trio.current_time() + patience)
            with trio.CancelScope(deadline=until) as self._scope:
                await context.terminated.wait()
            draining = context.terminated.is_set()
            if self._ended or (draining and self._deadline == math.inf):
                return  # what is being served closes the connection after its answer
            if draining or self._deadline <= trio.current_time():
                await self._connection.hang_up()
                return
