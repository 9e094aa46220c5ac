"""The transport of a response, as the application sees it.

It is an extension in the ASGI scopes of our connections: an `http1_request.Http1Request` for
HTTP/1.1, an `http2.Http2Transport` for HTTP/2. No other file uses a private attribute of trio, here
after an exact type check.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import trio

SEND_TIMEOUT = 30.0  # seconds

EXTENSION = "tgi_trio.transport"  # key of an ASGI scope's extensions: a Transport

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]  # the ASGI application


def inner_socket(connected: trio.socket.SocketType) -> socket.socket | None:
    """Return the non-blocking socket inside trio's; None if trio keeps it elsewhere.

    Every event of every stream is written to it; trio's wrapper would take a tenth more time.
    """
    inner = getattr(connected, "_sock", None)
    return inner if type(inner) is socket.socket else None


async def wait_readable(plain: socket.socket) -> None:
    """Wait until a socket has bytes, or its end. Raises trio.ClosedResourceError if it is closed.

    Of one that is closed already trio would raise ValueError, and never forget that descriptor -1
    is waited for: whoever waited for a closed socket next would get trio.BusyResourceError.
    """
    if plain.fileno() < 0:
        raise trio.ClosedResourceError("the socket was closed here")
    await trio.lowlevel.wait_readable(plain)


class BodySink(Protocol):
    """Receives the body of a request as it arrives."""

    async def ready(self) -> None:
        """Wait until more may be received."""

    def room(self, most: int) -> list[memoryview]:
        """Return where to write up to `most` of the next bytes, in this order.

        Empty: they are to be passed to `feed`. The caller writes at once and then calls `fill`.
        """

    def fill(self, count: int) -> None:
        """Take note of `count` bytes written to `room`."""

    def feed(self, piece: bytes) -> None:
        """Take the next bytes."""


class Transport:
    """The base class: without access to the connection, it offers nothing beyond ASGI."""

    send_timeout: float = SEND_TIMEOUT

    async def flush(self) -> None:
        """Send the head of the response, if it waits for the body."""

    async def invite_body(self) -> None:
        """Have a client that waits for it (`Expect: 100-continue`) send its body."""

    async def receive_into(self, sink: BodySink) -> int:
        """Pass the rest of a body of known length directly to `sink`, without ASGI messages.

        Return the number of bytes: all of them, fewer if the client has left, and 0 if this
        transport cannot do it. Raises what `sink` raises.
        """
        return 0

    def on_leave(self, callback: Callable[[], None] | None) -> None:
        """Have `callback` called, once and synchronously, when the client leaves.

        From then on, only the transport may `receive`.
        """

    def direct_socket(self) -> trio.socket.SocketType | None:
        """Return the socket to which chunks of a response may be written directly, if any."""
        return None

    async def wait_flushed(self) -> bool:
        """Wait until little enough is unsent; return False if the client does not read."""
        return True

    def cut(self) -> None:
        """Wake a send that cannot be cancelled by giving up its connection. Synchronous."""

    async def abort(self) -> None:
        """Give up the response so that the client notices."""


class AsgiTransport(Transport):
    """A transport for any ASGI server, whose `receive` reports a disconnect at the end."""

    def __init__(
        self,
        nursery: trio.Nursery,
        receive: Receive,
        send: Send,
        breathe: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
    ) -> None:
        """`nursery`: of this request only; it is cancelled when the request is over.

        `breathe` waits before the client's leaving is told, as `LoopPace` does: many leave at once.
        """
        self._nursery = nursery
        self._breathe = breathe
        self._receive = receive
        self._send = send
        self._on_leave: Callable[[], None] | None = None
        self._watched = False

    async def receive(self) -> Any:
        """Return the next message of the request."""
        return await self._receive()

    async def send(self, message: Any) -> None:
        """Send a message of the response. The last one has `send_timeout` to leave."""
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await self._send(message)
            return
        with trio.move_on_after(self.send_timeout):
            await self._send(message)

    def on_leave(self, callback: Callable[[], None] | None) -> None:
        self._on_leave = callback
        if not self._watched:
            self._watched = True
            self._nursery.start_soon(self._watch)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # the rest of a body that was too large
        await self._breathe()
        if self._on_leave is not None:
            self._on_leave()
