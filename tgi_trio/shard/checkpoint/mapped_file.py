"""A file in memory that gives its pages back to the system once they have been read."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 2 << 20  # bytes given back at a time: the largest unit of the page cache, and aligned


class MappedFile:
    """The bytes of a file, read as they are touched.

    What has been released is this process's memory no longer, so that a checkpoint and what it is
    packed into are never both there whole. What leaves the page cache too is what the packed
    weights are made of a moment later. That saves more than space: on a virtual machine the first
    touch of memory its host has not yet provided takes some ten microseconds a page.
    """

    def __init__(self, path: Path, *, gives_back: bool, writable: bool = False) -> None:
        """Map a file; `gives_back`: released pages leave the page cache too. Raises OSError.

        `writable`: for libraries that know no read-only memory; the file itself stays as it is.
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

        Touching them would wait for what the kernel reads around them: megabytes, on some disks.
        """
        return np.frombuffer(os.pread(self._file.fileno(), end - first, first), np.uint8).copy()

    def offset(self, values: NDArray[Any]) -> int:
        """Return where values begin that are a view of `data`, in bytes."""
        return int(values.ctypes.data - self.data.ctypes.data)

    def close(self) -> None:
        """Close the file; what is mapped lives as long as any view of it. Nothing is given back."""
        self._is_open = False
        self._file.close()

    def keep(self, first: int, end: int) -> None:
        """Never give back the bytes [first, end): they are read again and again."""
        self._left[first // _CHUNK : -(-end // _CHUNK)] = 2 * len(self.data)

    def release(self, first: int, end: int) -> None:
        """Say that the bytes [first, end) have been read for the last time; from any thread.

        Reading them all the same reads them from the page cache, or from the disk.
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
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, size)  # mapped pages would stay
                if self._gives_back:
                    os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)
