"""Encoded media as they arrive, in memory that is shared with the decoding processes.

Neither a body nor an image, a video or a sound in it is ever in one piece: its base64 is in blocks
of an anonymous file, where the decoding process reads it. Blocks are reused, since touching a page
for the first time costs more than copying into it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from tgi_trio.errors import GenerationError, ValidationError
from tgi_trio.media.image_text import BLOCK, read_text

_GROWTH: Final = 64  # blocks added at once
_KEPT: Final = 512  # blocks kept when none is in use


class Spool:
    """The blocks of all images that are being received; their number follows the demand."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("tgi-trio-spool", os.MFD_CLOEXEC)  # for the decoding processes
        self._map: mmap.mmap | None = None
        self._count = 0  # blocks in the file
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """How many blocks are in use."""
        return self._count - len(self._free)

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        return self._count * BLOCK

    def take(self, count: int) -> list[int]:
        """Return the numbers of free blocks, adjacent ones if possible."""
        if len(self._free) == self._count > _KEPT:
            self._resize(_KEPT)
        if (missing := count - len(self._free)) > 0:
            self._resize(self._count + max(missing, _GROWTH))
        first = len(self._free) - count
        taken = self._free[first:]
        del self._free[first:]
        return taken[::-1]

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks that will not be read again."""
        self._free += blocks[::-1]

    def view(self, at: int, count: int) -> memoryview:
        """Return a writable view of `count` bytes of the file from `at` on.

        It must be released before any block is taken, as that may move the memory.
        """
        with memoryview(self._mapped()) as whole:
            return whole[at : at + count]

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes of the file from `at` on."""
        return self._mapped()[at : at + count]

    def find(self, letter: bytes, at: int, count: int) -> int:
        """Return the first position of `letter` in `count` bytes from `at` on, or -1."""
        return self._mapped().find(letter, at, at + count)

    def close(self) -> None:
        """Free the memory; no image is read or written any more."""
        if self._map is not None:
            self._map.close()
        os.close(self.fd)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise RuntimeError("no block was taken")
        return self._map

    def _resize(self, count: int) -> None:
        """Resize the file to `count` blocks: more than now, or fewer if none is in use."""
        if self._map is None:
            os.ftruncate(self.fd, count * BLOCK)
            self._map = mmap.mmap(self.fd, count * BLOCK)
        else:
            self._map.resize(count * BLOCK)
        grown = count > self._count
        first, free = (self._count, self._free) if grown else (0, [])
        self._free = [*range(count - 1, first - 1, -1), *free]
        self._count = count


class EncodedImage:
    """The base64 of an image, as in a JSON string of a body.

    Its blocks are its own until everything that keeps it has let go, as a later decoding must not
    read another image's data. The creator keeps it first.
    """

    def __init__(self, spool: Spool) -> None:
        self.blocks: list[int] = []
        self.length = 0  # bytes as in the body
        self._spool = spool
        self._keepers = 1

    def keep(self) -> None:
        """Keep its blocks until one more call of `let_go`.

        Raises GenerationError if they have been freed, as the client has left.
        """
        if not self._keepers:
            raise GenerationError("the client has left")
        self._keepers += 1

    def let_go(self) -> None:
        """Undo one `keep`, or the creation; the last one frees the blocks."""
        if not self._keepers:
            raise RuntimeError("an image is let go of more often than it is kept")
        self._keepers -= 1
        if not self._keepers:
            self._spool.give_back(self.blocks)
            self.blocks = []

    def append(self, piece: bytes | bytearray) -> None:
        """Take the next bytes."""
        with memoryview(piece) as whole:
            done = 0
            for view in self.room(len(piece)):
                with view:
                    view[:] = whole[done : done + len(view)]
                    done += len(view)
        self.fill(done)

    def room(self, most: int) -> list[memoryview]:
        """Return where to write up to `most` of the next bytes, in order.

        They must be written at once and reported to `fill`, and the views must not be kept.
        """
        end = self.length + most
        self.blocks += self._spool.take(-(-end // BLOCK) - len(self.blocks))
        return [self._spool.view(*span) for span in self._spans(self.length, end)]

    def fill(self, count: int) -> None:
        """Take note of `count` bytes written to `room`."""
        self.length += count
        used = -(-self.length // BLOCK)
        self._spool.give_back(self.blocks[used:])
        del self.blocks[used:]

    def find(self, letter: bytes, begin: int) -> int:
        """Return the position of a letter at or after `begin`, negative if it is not there."""
        for at, count in self._spans(begin, self.length):
            found = self._spool.find(letter, at, count)
            if found >= 0:
                return begin + found - at
            begin += count
        return -1

    def cut_off(self, end: int) -> bytes:
        """Remove and return the bytes from `end` on."""
        rest = self.written(end)
        self.fill(end - self.length)
        return rest

    def written(self, begin: int = 0) -> bytes:
        """Return the bytes as they arrived, from `begin` on."""
        return b"".join(self._spool.read(*span) for span in self._spans(begin, self.length))

    def _spans(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield where its bytes are in the file, (offset, count); adjacent ones are joined."""
        first = size = 0
        while begin < end:
            at = self.blocks[begin // BLOCK] * BLOCK + begin % BLOCK
            count = min(BLOCK - begin % BLOCK, end - begin)
            if at != first + size:
                if size:
                    yield first, size
                first, size = at, 0
            size += count
            begin += count
        if size:
            yield first, size

    def text(self) -> str:
        """Return the value of the JSON string. Raises ValidationError."""
        try:
            return read_text(self.written()).decode()
        except ValueError as error:
            raise ValidationError(str(error)) from error


# An image before decoding: in memory if it was fetched or is small, otherwise in the spool.
Compressed: TypeAlias = "bytes | bytearray | EncodedImage"


@contextmanager
def keeping(data: Compressed) -> Iterator[None]:
    """Keep an image for the block, wherever it is. Raises as `EncodedImage.keep`."""
    if not isinstance(data, EncodedImage):
        yield
        return
    data.keep()
    try:
        yield
    finally:
        data.let_go()
