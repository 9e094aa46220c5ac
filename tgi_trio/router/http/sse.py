"""Server-sent events: the engine's step writes them directly to the client's socket.

Waking a task, taking a lock and passing through the HTTP stack for each event would cost ten times
the write itself. So the body of a stream is written from two sides, never from both at once:

* `write` is called synchronously in the engine's fan-out. As long as the socket takes everything,
  nothing else is needed (`_socket` is set). Hundreds of streams pass here in every step, and none
  is still in the CPU's caches from the step before, so the memory that each of them touches
  matters: slots instead of a dictionary, a flag instead of a timestamp.
* Back-pressure: once the socket takes less, events gather in a backlog that is bounded in bytes.
  The response's own task, `run`, sends them in one piece when the client reads again; then direct
  writing resumes.

TLS, HTTP/2, HTTP/1.0 and test clients have no socket for direct writes: their `run` sends
everything through `send`, and gathers events meanwhile.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from tgi_trio.router.http.wire.transport import Transport, inner_socket

KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"

# The last events of a stream ride with the end of the response when they are no more than this.
_TAIL = 1 << 16

# Checks of a stream per `StreamLimits.silence`: a keep-alive comment is late by at most 1 / that.
_LOOKS = 8


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of one stream."""

    backlog: int  # bytes that wait for a slow reader; when more come, its request is aborted
    silence: float  # seconds without an event before a keep-alive comment
    direct: bool = True


def escape_line_ends(events: bytes) -> bytes:
    """Return events whose JSON has no line ends of Unicode: U+0085, U+2028, U+2029 are escaped.

    JSON allows them as they are and SSE gives them no meaning, but clients that read lines with
    Python's `splitlines`, as httpx does, would cut events in two. What is not UTF-8 stays as it is.
    """
    # Each of these bytes is looked for in 15 ns, and begins few other characters than quotation
    # marks and dashes; looking closer takes half a microsecond.
    if 0xE2 not in events and 0xC2 not in events:
        return events
    text = events.decode(errors="surrogateescape")
    if "\u2028" not in text and "\u2029" not in text and "\x85" not in text:
        return events
    text = text.replace("\u2028", r"\u2028").replace("\u2029", r"\u2029").replace("\x85", r"\u0085")
    return text.encode(errors="surrogateescape")


class EventBody:
    """The body of one event stream, fed by `producers` generations and then closed."""

    __slots__ = (
        "_backlog",
        "_limits",
        "_news",
        "_producers",
        "_rest",
        "_sending",
        "_socket",
        "_transport",
        "_wrote",
        "failed",
    )

    def __init__(self, limits: StreamLimits, producers: int = 1) -> None:
        self.failed = False  # the client is too slow or has left, or a front must resume elsewhere
        self._limits = limits
        self._producers = producers
        self._socket: socket.socket | None = None  # set while direct writing is on
        self._rest = memoryview(b"")  # end of a chunk of which the socket took a part
        self._backlog = bytearray()  # not a list: objects would add a third to small events
        self._news = trio.Event()
        self._wrote = False  # directly, since the last look
        self._transport = Transport()  # set by `run`
        self._sending = trio.CancelScope()  # around a send through the server

    def write(self, events: bytes) -> None:
        """Send `events`, now if the socket takes them. Never blocks, never raises."""
        if not events:
            return  # an empty chunk would end the response
        if not events.isascii():
            events = escape_line_ends(events)
        plain = self._socket
        if plain is None:
            self._gather(events)
            return
        self._wrote = True
        chunk = b"%x\r\n%b\r\n" % (len(events), events)
        try:
            # Use the socket object rather than its descriptor, which may belong to another client's
            # connection once the socket is closed.
            sent = plain.send(chunk)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._fail()
            return
        if sent != len(chunk):
            self._socket = None
            self._rest = memoryview(chunk)[sent:]
            self._news.set()

    def finish(self, events: bytes, last: Callable[[], bytes] = bytes) -> None:
        """Send the last events of one producer; what `last` returns follows those of all."""
        self._producers -= 1
        if self._producers > 0:
            self.write(events)
            return
        self._socket = None  # they leave in one write together with the end of the response
        self._gather(escape_line_ends(events + last()))

    def abandon(self) -> None:
        """Cut the response off, so that the client notices that it is incomplete."""
        self._fail()

    @property
    def open(self) -> bool:
        """Whether a producer is still at work."""
        return self._producers > 0

    async def run(self, send: Callable[[Any], Any], transport: Transport) -> bytes:
        """Serve the body until it ends; returns the bytes that should go with the final message.

        The headers have left already. `failed` says whether the connection is worth keeping.
        """
        self._transport = transport
        connected = transport.direct_socket() if self._limits.direct else None
        plain = None if connected is None else inner_socket(connected)
        while not self.failed:
            if plain is not None:
                await self._drain(plain, transport.send_timeout)
            else:
                with trio.CancelScope() as self._sending:
                    await self._relay(send)
            if self.failed:
                break
            if not self.open:
                return self._take()
            self._socket = plain
            await self._quiet()
        self._socket = None
        return b""

    async def _quiet(self) -> None:
        """Wait until the task has something to do; send a comment after every long silence."""
        self._news = trio.Event()
        silent = 0  # looks in a row that found nothing written
        self._wrote = False
        while not self._news.is_set():
            with trio.move_on_after(self._limits.silence / _LOOKS):
                await self._news.wait()
                return
            silent = 0 if self._wrote else silent + 1
            if silent == _LOOKS:
                silent = 0
                self.write(KEEP_ALIVE)
            self._wrote = False

    async def _drain(self, plain: socket.socket, timeout: float) -> None:
        """Write what has gathered, waiting for the client as long as it makes progress."""
        while not self.failed:
            if not self._rest:
                if not self._backlog or (not self.open and len(self._backlog) <= _TAIL):
                    return
                data = self._take()
                self._rest = memoryview(b"%x\r\n%b\r\n" % (len(data), data))
            try:
                self._rest = self._rest[plain.send(self._rest) :]
            except BlockingIOError:
                await self._writable(plain, timeout)
            except OSError:
                self._fail()

    async def _writable(self, plain: socket.socket, timeout: float) -> None:
        with trio.move_on_after(timeout) as scope:
            try:
                await trio.lowlevel.wait_writable(plain)
            except (OSError, trio.ClosedResourceError):
                self._fail()
        if scope.cancelled_caught:
            self._fail()

    async def _relay(self, send: Callable[[Any], Any]) -> None:
        """Send what has gathered through the server, which bounds how long that may take."""
        while self._backlog and not self.failed and (self.open or len(self._backlog) > _TAIL):
            data = self._take()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            if not await self._transport.wait_flushed():
                self._fail()

    def _take(self) -> bytes:
        data = bytes(self._backlog)
        self._backlog.clear()
        return data

    def _gather(self, events: bytes) -> None:
        if self.failed:
            return
        # What waited before is counted: the last events of a long answer, which repeat all of it,
        # may be larger than the bound, and say nothing of the reader.
        if len(self._backlog) >= self._limits.backlog:
            self._fail()
        else:
            self._backlog += events
        self._news.set()

    def _fail(self) -> None:
        self.failed = True
        self._socket = None
        self._backlog.clear()
        self._news.set()
        self._sending.cancel()
        self._transport.cut()
