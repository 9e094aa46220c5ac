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

    def take(self) -> int:
        """Return the number of a block that nobody has."""
        if len(self._free) == self._count > _KEPT:
            self._resize(_KEPT)
        if not self._free:
            self._resize(self._count + _GROWTH)
        return self._free.pop()

    def give_back(self, blocks: list[int]) -> None:
        """Take back blocks that nobody will read again."""
        self._free += blocks

    def write(self, block: int, at: int, piece: memoryview) -> None:
        """Write a piece to a block, `at` bytes behind its beginning."""
        begin = block * BLOCK + at
        self._mapped()[begin : begin + len(piece)] = piece

    def read(self, block: int, count: int) -> bytes:
        """Return the first bytes of a block."""
        return self._mapped()[block * BLOCK : block * BLOCK + count]

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
        """Have so many blocks: more where all are used, fewer where none is."""
        if self._map is None:
            os.ftruncate(self.fd, count * BLOCK)
            self._map = mmap.mmap(self.fd, count * BLOCK)
        else:
            self._map.resize(count * BLOCK)
        first = self._count if count > self._count else 0
        self._free = [*range(count - 1, first - 1, -1)]
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
        with memoryview(piece) as view:
            done = 0
            while done < len(view):
                at = self.length % BLOCK
                if not at:
                    self.blocks.append(self._spool.take())
                part = view[done : done + BLOCK - at]
                self._spool.write(self.blocks[-1], at, part)
                self.length += len(part)
                done += len(part)

    def written(self) -> bytes:
        """Return it as it came."""
        left, parts = self.length, []
        for block in self.blocks:
            parts.append(self._spool.read(block, min(left, BLOCK)))
            left -= BLOCK
        return b"".join(parts)

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
