"""One request of HTTP/1.1 and its answer.

An `Http1Request` is both the application's ASGI `receive` and `send`, and the `Transport` by which
a stream writes its events to the socket.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import trio

from tgi_trio.router.http.wire.connection import Connection
from tgi_trio.router.http.wire.headers import Header
from tgi_trio.router.http.wire.http1 import CONTINUE, Framing, Http1, RequestHead
from tgi_trio.router.http.wire.states import WireState
from tgi_trio.router.http.wire.transport import EXTENSION, App, BodySink, Transport

log = logging.getLogger(__name__)

# Most bytes read from a client ahead of its current request: later requests, which wait for their
# turn, and bodies that have not been asked for. While there are fewer, a disconnect is noticed at
# once.
_READ_AHEAD = 1 << 18

_EMPTY: list[Header] = [(b"content-length", b"0")]


class ReadAhead:
    """Counts the bytes that were read from a client and not yet used by a request."""

    def __init__(self) -> None:
        self._unread = 0
        self._room = trio.Event()

    def take(self, count: int) -> None:
        """Count bytes that were received."""
        self._unread += count

    def release(self, count: int) -> None:
        """Count bytes that were used, or that never will be."""
        self._unread -= count
        if self._unread <= _READ_AHEAD:
            self._room.set()

    async def wait_for_room(self) -> None:
        """Wait until more may be read."""
        while self._unread > _READ_AHEAD:
            self._room = trio.Event()
            await self._room.wait()


class Http1Request(Transport):
    """One request and its answer."""

    def __init__(
        self,
        head: RequestHead,
        http1: Http1,
        connection: Connection,
        ahead: ReadAhead,
        common: Callable[[], Header],
    ) -> None:
        """`common` returns a header for every answer."""
        self.head = head
        self.send_timeout = connection.limits.send_timeout
        self._http1 = http1
        self._connection = connection
        self._ahead = ahead
        self._common = common
        # The request:
        self._pieces: deque[bytes] = deque()
        self._whole = False
        self._delivered = False  # the application knows that the request is complete
        self._gone = False  # the client has left, or has its answer
        self._news = trio.Event()
        self.sink: BodySink | None = None  # gets the body instead of ASGI messages
        self._given = 0  # bytes passed to the sink
        self._failure: Exception | None = None  # raised by the sink
        self._on_leave: Callable[[], None] | None = None
        # The answer:
        self._unsent = b""  # its head, which is sent with the first bytes of the body

    # ---- the request ----------------------------------------------------------------------------

    @property
    def whole(self) -> bool:
        """Whether the request is complete."""
        return self._whole

    def add(self, piece: bytes) -> None:
        """Take a part of the body; it is dropped if the request is over."""
        if self.sink is not None:
            with self._giving(len(piece)) as sink:
                sink.feed(piece)
        elif not self._gone:
            self._ahead.take(len(piece))
            self._pieces.append(piece)
            self._news.set()

    def room(self, most: int) -> list[memoryview]:
        """Return where to write up to `most` of the next bytes, if anywhere."""
        if self.sink is not None:
            with self._giving(0) as sink:
                return sink.room(most)
        return []

    def fill(self, count: int) -> None:
        """Take note of `count` bytes written to `room`."""
        with self._giving(count) as sink:
            sink.fill(count)

    @contextmanager
    def _giving(self, count: int) -> Iterator[BodySink]:
        """Count bytes for the sink; `receive_into` raises what the sink raises."""
        if self.sink is None:
            raise RuntimeError("nobody has asked for the body")
        self._given += count
        try:
            yield self.sink
        except Exception as error:
            self._failure, self.sink = error, None
            self._news.set()

    async def receive_into(self, sink: BodySink) -> int:
        self._given = 0
        while self._pieces:  # received before the sink was there
            piece = self._pieces.popleft()
            self._ahead.release(len(piece))
            await sink.ready()
            sink.feed(piece)
            self._given += len(piece)
        if not (self._whole or self._gone):
            self.sink, self._news = sink, trio.Event()
            try:
                await self._news.wait()
            finally:
                self.sink = None
        if self._failure is not None:
            raise self._failure
        return self._given

    def complete(self) -> None:
        """Record that the body is complete."""
        self._whole = True
        self._news.set()

    def leave(self) -> None:
        """Record that the client has left. Synchronous, idempotent."""
        if self._gone:
            return
        self._end_request()
        if self._on_leave is not None:
            self._on_leave()

    def _end_request(self) -> None:
        self._gone = True
        self._ahead.release(sum(map(len, self._pieces)))
        self._pieces.clear()
        self._news.set()

    async def receive(self) -> Any:
        """Return the next ASGI message: parts of the body, then `http.disconnect`."""
        while not (self._pieces or self._gone or (self._whole and not self._delivered)):
            self._news = trio.Event()
            await self._news.wait()
        if self._gone:
            return {"type": "http.disconnect"}
        # One by one, as joining would copy all of them into memory that is not in use yet.
        body = self._pieces.popleft() if self._pieces else b""
        self._ahead.release(len(body))
        self._delivered = self._whole and not self._pieces
        return {"type": "http.request", "body": body, "more_body": not self._delivered}

    # ---- the answer -----------------------------------------------------------------------------

    async def run(self, app: App, scheme: str) -> bool:
        """Have the application answer; return whether the answer is complete, even if it raised."""
        try:
            await app(self._scope(scheme), self.receive, self.send)
        except Exception as error:
            log.error("the application failed", exc_info=error)
        except BaseExceptionGroup as group:
            _, others = group.split(trio.Cancelled)
            if others is None:
                raise
            log.error("the application failed", exc_info=others)
        if self._gone:
            return not self._http1.over
        if self._http1.server is not WireState.ANSWERING:
            self._connection.abort()  # so that the client notices the incomplete answer
            return False
        self._start(500, _EMPTY, last=True)
        await self.send({"type": "http.response.body", "body": b""})
        return not self._http1.over

    def _scope(self, scheme: str) -> dict[str, Any]:
        head = self.head
        raw_path, _, query = head.target.partition(b"?")
        path = raw_path.decode("latin-1")
        client, server = self._connection.addresses
        return {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "http_version": head.version,
            "method": head.method,
            "scheme": scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": head.headers,
            "client": client,
            "server": server,
            "state": {},
            "extensions": {EXTENSION: self},
        }

    async def send(self, message: Any) -> None:
        """Take an ASGI message of the answer. The head waits for the body, or for `flush`."""
        if self._gone:
            return
        if message["type"] == "http.response.start":
            draining = self._connection.draining.is_set()
            self._start(message["status"], message["headers"], last=draining)
            return
        more = message.get("more_body", False)
        body = self._http1.frame_body(message.get("body", b""), end=not more)
        await self._connection.send(self._take_head() + body)
        if not more and not self._gone:
            self._end_request()

    def _start(self, status: int, headers: list[Header], last: bool) -> None:
        self._unsent = self._http1.start_answer(status, [*headers, self._common()], last)

    def _take_head(self) -> bytes:
        head, self._unsent = self._unsent, b""
        return head

    # ---- as a transport -------------------------------------------------------------------------

    async def flush(self) -> None:
        await self._connection.send(self._take_head())

    async def invite_body(self) -> None:
        if self.head.expects_continue and not self._whole:
            self.head.expects_continue = False
            await self._connection.send(CONTINUE)

    def on_leave(self, callback: Callable[[], None] | None) -> None:
        self._on_leave = callback
        if self._gone and callback is not None:
            callback()

    def direct_socket(self) -> trio.socket.SocketType | None:
        # Events need chunks as framing, and TLS must encrypt what is sent.
        plain, chunked = self._connection.plain, self._http1.framing is Framing.CHUNKED
        return plain.socket if plain is not None and chunked else None

    def cut(self) -> None:
        self._connection.abort()

    async def abort(self) -> None:
        self._connection.abort()
