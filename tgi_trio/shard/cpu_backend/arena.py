"""Memory for kernels: aligned, zeroed, and not committed until it is touched."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HUGE = 2 << 20  # below this size, huge pages gain nothing
_LINE = 64  # bytes of a cache line
_MAPPED = 64 << 20  # bytes that an arena maps at once


def allocate_zeroed(shape: tuple[int, ...], dtype: Any = np.uint8) -> NDArray[Any]:
    """Return a page-aligned array of zeros, in huge pages if the system has them."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    # Private, because Python's default is a shared mapping, which never gets huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, max(1, count * kind.itemsize), flags=flags)
    if len(mapping) >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, kind, count).reshape(shape)


class Arena:
    """Arrays of zeros in huge pages, one after the other, since one alone may not fill a page.

    Memory that is mapped but not handed out is never touched, so it is never committed. The memory
    lives as long as any of its arrays.
    """

    def __init__(self) -> None:
        self._left = allocate_zeroed((0,))  # bytes mapped and not handed out

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array of zeros, aligned to a cache line."""
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        room = size + -size % _LINE
        if room > len(self._left):
            mapped = allocate_zeroed((max(room, _MAPPED) + _HUGE,))
            self._left = mapped[-address(mapped) % _HUGE :]
        taken: NDArray[Any] = self._left[:size].view(kind)
        self._left = self._left[room:]
        return taken.reshape(shape)


def address(array: NDArray[Any] | None) -> int:
    """Return the address of an array, which the caller keeps alive; 0 for None."""
    return 0 if array is None else int(array.ctypes.data)
