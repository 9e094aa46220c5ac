"""What carries the bytes of a response, as the application sees it.

An ASGI scope of ours names it among its extensions: for HTTP/1.1 that is
`http1_request.Http1Request`, for HTTP/2 `http2.Http2Transport`.
A private attribute of trio is touched here alone, behind an exact type check.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import trio

SEND_TIMEOUT = 30.0  # seconds

EXTENSION = "tgi_trio.transport"  # of an ASGI scope: a Transport

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]  # the ASGI application


def inner_socket(connected: trio.socket.SocketType) -> socket.socket | None:
    """Return the non-blocking socket that trio's forwards to; None where trio keeps it elsewhere.

    Each event of each stream is written to it: the detour through trio's takes a tenth of the time.
    """
    inner = getattr(connected, "_sock", None)
    return inner if type(inner) is socket.socket else None


class BodySink(Protocol):
    """Takes the body of a request while it comes."""

    async def ready(self) -> None:
        """Wait until more may come."""

    def room(self, most: int) -> list[memoryview]:
        """Return where up to `most` of the next bytes are to be written, one behind the other.

        Nowhere: they are for `feed`. Whoever asks writes at once and says so to `fill`.
        """

    def fill(self, count: int) -> None:
        """Take note that so many bytes have been written to `room`."""

    def feed(self, piece: bytes) -> None:
        """Take what comes next."""


class Transport:
    """This base knows nothing of what is below it: everything is plain."""

    send_timeout: float = SEND_TIMEOUT

    async def flush(self) -> None:
        """Send the head of the response, if it waits for the body."""

    async def invite_body(self) -> None:
        """Tell a client that asks first (`Expect: 100-continue`) to send its body."""

    async def receive_into(self, sink: BodySink) -> int:
        """Have `sink` given what is still to come of a body of known length, without messages.

        Returns how many bytes that were: all of them, fewer where the client has left, and none
        where it cannot be done. Raises what `sink` raises.
        """
        return 0

    def on_leave(self, callback: Callable[[], None] | None) -> None:
        """Have `callback` called, once and synchronously, when the client leaves.

        From here on nobody but the transport may `receive`.
        """

    def direct_socket(self) -> trio.socket.SocketType | None:
        """Return the socket that chunks of a response may be written to, if there is one."""
        return None

    async def wait_flushed(self) -> bool:
        """Wait until little enough is unsent; False when the client does not read."""
        return True

    def cut(self) -> None:
        """Wake a send that cannot be cancelled, by giving its connection up. Synchronous."""

    async def abort(self) -> None:
        """Give the response up so that the client notices."""


class AsgiTransport(Transport):
    """What any ASGI server offers: a `receive` that tells in the end that the client has left."""

    def __init__(self, nursery: trio.Nursery, receive: Receive, send: Send) -> None:
        """`nursery`: of this request alone; cancelled when it is over."""
        self._nursery = nursery
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
        if self._on_leave is not None:
            self._on_leave()
