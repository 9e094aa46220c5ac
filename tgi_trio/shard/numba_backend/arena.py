"""Memory for kernels: aligned, zeroed, and committed only when it is touched."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HUGE = 2 << 20  # below that, huge pages gain nothing
_LINE = 64  # bytes of a cache line
_MAPPED = 64 << 20  # that an arena maps at once


def allocate_zeroed(shape: tuple[int, ...], dtype: Any = np.uint8) -> NDArray[Any]:
    """Return an array of zeros that begins on a page; in huge pages where the system has them."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    # Private: what Python maps by default is shared, and gets small pages whatever one asks for.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, max(1, count * kind.itemsize), flags=flags)
    if len(mapping) >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, kind, count).reshape(shape)


class Arena:
    """Arrays of zeros, one after the other in huge pages; one alone may not fill a single one.

    What is mapped and not given out is never touched, so never taken from the system. The memory
    lives as long as any of its arrays.
    """

    def __init__(self) -> None:
        self._left = allocate_zeroed((0,))  # bytes that are mapped and not given out

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Return an array of zeros that begins on a cache line."""
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
    """Return where an array begins; 0 for none. The caller keeps the array alive."""
    return 0 if array is None else int(array.ctypes.data)
