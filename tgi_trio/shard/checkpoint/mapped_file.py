"""A mapped file that returns its pages to the system once they have been read."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 2 << 20  # bytes released at once: the largest unit of the page cache, aligned


class MappedFile:
    """The bytes of a file, read as they are touched.

    Released pages no longer count as this process's memory, so a checkpoint and its packed weights
    are never in memory together as a whole. Pages that leave the page cache as well are reused for
    the packed weights a moment later. That saves more than space: on a virtual machine, the first
    touch of memory that its host has not yet provided takes about ten microseconds a page.
    """

    def __init__(self, path: Path, *, gives_back: bool, writable: bool = False) -> None:
        """Map a file; `gives_back`: released pages leave the page cache, too. Raises OSError.

        `writable`: for libraries that do not support read-only memory; the file itself is not
        changed.
        """
        self.path = path
        self._file = path.open("rb")
        access = mmap.ACCESS_COPY if writable else mmap.ACCESS_READ
        self._mapping = mmap.mmap(self._file.fileno(), 0, access=access)
        self.data: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        self._gives_back = gives_back
        self._is_open = True
        # Bytes of each chunk that have not been released.
        self._left = np.full(-(-len(self.data) // _CHUNK), _CHUNK)
        self._left[-1] = len(self.data) - (len(self._left) - 1) * _CHUNK
        self._lock = threading.Lock()

    def read(self, first: int, end: int) -> NDArray[np.uint8]:
        """Return a copy of the bytes [first, end), which may be few and far from others.

        Touching them instead would wait for the kernel's readahead around them, megabytes on some
        disks.
        """
        return np.frombuffer(os.pread(self._file.fileno(), end - first, first), np.uint8).copy()

    def offset(self, values: NDArray[Any]) -> int:
        """Return the offset in bytes of a view of `data`."""
        return int(values.ctypes.data - self.data.ctypes.data)

    def close(self) -> None:
        """Close the file; mappings live as long as their views. After that, nothing is released."""
        self._is_open = False
        self._file.close()

    def keep(self, first: int, end: int) -> None:
        """Never release the bytes [first, end), which are read again and again."""
        self._left[first // _CHUNK : -(-end // _CHUNK)] = 2 * len(self.data)

    def release(self, first: int, end: int) -> None:
        """Note that the bytes [first, end) have been read for the last time; from any thread.

        Reading them again is possible, from the page cache or from the disk.
        """
        if not self._is_open:
            return
        for chunk in range(first // _CHUNK, -(-end // _CHUNK)):
            begin = chunk * _CHUNK
            with self._lock:
                self._left[chunk] -= min(end, begin + _CHUNK) - max(first, begin)
                is_read = self._left[chunk] == 0
            if is_read:
                size = min(_CHUNK, len(self.data) - begin)
                # else mapped pages would stay
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, size)
                if self._gives_back:
                    os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)
