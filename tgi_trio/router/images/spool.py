"""Images as they come, in memory that the processes which decode them have as well.

A body is never in one piece, and neither is an image in it: its base64 lies in blocks of a file
without a name, and whoever decodes it reads them there. Blocks are used again, since a page that is
touched for the first time costs more than what is copied into it.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from typing import Final, TypeAlias

from tgi_trio.errors import ValidationError
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
        # Appended to by whatever thread an image is forgotten in.
        self._returned: deque[list[int]] = deque()

    @property
    def used(self) -> int:
        """How many blocks images have."""
        self._collect()
        return self._count - len(self._free)

    @property
    def nbytes(self) -> int:
        """How many bytes the file has."""
        return self._count * BLOCK

    def take(self) -> int:
        """Return the number of a block that nobody has."""
        self._collect()
        if len(self._free) == self._count > _KEPT:
            self._resize(_KEPT)
        if not self._free:
            self._resize(self._count + _GROWTH)
        return self._free.pop()

    def give_back(self, blocks: list[int]) -> None:
        """Take back blocks that nobody will read again. Any thread may call it."""
        self._returned.append(blocks)

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

    def _collect(self) -> None:
        while self._returned:
            self._free += self._returned.popleft()

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
    """Base64 of an image, as a JSON string in a body has it. Its blocks are its own until the last
    who knows it has forgotten it: whoever may decode it again must not read another's."""

    def __init__(self, spool: Spool) -> None:
        self.blocks: list[int] = []
        self.length = 0  # bytes, as written
        self._spool = spool

    def __del__(self) -> None:
        if self.blocks:
            self._spool.give_back(self.blocks)

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
