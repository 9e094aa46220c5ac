"""The front's HTTP/1.1 client: pooled keep-alive connections, and answers read incrementally.

Every token of every stream passes through here, so answers are read from the socket beneath trio's,
streams by `Pump`; httptools removes the framing.
"""

from __future__ import annotations

import re
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools
import trio

from tgi_trio.cluster.gossip import LONGEST_NAME
from tgi_trio.cluster.pump import current_pump
from tgi_trio.errors import tell_reason
from tgi_trio.process.name_lookups import connect_by_name
from tgi_trio.router.http.wire.headers import Header, header_block
from tgi_trio.router.http.wire.transport import inner_socket, wait_readable

UNIX = "unix:"
CONNECT_SECONDS = 1.0  # timeout of connecting to a replica

# A name or an address of version 4; one of version 6, in brackets. Names may have any letters.
_HOST = re.compile(r"[^][:/?#@,\s]+|\[[^][/?#@,\s]+\]")
_HUNG_UP = "it hung up in the middle of an answer"
_MOST_RECEIVED = 1 << 16  # bytes taken from the socket at once
_LONGEST_HEAD = 1 << 16  # bytes of an answer's head
_MOST_KEPT = 64  # idle connections to one replica
_LONGEST_IDLE = 30.0  # seconds; the server itself hangs up after 75


class ReplicaLost(Exception):
    """The connection failed before the answer was whole; the text says how."""


class NobodyListens(ReplicaLost):
    """The connection was refused: no program listens at the replica's address."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """An answer's status and headers."""

    status: int
    headers: list[Header]  # names in lower case

    def header(self, name: bytes) -> bytes:
        """Return a header's value; empty if there is none."""
        return dict(self.headers).get(name, b"")


class AnswerReader:
    """Parses one answer: bytes in, its head and parts of its body out."""

    def __init__(self) -> None:
        self.head: AnswerHead | None = None
        self.whole = False
        self.keep_alive = False  # whether the connection can be used for another request
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[Header] = []
        self._size = 0  # bytes fed before the head was complete
        self._body: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body in `data`. Raises ReplicaLost if it is not HTTP."""
        if self.head is None:
            self._size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ReplicaLost(f"it does not speak HTTP/1.1: {error}") from None
        if self.head is None and self._size > _LONGEST_HEAD:
            raise ReplicaLost("the head of its answer does not end")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        return body

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if self.head is None:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self.head = AnswerHead(self._parser.get_status_code(), self._headers)

    def on_body(self, piece: bytes) -> None:
        """Called by the parser."""
        self._body.append(piece)

    def on_message_complete(self) -> None:
        """Called by the parser, which knows only now whether the connection stays open."""
        self.whole = True
        self.keep_alive = self._parser.should_keep_alive()


class Connection:
    """One connection to a replica, for one request at a time."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.fresh = True  # not used for any request yet
        self.idle_since = 0.0  # trio clock, seconds
        self._stream = stream
        self._plain: socket.socket | None = inner_socket(stream.socket)
        self._pump = current_pump()

    async def send(self, request: bytes) -> None:
        """Send a request. Raises ReplicaLost."""
        try:
            await self._stream.send_all(request)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ReplicaLost(f"it takes no request: {error}") from None

    async def receive(self) -> bytes:
        """Return received bytes, at least one. Raises ReplicaLost."""
        try:
            data = await self._receive()
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ReplicaLost(f"its connection broke: {tell_reason(error)}") from None
        if not data:
            raise ReplicaLost(_HUNG_UP)
        return data

    async def _receive(self) -> bytes:
        plain = self._plain
        if plain is None:
            return bytes(await self._stream.receive_some(_MOST_RECEIVED))
        while True:
            # Wait before the first recv: right after a token there is never anything to read.
            await wait_readable(plain)
            try:
                return plain.recv(_MOST_RECEIVED)
            except BlockingIOError:
                continue

    async def follow(self, take: Callable[[bytes], bool]) -> None:
        """Call `take` with received bytes until it returns False.

        `take` is called between two turns of trio's loop and must not block. Raises ReplicaLost and
        what `take` raises.
        """
        plain, pump = self._plain, self._pump
        if plain is None or pump is None:
            while take(await self.receive()):
                pass
            return

        def take_some() -> bool:
            try:
                data = plain.recv(_MOST_RECEIVED)
            except BlockingIOError:
                return True
            if not data:
                raise ReplicaLost(_HUNG_UP)
            return take(data)

        try:
            await pump.drain(plain, take_some)
        except (OSError, trio.ClosedResourceError) as error:
            raise ReplicaLost(f"its connection broke: {tell_reason(error)}") from None

    def close(self) -> None:
        """Close it; whoever waits for bytes gets ReplicaLost. Synchronous, idempotent."""
        if self._plain is not None and self._pump is not None:
            self._pump.notify_closing(self._plain)
        self._stream.socket.close()


@dataclass(slots=True)
class Connections:
    """The pool of connections to one replica."""

    address: str  # host:port, [host]:port or unix:/path
    idle: deque[Connection] = field(default_factory=deque)  # the longest idle first
    busy: set[Connection] = field(default_factory=set)
    _closed: int = 0  # how often all of them were

    async def take(self, fresh: bool = False) -> Connection:
        """Return a connection, an idle one unless `fresh`; to be returned by `give_back`.

        Raises ReplicaLost if none can be made within `CONNECT_SECONDS`, or all were closed
        meanwhile.
        """
        now = trio.current_time()
        while self.idle and not fresh:
            kept = self.idle.pop()
            if now - kept.idle_since < _LONGEST_IDLE:
                kept.fresh = False
                self.busy.add(kept)
                return kept
            kept.close()
        before = self._closed
        connection = Connection(await _connect(self.address))
        if self._closed != before:  # whoever waits on this one would not be told again
            connection.close()
            raise ReplicaLost("it was given up while a connection was made")
        self.busy.add(connection)
        return connection

    def give_back(self, connection: Connection, reusable: bool) -> None:
        """Keep a connection for another request, or close it. Synchronous."""
        known = connection in self.busy
        self.busy.discard(connection)
        now = trio.current_time()
        while self.idle and now - self.idle[0].idle_since >= _LONGEST_IDLE:
            self.idle.popleft().close()  # `take` uses the newest: the oldest might stay for ever
        if known and reusable and len(self.idle) < _MOST_KEPT:
            connection.idle_since = now
            self.idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all connections; whoever waits for bytes, or for one, gets ReplicaLost."""
        self._closed += 1
        for connection in [*self.idle, *self.busy]:
            connection.close()
        self.idle.clear()
        self.busy.clear()


def request_bytes(method: bytes, target: bytes, headers: list[Header], body: bytes) -> bytes:
    """Return the bytes of a request. Raises ValueError for a header that holds a line break."""
    lines = header_block([(b"host", b"replica"), *headers, (b"content-length", b"%d" % len(body))])
    return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method, target, lines, body)


def check_address(text: str) -> None:
    """Raise ValueError, which says what is allowed, if `text` is not a replica's address."""
    host, _, port = text.rpartition(":")
    named = _HOST.fullmatch(host) is not None and host.isprintable() and _can_be_name(host)
    is_port = port.isascii() and port.isdecimal() and 0 < int(port) <= 65535
    is_path = text.startswith(UNIX) and len(text) > len(UNIX)
    if len(text.encode()) > LONGEST_NAME:
        raise ValueError(f"an address has {LONGEST_NAME} bytes at most, got {text[:40]!r}...")
    if not (is_path or (named and is_port and not text.startswith(UNIX))):
        raise ValueError(f"expected host:port, [host]:port or unix:/path, got {text!r}")


def _can_be_name(host: str) -> bool:
    """Whether every part of a host's name has 1 to 63 letters, however they are written in DNS."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


async def _connect(address: str) -> trio.SocketStream:
    with trio.move_on_after(CONNECT_SECONDS):
        try:
            if address.startswith(UNIX):
                return await trio.open_unix_socket(address.removeprefix(UNIX))
            host, _, port = address.rpartition(":")
            return await connect_by_name(host.strip("[]"), int(port))
        except OSError as error:
            if _refused(error):
                raise NobodyListens("nobody listens there") from None
            raise ReplicaLost(f"it cannot be reached: {tell_reason(error)}") from None
    raise ReplicaLost(f"it took no connection within {CONNECT_SECONDS} s")


def _refused(error: OSError) -> bool:
    """Whether every attempt was refused; trio groups the errors of a name's addresses."""
    causes = error.__cause__
    if isinstance(causes, BaseExceptionGroup):
        return all(isinstance(each, ConnectionRefusedError) for each in causes.exceptions)
    return isinstance(causes or error, ConnectionRefusedError | FileNotFoundError)
