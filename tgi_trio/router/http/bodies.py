"""Buffers for the body of a request while it arrives."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import trio

from tgi_trio.router.http.messages.body_images import CutBody
from tgi_trio.router.http.wire.pace import LoopPace

_SLICE: Final = 1 << 17  # bytes of a body that are handled in one turn of the loop


class Body(Protocol):
    """A buffer for a body: `WholeBody` or `BodyCutter`."""

    def room(self, most: int) -> list[memoryview]:
        """Return where to write the next bytes, as `BodySink.room` does."""

    def fill(self, count: int) -> None:
        """Note that `count` bytes have been written there."""

    def feed(self, piece: bytes) -> None:
        """Take the next bytes."""

    def finish(self) -> CutBody:
        """Return the complete body."""


class WholeBody:
    """A body in one contiguous buffer."""

    def __init__(self, announced: int) -> None:
        """`announced`: its size in bytes, 0 if not known."""
        # Contiguous: joining pieces of several megabytes would block the loop for milliseconds.
        # Not a bytearray of that size: the loop would wait until all of it has been set to zero.
        self._bytes: bytearray | memoryview = bytearray()
        if announced:
            self._bytes = np.empty(announced, np.uint8).data
        self._size = 0

    def room(self, most: int) -> list[memoryview]:
        """Return where to write the next bytes of a body whose size is known."""
        with memoryview(self._bytes) as whole:
            return [whole[self._size : self._size + most]]

    def fill(self, count: int) -> None:
        """Note that `count` bytes have been written there."""
        self._size += count

    def feed(self, piece: bytes) -> None:
        """Take the next bytes, which may be more than were announced."""
        end = self._size + len(piece)
        if isinstance(self._bytes, memoryview) and end > len(self._bytes):
            self._bytes = bytearray(self._bytes[: self._size])
        self._bytes[self._size : end] = piece
        self._size = end

    def finish(self) -> CutBody:
        """Return the body."""
        whole = len(self._bytes) == self._size
        return CutBody(self._bytes if whole else self._bytes[: self._size])


class PacedBody:
    """A `BodySink` that asks for more only while the current turn of the loop is young."""

    def __init__(self, body: Body, pace: LoopPace) -> None:
        self._body = body
        self.ready = pace.breathe
        self.room, self.fill, self.feed = body.room, body.fill, body.feed

    async def take(self, piece: bytes) -> None:
        """Take the next bytes; other tasks run in between where there are many."""
        for start in range(0, len(piece), _SLICE):
            if start:
                await trio.lowlevel.checkpoint()
            await self.ready()
            self.feed(piece[start : start + _SLICE])
