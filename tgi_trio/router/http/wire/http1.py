"""HTTP/1.1 without I/O: bytes in, events out; answers in, bytes out.

No socket and no task. All transitions in the table of `states.py` happen in this file, and nothing
else does. httptools is the tokeniser, except for bodies of known length, which need no parsing and
which it would copy.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import httptools

from tgi_trio.router.http.wire.headers import Header, header_block
from tgi_trio.router.http.wire.states import (
    CLIENT_BEGINS,
    NOT_READ,
    SERVER_BEGINS,
    STILL_SENDING,
    WireEvent,
    WireState,
    next_state,
)

LONGEST_HEAD: Final = 1 << 14  # most bytes of a request's head without its end

_H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"  # of a client that knows that the server speaks HTTP/2

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BODILESS = frozenset({204, 304})
_LAST_CHUNK = b"0\r\n\r\n"


# ---- events --------------------------------------------------------------------------------------


@dataclass(slots=True)
class RequestHead:
    """The complete head of a request."""

    method: str
    target: bytes
    version: str  # "1.1", "1.0"
    headers: list[Header]  # names in lower case
    keep_alive: bool  # the client may send another request on this connection
    expects_continue: bool  # the client waits for 100 Continue before it sends the body

    @property
    def size(self) -> int:
        """Bytes for which the head is counted, roughly, while it waits."""
        return len(self.target) + sum(64 + len(value) for _, value in self.headers)


@dataclass(slots=True)
class BodyPart:
    """A part of the body of the last request."""

    data: bytes


@dataclass(slots=True)
class RequestEnd:
    """The last request is complete."""


@dataclass(slots=True)
class Refusal:
    """What arrived is not a valid request; nothing after it is read."""

    status: int  # of the answer to it

    def answer(self) -> bytes:
        """Return the whole answer."""
        return _STATUS_LINES[self.status] + b"content-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(slots=True)
class Http2Preface:
    """The client speaks HTTP/2; nothing more is read here."""

    data: bytes  # all bytes received, beginning with the preface


ClientEvent = RequestHead | BodyPart | RequestEnd | Refusal | Http2Preface


# ---- both sides of a connection ------------------------------------------------------------------


class Framing(enum.Enum):
    """How a client knows where the body of an answer ends."""

    SIZED = enum.auto()  # by Content-Length
    CHUNKED = enum.auto()
    ABSENT = enum.auto()  # there is no body, whatever is given
    UNTIL_CLOSE = enum.auto()  # by the end of the connection


# Looked up once, as until Python 3.12 access to an enum's member is a call, and a request needs
# thirty.
_FRESH, _HEAD, _BODY = WireState.FRESH, WireState.HEAD, WireState.BODY
_SENDING, _DRAINING, _CLOSED = WireState.SENDING, WireState.DRAINING, WireState.CLOSED
_BEGIN, _ASK, _END, _END_LAST = (
    WireEvent.BEGIN,
    WireEvent.ASK,
    WireEvent.END,
    WireEvent.END_LAST,
)
_TURN, _START, _START_LAST, _FINISH = (
    WireEvent.TURN,
    WireEvent.START,
    WireEvent.START_LAST,
    WireEvent.FINISH,
)
_SIZED, _CHUNKED, _ABSENT = Framing.SIZED, Framing.CHUNKED, Framing.ABSENT


class Http1:
    """The protocol state of client and server on one connection.

    Methods of the server's side raise IllegalWireEvent when it is not their turn.
    """

    def __init__(self, longest_head: int = LONGEST_HEAD) -> None:
        """`longest_head`: most bytes of a request's head without its end."""
        self._longest_head = longest_head
        self.client = CLIENT_BEGINS  # the state of the client's side
        self.server = SERVER_BEGINS  # the state of the server's side
        self.framing = _SIZED  # of the current answer, once it has a head
        # None once nothing more is received.
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._events: list[ClientEvent] = []  # of the current call of `receive`
        self._first = b""  # bytes that may become HTTP/2's preface
        self._head_size = 0  # bytes received of an incomplete head
        self._headers: list[Header] = []
        self._target = b""
        self._again = b""  # a head without its request to upgrade, to be parsed instead
        self._refused_with = 400  # status of the answer to invalid requests
        self._body_left = 0  # bytes still to come of a body of known length
        self._incoming: RequestHead | None = None  # whose body is being received
        self._current: RequestHead | None = None  # which is being answered

    # ---- the client's side -----------------------------------------------------------------------

    def receive(self, data: bytes) -> list[ClientEvent]:
        """Return the events in `data`, in order. How bytes are cut into pieces makes no difference.

        A head is too long (431) if so many bytes of it have come without its end.
        """
        self._events = []
        if self.client is _FRESH:
            data = self._choose_protocol(data)
        if self.client is _HEAD:
            self._head_size += len(data)
        if left := self.body_left:
            piece, data = data[:left], data[left:]
            self._events.append(BodyPart(piece))
            self._count_body(len(piece))
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refused_with)
        if self.client is _HEAD:
            if not (self._head_size or self._events):  # all of it belongs to a head that has begun
                self._head_size = len(data)
            if self._head_size > self._longest_head:
                self._refuse(431)
        return self._events

    @property
    def body_left(self) -> int:
        """How many of the next bytes certainly belong to the incoming request's body."""
        is_read = self.client is _BODY and self.server is not _DRAINING
        return self._body_left if is_read else 0

    def skip_body(self, count: int) -> list[ClientEvent]:
        """Return what `receive` would return for `count` bytes of a body, without a `BodyPart`.

        They have been received in place. Raises ValueError for more than `body_left`.
        """
        if count > self.body_left:
            raise ValueError(f"{count} bytes of a body that has {self.body_left} left")
        self._events = []
        self._count_body(count)
        return self._events

    def end_reading(self) -> None:
        """Record that nothing more is received. Idempotent.

        The parser and this object refer to each other: without this, both would be garbage that
        only Python's collector finds, which stops the loop to look at everything.
        """
        self._parser = None

    def _count_body(self, count: int) -> None:
        self._body_left -= count
        if not self._body_left:
            self._parser = httptools.HttpRequestParser(self)  # the old one still expects this body
            self.on_message_complete()

    def _choose_protocol(self, data: bytes) -> bytes:
        """Return the bytes to parse as HTTP/1.1; none while they may become HTTP/2's preface."""
        self._first += data
        if self._first.startswith(_H2_PREFACE):
            self._events.append(Http2Preface(self._first))
            self.client = next_state(self.client, WireEvent.SWITCH)
            self.server = next_state(self.server, WireEvent.SWITCH)
            return b""
        if _H2_PREFACE.startswith(self._first):
            return b""
        self.client = next_state(self.client, WireEvent.RECOGNISE)
        data, self._first = self._first, b""
        return data

    def _feed(self, data: bytes) -> None:
        while data and self.client not in NOT_READ and self.server is not _DRAINING:
            if self._parser is None:
                raise ValueError("nothing is received after the end")
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data, self._again = self._again + data[upgrade.args[0] :], b""
                # The old parser considers the request finished, and with HTTP/1.0 the connection as
                # well.
                self._parser = httptools.HttpRequestParser(self)

    def _refuse(self, status: int) -> None:
        if self.client not in NOT_READ:
            self.client = next_state(self.client, WireEvent.BREAK)
            self._events.append(Refusal(status))

    def on_message_begin(self) -> None:
        """Called by the parser: a request begins."""
        if self.client not in NOT_READ:
            self.client = next_state(self.client, _BEGIN)
            self._headers, self._target, self._head_size = [], b"", 0

    def on_url(self, piece: bytes) -> None:
        """Called by the parser with a part of the request's target."""
        self._target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser with a header, or with a trailer, which is ignored."""
        if self.client is _HEAD:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by the parser: the head is complete."""
        parser = self._parser
        if self.client is not _HEAD or parser is None:
            return
        version, method = parser.get_http_version(), parser.get_method()
        if not version.startswith("1."):
            self._refused_with = 505
            raise ValueError("requests have HTTP/1.1's form here, or that of 1.0")
        headers = dict(self._headers)
        if len(headers) < len(self._headers):  # a proxy might have read another of two lines
            names = [name for name, _ in self._headers]
            if names.count(b"host") > 1 or names.count(b"transfer-encoding") > 1:
                raise ValueError("a request has one host and one transfer coding")
        if parser.should_upgrade() and b"upgrade" in headers:
            self._read_again(version, method)
            return
        if version == "1.1" and b"host" not in headers:
            raise ValueError("a request of HTTP/1.1 names its host")
        if headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self._refused_with = 501  # HTTP's status for an unknown transfer coding
            raise ValueError("the only transfer coding is chunked")
        self._incoming = RequestHead(
            method.decode("ascii"),
            self._target,
            version,
            self._headers,
            version == "1.1" and parser.should_keep_alive(),
            headers.get(b"expect", b"").lower() == b"100-continue",
        )
        length = headers.get(b"content-length", b"")
        self._body_left = int(length) if length.isdigit() else 0
        self.client = next_state(self.client, _ASK)
        self._events.append(self._incoming)

    def _read_again(self, version: str, method: bytes) -> None:
        # A server may ignore an upgrade, and this one does. The parser would treat the request's
        # body as the other protocol's bytes, so it gets the head again without the request to
        # upgrade.
        lines = header_block([each for each in self._headers if each[0] != b"upgrade"])
        parts = (method, self._target, version.encode(), lines)
        self._again = b"%b %b HTTP/%b\r\n%b\r\n" % parts
        self.client = next_state(self.client, WireEvent.REREAD)

    def on_body(self, piece: bytes) -> None:
        """Called by the parser with a part of the request's body."""
        if self.client is _BODY:
            if self._body_left:
                self._body_left -= len(piece)
            self._events.append(BodyPart(piece))

    def on_message_complete(self) -> None:
        """Called by the parser: the request is complete."""
        if self.client is _BODY and self._incoming is not None:
            event = _END if self._incoming.keep_alive else _END_LAST
            self.client = next_state(self.client, event)
            self._events.append(RequestEnd())
            self._incoming = None

    # ---- the server's side -----------------------------------------------------------------------

    def take_turn(self, request: RequestHead) -> None:
        """Begin to answer `request`; others may wait behind it."""
        self.server = next_state(self.server, _TURN)
        self._current = request

    def start_answer(self, status: int, headers: list[Header], last: bool) -> bytes:
        """Return the head of the answer. `last`: the connection ends after it in any case.

        It also ends if only closing can mark the end of the body, and if the request is incomplete,
        as the client would continue with its rest. Raises ValueError for header injection.
        """
        request = self._current
        if request is None:
            raise ValueError("no request has its turn")
        ends = last or not request.keep_alive or request is self._incoming
        framing, line = _SIZED, b""
        if request.method == "HEAD" or status in _BODILESS:
            framing = _ABSENT
        elif b"content-length" not in dict(headers):
            if request.version == "1.1":
                framing, line = _CHUNKED, b"transfer-encoding: chunked\r\n"
            else:
                framing, ends = Framing.UNTIL_CLOSE, True
        if ends:
            line += b"connection: close\r\n"
        first = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        head = b"%b%b%b\r\n" % (first, header_block(headers), line)
        event = _START_LAST if ends else _START
        self.server, self.framing = next_state(self.server, event), framing
        return head

    def frame_body(self, data: bytes, end: bool) -> bytes:
        """Return a part of the answer's body, framed for the wire; `end`: it is the last one."""
        if self.framing is _CHUNKED:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            return chunk + _LAST_CHUNK if end else chunk
        return b"" if self.framing is _ABSENT else data

    def finish_answer(self) -> bool:
        """Record that the answer has been sent; return whether another may follow."""
        if self.server is not _SENDING:
            return False
        self.server = next_state(self.server, _FINISH)
        self._current = None
        return True

    # ---- the end ---------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether either side has ended the connection."""
        return self.server is _DRAINING or self.server is _CLOSED

    def say_goodbye(self, unread: bool = False) -> bool:
        """End the server's side; return whether to linger, as the client may still be sending.

        `unread`: it has sent something that nobody has read.
        """
        if not (unread or self.client in STILL_SENDING):
            self.close()
            return False
        self.server = next_state(self.server, WireEvent.LINGER)
        return True

    def close(self) -> None:
        """Record that the connection is over. Idempotent."""
        if self.server is not _CLOSED:
            self.client = next_state(self.client, WireEvent.CLOSE)
            self.server = next_state(self.server, WireEvent.CLOSE)
