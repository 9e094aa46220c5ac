"""Events that are kept while they are written, for readers who come later or come back.

Unlike `sse.EventBody`, whose one reader gets each event in the engine's step, a log has any number
of readers, each at a place of its own. A reader takes what is there, in pieces, and waits for more;
one that does not read holds nothing but its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import trio

from tgi_trio.router.http.sse import KEEP_ALIVE, escape_line_ends
from tgi_trio.router.http.wire.transport import Transport

_PIECE: Final = 1 << 16  # bytes that are sent at once
_OBJECT: Final = 64  # bytes that are counted for an event beside its text
_END: Final = b"\n\n"


class EventLog:
    """The events of one stream, numbered from 0."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.ended = False
        self.size = 0  # bytes
        self._news = trio.Event()

    def add(self, events: bytes) -> int:
        """Add whole events, one after the other; return how many bytes they take."""
        before = self.size
        for event in escape_line_ends(events).split(_END)[:-1]:
            self.events.append(event + _END)
            self.size += len(event) + len(_END) + _OBJECT
        self._wake()
        return self.size - before

    def end(self) -> None:
        """Note that no events follow."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    async def wait(self, seconds: float) -> bool:
        """Wait for more events, or the end; return whether something came in time."""
        with trio.move_on_after(seconds):
            await self._news.wait()
            return True
        return False


class EventLogBody:
    """The body of an event stream that reads a log."""

    def __init__(self, log: EventLog, start: int, silence: float, mark: bytes = b"") -> None:
        """`start`: the number of its first event; `silence`: seconds until a keep-alive comment.

        `mark`: a line before the last event of each piece, for a front.
        """
        self.failed = False  # the client does not read
        self._log = log
        self._next = start
        self._silence = silence
        self._mark = mark

    async def run(self, send: Callable[[Any], Any], transport: Transport) -> bytes:
        """Send the log's events until it ends; returns the last bytes, as `EventBody.run` does."""
        log = self._log
        while not (log.ended and self._next >= len(log.events)):
            piece = self._take()
            if not piece and not await log.wait(self._silence):
                piece = KEEP_ALIVE
            if not piece:
                continue
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if not await transport.wait_flushed():
                self.failed = True
                return b""
        return b""

    def _take(self) -> bytes:
        """Return the next events, of some tens of kilobytes at most unless one is larger."""
        taken: list[bytes] = []
        size = 0
        for place in range(self._next, len(self._log.events)):
            event = self._log.events[place]
            if taken and size + len(event) > _PIECE:
                break
            taken.append(event)
            size += len(event)
        self._next += len(taken)
        if taken and self._mark:
            taken.insert(-1, self._mark)
        return b"".join(taken)
