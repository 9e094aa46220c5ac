"""One request of HTTP/1.1 and its answer.

An `Exchange` is at once the ASGI `receive` and `send` of the application, and the `Transport` that
lets a stream write its events to the socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import trio
from hypercorn.typing import HTTPScope

from tgi_trio.router.http.errors import Header, header_block
from tgi_trio.router.http.transport import Transport

if TYPE_CHECKING:
    from tgi_trio.router.http.http1 import Http1Protocol

log = logging.getLogger(__name__)

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BODILESS = frozenset({204, 304})
_LAST_CHUNK = b"0\r\n\r\n"
_EMPTY: list[Header] = [(b"content-length", b"0")]


class Exchange(Transport):
    """One request and its answer."""

    def __init__(self, protocol: Http1Protocol, scope: HTTPScope, size: int) -> None:
        """`size`: bytes that the request's head may count for while it waits."""
        self.scope = scope
        self.size = size
        self.keep_alive = True  # the connection is good for another request
        self.expects_continue = False
        self._protocol = protocol
        self._connection = protocol.connection
        self.send_timeout = self._connection.limits.send_timeout
        # The request:
        self._pieces: list[bytes] = []
        self._whole = False
        self._told = False  # the application has been told that the request is whole
        self._gone = False  # the client has left, or has its answer
        self._news = trio.Event()
        self._on_leave: Callable[[], None] | None = None
        # The answer:
        self._head = b""  # leaves with the first bytes of the body
        self._started = False
        self._chunked = False
        self._bodiless = False

    # ---- the request ----------------------------------------------------------------------------

    def add(self, piece: bytes) -> bool:
        """Take a part of the body; False when nobody will read it."""
        if self._gone:
            return False
        self._pieces.append(piece)
        self._news.set()
        return True

    def complete(self) -> None:
        """The body is whole."""
        self._whole = True
        self._news.set()

    def leave(self) -> None:
        """The client has left. Synchronous, idempotent."""
        if self._gone:
            return
        self._end_request()
        if self._on_leave is not None:
            self._on_leave()

    def _end_request(self) -> None:
        self._gone = True
        self._protocol.release(sum(map(len, self._pieces)))
        self._pieces.clear()
        self._news.set()

    async def receive(self) -> Any:
        """Return the next ASGI message: parts of the body, in the end `http.disconnect`."""
        while not (self._pieces or self._gone or (self._whole and not self._told)):
            self._news = trio.Event()
            await self._news.wait()
        if self._gone:
            return {"type": "http.disconnect"}
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._protocol.release(len(body))
        self._told = self._whole
        return {"type": "http.request", "body": body, "more_body": not self._whole}

    # ---- the answer -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Have the application answer; whatever it does, the connection knows how to go on."""
        app = self._connection.app
        spawn, soon = trio.to_thread.run_sync, trio.from_thread.run
        try:
            await app(self.scope, self.receive, self.send, spawn, soon)
        except Exception as error:
            log.error("the application failed", exc_info=error)
        except BaseExceptionGroup as group:
            _, others = group.split(trio.Cancelled)
            if others is None:
                raise
            log.error("the application failed", exc_info=others)
        if self._gone:
            return
        if self._started:
            self._connection.abort()  # so that the client sees that something is missing
            return
        self.keep_alive = False
        await self.send({"type": "http.response.start", "status": 500, "headers": _EMPTY})
        await self.send({"type": "http.response.body", "body": b""})

    async def send(self, message: Any) -> None:
        """Take an ASGI message of the answer. The head waits for the body, or for `flush`."""
        if self._gone:
            return
        if message["type"] == "http.response.start":
            self._head = self._render_head(message["status"], message["headers"])
            self._started = True
            return
        body = message.get("body", b"")
        if self._bodiless:
            body = b""
        elif self._chunked:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        if message.get("more_body", False):
            await self._connection.send(self._take_head() + body)
            return
        if self._chunked:
            body += _LAST_CHUNK
        await self._connection.send(self._take_head() + body)
        if not self._gone:
            self._end_request()
        await self._protocol.answered(self)

    def _render_head(self, status: int, headers: list[Header]) -> bytes:
        version, method = self.scope["http_version"], self.scope["method"]
        self._bodiless = method == "HEAD" or status in _BODILESS
        framing = b""
        if not self._bodiless and not any(name == b"content-length" for name, _ in headers):
            if version == "1.1":
                self._chunked, framing = True, b"transfer-encoding: chunked\r\n"
            else:
                self.keep_alive = False  # the end of the connection is the end of the body
        if not self._whole or self._connection.context.terminated.is_set():
            self.keep_alive = False
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        ours = self._connection.config.response_headers("h11")
        line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        return b"%b%b%b%b\r\n" % (line, header_block(headers), header_block(ours), framing)

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    # ---- as a transport -------------------------------------------------------------------------

    async def flush(self) -> None:
        await self._connection.send(self._take_head())

    async def invite_body(self) -> None:
        if self.expects_continue and not self._whole:
            self.expects_continue = False
            await self._connection.send(_CONTINUE)

    def on_leave(self, callback: Callable[[], None] | None) -> bool:
        self._on_leave = callback
        if self._gone and callback is not None:
            callback()
        return True

    def direct_socket(self) -> trio.socket.SocketType | None:
        # Without chunks there is nothing to frame events with, and TLS is not for us to write.
        plain = self._connection.plain
        return plain.socket if plain is not None and self._chunked else None

    def cut(self) -> None:
        self._connection.abort()

    async def abort(self) -> None:
        self._connection.abort()
