"""HTTP/1.1 on one connection: the application answers one request after the other.

This replaces hypercorn's HTTP/1.1, which takes three times as long for a short request as all of
our routes: h11 is Python, and every message crosses a channel. Here `http1.py` turns bytes into
events, and a request is an object (`http1_request.py`) that the application reads and writes
directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tgi_trio.router.http.wire.connection import Connection
from tgi_trio.router.http.wire.headers import Header
from tgi_trio.router.http.wire.http1 import (
    LONGEST_HEAD,
    BodyPart,
    ClientEvent,
    Http1,
    Http2Preface,
    Refusal,
    RequestHead,
)
from tgi_trio.router.http.wire.http1_request import Http1Request, ReadAhead
from tgi_trio.router.http.wire.states import WireState
from tgi_trio.router.http.wire.transport import App


class Http1Session:
    """The requests of one connection, and their answers in the same order."""

    def __init__(
        self,
        connection: Connection,
        app: App,
        common: Callable[[], Header],
        longest_head: int = LONGEST_HEAD,
    ) -> None:
        """`common` returns a header for every answer; `longest_head` is in bytes."""
        self._connection = connection
        self._app = app
        self._common = common
        self._scheme = "http" if connection.plain is not None else "https"
        self._http1 = Http1(longest_head)
        self._ahead = ReadAhead()
        self._incoming: Http1Request | None = None  # whose body may be arriving
        self._current: Http1Request | None = None  # which is being answered
        self._waiting: deque[Http1Request] = deque()
        self._refusal: Refusal | None = None  # of what came after all of these
        self._switched = b""  # bytes received from a client that turned out to speak HTTP/2

    async def serve(self) -> bytes:
        """Serve the connection until it ends.

        Return the bytes received so far if the client turns out to speak HTTP/2, otherwise none.
        """
        self._connection.on_end(self._on_end)
        try:
            await self._connection.read(self._take, self)
        finally:
            self._http1.end_reading()
        if not self._switched:
            await self._on_end()
        return self._switched

    async def _take(self, data: bytes) -> bool:
        """Process received bytes, and wait until more may come; False if the rest is HTTP/2."""
        events = self._http1.receive(data)
        if self._current is None and self._http1.client is WireState.HEAD:
            self._connection.idle_watch.expect_head()
        return await self._handle(events)

    @property
    def wanted(self) -> int:
        """How many of the next bytes belong to a body that is received in place (`BodyMemory`)."""
        request = self._incoming
        return 0 if request is None or request.sink is None else self._http1.body_left

    async def ready(self) -> None:
        """Wait until more of them may be received."""
        if self._incoming is not None and self._incoming.sink is not None:
            await self._incoming.sink.ready()

    def room(self, most: int) -> list[memoryview]:
        """Return where to write up to `most` of them; empty: they are to be passed to `_take`."""
        return [] if self._incoming is None else self._incoming.room(min(most, self.wanted))

    async def fill(self, count: int) -> bool:
        """Take note of `count` bytes written to `room`; return as `_take` does."""
        if self._incoming is not None:
            self._incoming.fill(count)
        return await self._handle(self._http1.skip_body(count))

    async def _handle(self, events: list[ClientEvent]) -> bool:
        for event in events:
            if isinstance(event, RequestHead):
                self._add(event)
            elif isinstance(event, Refusal):
                await self._refuse(event)
            elif isinstance(event, Http2Preface):
                self._switched = event.data
                return False
            elif self._incoming is None:
                raise ValueError(f"{event} belongs to no request")
            elif isinstance(event, BodyPart):
                self._incoming.add(event.data)
            else:
                self._incoming.complete()
        await self._ahead.wait_for_room()
        return True

    def _add(self, head: RequestHead) -> None:
        request = Http1Request(head, self._http1, self._connection, self._ahead, self._common)
        self._incoming = request
        if self._current is None:
            self._begin(request)
            self._connection.spawn(self._answer)
        else:
            self._ahead.take(head.size)
            self._waiting.append(request)

    async def _refuse(self, refusal: Refusal) -> None:
        """Record that nothing more is read; requests that came before are answered first."""
        self._refusal = refusal
        broken = self._incoming
        if broken is not None and not broken.whole:  # it is not a request, as its body has no end
            if broken is not self._current:
                self._waiting.remove(broken)
                self._ahead.release(broken.head.size)
            elif self._http1.server is not WireState.ANSWERING:  # it would have been the last
                await self._say_goodbye()
                return
            else:
                self._current = None
            broken.leave()
        if self._current is None:
            await self._say_why()

    async def _say_why(self) -> None:
        """Answer what was refused, after all requests, and close the connection."""
        if self._refusal is not None:
            await self._connection.send(self._refusal.answer())
        await self._say_goodbye()

    # ---- one after the other --------------------------------------------------------------------

    def _begin(self, request: Http1Request) -> None:
        self._http1.take_turn(request.head)
        self._current = request
        self._connection.idle_watch.busy()

    async def _answer(self) -> None:
        """Answer the current request, and then those that have arrived meanwhile."""
        while self._current is not None:
            if not await self._current.run(self._app, self._scheme):
                await self._on_end()  # the reader may be waiting for room
                return
            if self._connection.draining.is_set() or not self._http1.finish_answer():
                await self._say_goodbye()
                return
            self._current = None
            if self._waiting:
                following = self._waiting.popleft()
                self._ahead.release(following.head.size)
                self._begin(following)
            elif self._refusal is not None:
                await self._say_why()
            else:
                self._rest()

    def _rest(self) -> None:
        """Wait for another request; part of its head may have arrived already."""
        self._connection.idle_watch.idle()
        if self._http1.client is WireState.HEAD:
            self._connection.idle_watch.expect_head()

    # ---- the end --------------------------------------------------------------------------------

    async def _say_goodbye(self) -> None:
        """End the connection; waiting requests are dropped."""
        if not self._http1.over:
            unread = bool(self._waiting) or self._connection.has_unread()
            lingers = self._http1.say_goodbye(unread)
            await self._connection.close(lingers)
            self._abandon()

    async def _on_end(self) -> None:
        self._http1.close()
        self._abandon()

    def _abandon(self) -> None:
        for request in self._waiting:
            self._ahead.release(request.head.size)
            request.leave()
        self._waiting.clear()
        if self._current is not None:
            self._current.leave()
