"""What images in the spool are called, as the processes that decode them have it.

The same image comes again with every question about it. Its name is that of its bytes; what a text
of base64 came to is remembered by a digest of the text, which takes a third of decoding it.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tgi_trio.media.image_text import BLOCK, decode_quoted, size_error, start_key

_REMEMBERED: Final = 4096  # texts


class ImageNames:
    """Names of the images of one kind of processing."""

    def __init__(
        self, settings: str, read: Callable[[bytes | bytearray, int], bytes] | None = None
    ) -> None:
        """`settings`: of the image processor, as `start_key` takes them.

        `read`: does for what is no image what `decode_quoted` does for one.
        """
        self._first = start_key(settings)
        self._read = read
        self._known: OrderedDict[bytes, tuple[str, int]] = (
            OrderedDict()
        )  # least recently used first

    def name(self, quoted: bytearray, most: int) -> tuple[str, int]:
        """Return the key in hexadecimal of an image of `most` bytes at most, and how many it has.

        `quoted`: its base64, as `read_quoted` returns it. Raises ValueError as `decode_quoted`.
        """
        digest = hashlib.sha256(quoted).digest()
        found = self._known.get(digest)
        if found is None:
            data = (self._read or decode_quoted)(quoted, most)
            key = self._first.copy()
            key.update(data)
            found = self._known[digest] = key.hexdigest(), len(data)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        if found[1] > most:
            raise ValueError(size_error(found[1], most))
        return found


def read_quoted(spool: int, blocks: Sequence[int], length: int) -> bytearray:
    """Return what is in blocks of the file `spool`, one behind the other, as a JSON string.

    A copy that is ours alone: who has left may have lost its blocks to another in the meantime.
    """
    quoted = bytearray(length + 2)
    quoted[0] = quoted[-1] = ord('"')
    with memoryview(quoted) as whole:
        done = 1
        for at, count in _spans(blocks, length):
            with whole[done : done + count] as part:
                os.preadv(spool, [part], at)
            done += count
    return quoted


def _spans(blocks: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    """Yield where in the file they are: from where on, and how many bytes; neighbours are one."""
    begin = 0
    while begin < len(blocks):
        end = begin + 1
        while end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
            end += 1
        yield blocks[begin] * BLOCK, min((end - begin) * BLOCK, length - begin * BLOCK)
        begin = end
