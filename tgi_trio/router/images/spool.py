"""Images as they come, in memory that the processes which decode them have as well.

A body is never in one piece, and neither is an image in it: its base64 lies in blocks of a file
without a name, and whoever decodes it reads them there. Blocks are used again, since a page that is
touched for the first time costs more than what is copied into it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias

from tgi_trio.errors import GenerationError, ValidationError
from tgi_trio.images.image_text import BLOCK, read_text

_GROWTH: Final = 64  # blocks that are added at once
_KEPT: Final = 512  # blocks that stay when none is used


class Spool:
    """The blocks of all images under way: as many as the bodies that are held at a time need."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("tgi-trio-spool", os.MFD_CLOEXEC)  # for whoever decodes
        self._map: mmap.mmap | None = None
        self._count = 0  # blocks of the file
        self._free: list[int] = []

    @property
    def used(self) -> int:
        """How many blocks images have."""
        return self._count - len(self._free)

    @property
    def nbytes(self) -> int:
        """How many bytes the file has."""
        return self._count * BLOCK

    def take(self, count: int) -> list[int]:
        """Return the numbers of blocks that nobody has, neighbours as far as there are some."""
        if len(self._free) == self._count > _KEPT:
            self._resize(_KEPT)
        if (missing := count - len(self._free)) > 0:
            self._resize(self._count + max(missing, _GROWTH))
        first = len(self._free) - count
        taken = self._free[first:]
        del self._free[first:]
        return taken[::-1]

    def give_back(self, blocks: list[int]) -> None:
        """Take back blocks that nobody will read again."""
        self._free += blocks[::-1]

    def view(self, at: int, count: int) -> memoryview:
        """Return `count` bytes of the file, from `at` on, to be written.

        It is to be released before anybody takes a block: memory may move by that.
        """
        with memoryview(self._mapped()) as whole:
            return whole[at : at + count]

    def read(self, at: int, count: int) -> bytes:
        """Return `count` bytes of the file, from `at` on."""
        return self._mapped()[at : at + count]

    def find(self, letter: bytes, at: int, count: int) -> int:
        """Return where in such bytes of the file a letter is first, -1 where it is not."""
        return self._mapped().find(letter, at, at + count)

    def close(self) -> None:
        """Give the memory back; no image is read or written any more."""
        if self._map is not None:
            self._map.close()
        os.close(self.fd)

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            raise RuntimeError("no block was taken")
        return self._map

    def _resize(self, count: int) -> None:
        """Have so many blocks: more than now, or fewer where none is used."""
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
    """Base64 of an image, as a JSON string in a body has it.

    Its blocks are its own until everybody who keeps it has let go of it: whoever may decode it
    again must not read another's. Who makes one keeps it.
    """

    def __init__(self, spool: Spool) -> None:
        self.blocks: list[int] = []
        self.length = 0  # bytes, as written
        self._spool = spool
        self._keepers = 1

    def keep(self) -> None:
        """Have its blocks stay until `let_go` is called once more.

        Raises GenerationError where they have been given back: its client has left.
        """
        if not self._keepers:
            raise GenerationError("the client has left")
        self._keepers += 1

    def let_go(self) -> None:
        """Undo one `keep`, or the making; the last gives the blocks back."""
        if not self._keepers:
            raise RuntimeError("an image is let go of more often than it is kept")
        self._keepers -= 1
        if not self._keepers:
            self._spool.give_back(self.blocks)
            self.blocks = []

    def append(self, piece: bytes | bytearray) -> None:
        """Take what comes next."""
        with memoryview(piece) as whole:
            done = 0
            for view in self.room(len(piece)):
                with view:
                    view[:] = whole[done : done + len(view)]
                    done += len(view)
        self.fill(done)

    def room(self, most: int) -> list[memoryview]:
        """Return where up to `most` of the next bytes are to be written, one behind the other.

        They are to be written at once and told to `fill`, and nothing kept of the views.
        """
        end = self.length + most
        self.blocks += self._spool.take(-(-end // BLOCK) - len(self.blocks))
        return [self._spool.view(*span) for span in self._spans(self.length, end)]

    def fill(self, count: int) -> None:
        """Note that so many bytes have been written to `room`."""
        self.length += count
        used = -(-self.length // BLOCK)
        self._spool.give_back(self.blocks[used:])
        del self.blocks[used:]

    def find(self, letter: bytes, begin: int) -> int:
        """Return where a letter is, at or behind `begin`, negative where it is not."""
        for at, count in self._spans(begin, self.length):
            found = self._spool.find(letter, at, count)
            if found >= 0:
                return begin + found - at
            begin += count
        return -1

    def cut_off(self, end: int) -> bytes:
        """Return what is behind `end`, and have it no more."""
        rest = self.written(end)
        self.fill(end - self.length)
        return rest

    def written(self, begin: int = 0) -> bytes:
        """Return it as it came, from `begin` on."""
        return b"".join(self._spool.read(*span) for span in self._spans(begin, self.length))

    def _spans(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield where in the file its bytes are: from where on, how many; neighbours are one."""
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
        """Return what the JSON string says; raises ValidationError."""
        try:
            return read_text(self.written()).decode()
        except ValueError as error:
            raise ValidationError(str(error)) from error


# An image as it came: fetched or small, or in the spool.
Compressed: TypeAlias = "bytes | bytearray | EncodedImage"


@contextmanager
def keeping(data: Compressed) -> Iterator[None]:
    """Keep an image for the block, wherever it lies; raises as `EncodedImage.keep`."""
    if not isinstance(data, EncodedImage):
        yield
        return
    data.keep()
    try:
        yield
    finally:
        data.let_go()
