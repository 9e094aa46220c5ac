"""HTTP/1.1 on one connection: requests parsed by httptools, each answered by a task of its own.

This stands in for hypercorn's H11Protocol and HTTPStream, which spend three times as much on a
short request as all of our routes: h11 is Python, and every message crosses a channel. Here a
request is an `Exchange` (`http1_exchange.py`) that the application reads and writes by itself.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING
from urllib.parse import unquote

import httptools
import trio
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H2ProtocolAssumedError
from hypercorn.typing import HTTPScope

from tgi_trio.router.http.errors import Header, header_block
from tgi_trio.router.http.http1_exchange import STATUS_LINES, Exchange

if TYPE_CHECKING:
    from tgi_trio.router.http.connection import Connection

# Bytes taken from a client beyond what its present request has read: later requests, which wait
# their turn, and bodies that nobody asked for yet. Its goodbye is heard up to here.
_READ_AHEAD = 1 << 18

_LONGEST_HEAD = 1 << 14  # bytes of a request's head that may come without its end

_H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"  # of a client that knows that we speak HTTP/2


class Http1Protocol:
    """What a connection reads and how it is answered, one request after the other."""

    def __init__(
        self,
        connection: Connection,
        client: tuple[str, int] | None,
        server: tuple[str, int] | None,
        ssl: bool,
    ) -> None:
        self.connection = connection
        self._parser = httptools.HttpRequestParser(self)
        self._addresses = (client, server)
        self._scheme = "https" if ssl else "http"
        self._first = b""  # bytes that may yet become HTTP/2's preface
        self._fresh = True  # it is open which protocol the client speaks
        self._head_size: int | None = None  # bytes of a head that has no end yet
        self._headers: list[Header] = []
        self._target = b""
        self._again = b""  # head to be parsed in place of one that asked for an upgrade
        self._incoming: Exchange | None = None  # whose body is being received
        self._current: Exchange | None = None  # which is being answered
        self._waiting: deque[Exchange] = deque()
        self._unread = 0  # bytes that count against `_READ_AHEAD`
        self._room = trio.Event()
        self._deaf = False  # nothing is parsed any more: the last request has come, or the end
        self._broken = False  # what came was no HTTP
        self._refused_with = 400  # status of the answer to it
        self._ended = False  # the connection is closed, by the client or by us

    async def initiate(self) -> None:
        """Do nothing: the client speaks first."""

    async def handle(self, event: Event) -> None:
        """Take bytes, returning when more may come, or the news that the connection has ended.

        Raises H2ProtocolAssumedError with the bytes for a client that speaks HTTP/2.
        """
        if isinstance(event, RawData):
            await self._take(event.data)
        elif isinstance(event, Closed):
            self._deaf = self._ended = True
            self._waiting.clear()
            if self._current is not None:
                self._current.leave()

    @property
    def still_sending(self) -> bool:
        """Whether the client may be in the middle of a request that was answered already."""
        return self._broken or self._incoming is not None

    # ---- requests -------------------------------------------------------------------------------

    async def _take(self, data: bytes) -> None:
        if self._fresh:
            data = self._first = self._first + data
            if data.startswith(_H2_PREFACE):
                raise H2ProtocolAssumedError(data)
            if _H2_PREFACE.startswith(data):
                return
            self._fresh, self._first = False, b""
        status = self._parse(data)
        if status is not None:
            self._deaf = self._broken = True
            if self._current is None:
                await self.connection.send(_refusal(status))
            await self.close()
        while self._unread > _READ_AHEAD:
            self._room = trio.Event()
            await self._room.wait()

    def _parse(self, data: bytes) -> int | None:
        """Parse what arrived; returns the status of an answer to what cannot be."""
        if self._head_size is not None:
            self._head_size += len(data)
        while data and not self._deaf:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data, self._again = self._again + data[upgrade.args[0] :], b""
            except httptools.HttpParserError:
                return None if self._deaf else self._refused_with
        if self._head_size is not None and self._head_size > _LONGEST_HEAD:
            return 431
        return None

    def on_message_begin(self) -> None:
        """Called by the parser: a request begins."""
        self._headers, self._target = [], b""
        self._head_size = 0

    def on_url(self, piece: bytes) -> None:
        """Called by the parser with a part of the request's target."""
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser with a header, or a trailer, which nobody reads."""
        if self._head_size is not None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by the parser: the head is whole."""
        version, method = self._parser.get_http_version(), self._parser.get_method()
        headers = dict(self._headers)
        if self._parser.should_upgrade() and b"upgrade" in headers:
            # We stay with HTTP/1.1, as a server may. The parser would take the request's body for
            # bytes of the other protocol: it gets the head once more, without the question.
            lines = header_block([each for each in self._headers if each[0] != b"upgrade"])
            self._again = b"%b %b HTTP/%b\r\n%b\r\n" % (
                method,
                self._target,
                version.encode(),
                lines,
            )
            return
        if version == "1.1" and b"host" not in headers:
            raise ValueError("a request of HTTP/1.1 names its host")
        if headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self._refused_with = 501  # HTTP's own word for a coding that a server does not have
            raise ValueError("the only transfer coding is chunked")
        size, self._head_size = len(self._target) + 64 * len(self._headers), None
        scope = self._scope(method.decode("ascii"), version)
        exchange = Exchange(self, scope, size)
        exchange.keep_alive = version == "1.1" and self._parser.should_keep_alive()
        exchange.expects_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        self._incoming = exchange
        if self._current is None:
            self._start(exchange)
        else:
            self._unread += exchange.size
            self._waiting.append(exchange)

    def on_body(self, piece: bytes) -> None:
        """Called by the parser with a part of the request's body."""
        if self._incoming is not None and self._incoming.add(piece):
            self._unread += len(piece)

    def on_message_complete(self) -> None:
        """Called by the parser: the request is whole."""
        exchange, self._incoming = self._incoming, None
        if exchange is not None:
            exchange.complete()
            self._deaf = not exchange.keep_alive  # what follows is not for us

    def _scope(self, method: str, version: str) -> HTTPScope:
        raw_path, _, query = self._target.partition(b"?")
        path = raw_path.decode("latin-1")
        client, server = self._addresses
        return {
            "type": "http",
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "http_version": version,
            "method": method,
            "scheme": self._scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "client": client,
            "server": server,
            "state": {},  # type: ignore[typeddict-item]  # hypercorn's own type of a dict
            "extensions": {},
        }

    # ---- one after the other --------------------------------------------------------------------

    def _start(self, exchange: Exchange) -> None:
        self._current = exchange
        self.connection.idle_watch.busy()
        self.connection.spawn(exchange.run)

    def release(self, count: int) -> None:
        """Count bytes that were read, or that nobody will read any more."""
        self._unread -= count
        if self._unread <= _READ_AHEAD:
            self._room.set()

    async def answered(self, exchange: Exchange) -> None:
        """Go on to the next request after the answer to `exchange` has left."""
        if self._ended:
            return
        draining = self.connection.context.terminated.is_set()
        if draining or not exchange.keep_alive or exchange is self._incoming:
            await self.close()
            return
        self._current = None
        if self._waiting:
            following = self._waiting.popleft()
            self.release(following.size)
            self._start(following)
        else:
            self.connection.idle_watch.idle()

    async def close(self) -> None:
        """Close the connection, as far as we are concerned; what was asked is answered or lost."""
        await self.connection.close()
        await self.handle(Closed())


def _refusal(status: int) -> bytes:
    """Return the answer to what is no request."""
    return STATUS_LINES[status] + b"content-length: 0\r\nconnection: close\r\n\r\n"
