"""Where the body of a request goes while it comes."""

from __future__ import annotations

from typing import Final, Protocol

import trio

from tgi_trio.router.http.messages.body_images import CutBody
from tgi_trio.router.pace import LoopPace

_SLICE: Final = 1 << 17  # bytes of a body that are looked at in one turn of the loop


class Body(Protocol):
    """What is made of a body: `WholeBody`, or `BodyCutter`."""

    def room(self, most: int) -> list[memoryview]:
        """Return where to write what comes next, as `BodySink.room` does."""

    def fill(self, count: int) -> None:
        """Take note of what has been written there."""

    def feed(self, piece: bytes) -> None:
        """Take what comes next."""

    def finish(self) -> CutBody:
        """Return the body, which is whole."""


class WholeBody:
    """A body in one piece of memory."""

    def __init__(self, announced: int) -> None:
        """`announced`: how many bytes it has, 0 where that is not known."""
        # Not pieces to be joined: that would take milliseconds at once, for a body of megabytes.
        self._bytes, self._size = bytearray(announced), 0

    def room(self, most: int) -> list[memoryview]:
        """Return where the next bytes of a body whose size is known are to be written."""
        with memoryview(self._bytes) as whole:
            return [whole[self._size : self._size + most]]

    def fill(self, count: int) -> None:
        """Take note of what has been written there."""
        self._size += count

    def feed(self, piece: bytes) -> None:
        """Take what comes next."""
        self._bytes[self._size : self._size + len(piece)] = piece
        self._size += len(piece)

    def finish(self) -> CutBody:
        """Return the body."""
        return CutBody(self._bytes)


class PacedBody:
    """A `BodySink` that is given more only in young turns of the loop."""

    def __init__(self, body: Body, pace: LoopPace) -> None:
        self._body = body
        self.ready = pace.breathe
        self.room, self.fill, self.feed = body.room, body.fill, body.feed

    async def take(self, piece: bytes) -> None:
        """Take what comes next, others running in between where it is much."""
        for start in range(0, len(piece), _SLICE):
            if start:
                await trio.lowlevel.checkpoint()
            await self.ready()
            self.feed(piece[start : start + _SLICE])
