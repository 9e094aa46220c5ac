"""Allocates bytes of an arena: first fit, neighbouring holes are joined."""

from __future__ import annotations

from bisect import bisect_left

from tgi_trio.ipc.images import ALIGNMENT


class FreeSpace:
    """The free bytes of an arena, as holes that do not touch; offsets are aligned."""

    def __init__(self, nbytes: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, nbytes)] if nbytes else []  # offset, bytes

    @property
    def nbytes(self) -> int:
        """Bytes in all holes together."""
        return sum(size for _, size in self._holes)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Offset and bytes of each hole, in order."""
        return list(self._holes)

    def take(self, nbytes: int) -> int | None:
        """Take `nbytes` and return their offset, None if no hole is large enough."""
        wanted = align(nbytes)
        for i, (offset, size) in enumerate(self._holes):
            if size < wanted:
                continue
            if size == wanted:
                del self._holes[i]
            else:
                self._holes[i] = (offset + wanted, size - wanted)
            return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Free what `take` returned."""
        size = align(nbytes)
        i = bisect_left(self._holes, (offset, 0))
        if i < len(self._holes) and offset + size == self._holes[i][0]:
            size += self._holes.pop(i)[1]
        if i and sum(self._holes[i - 1]) == offset:
            before, more = self._holes.pop(i - 1)
            offset, size, i = before, size + more, i - 1
        self._holes.insert(i, (offset, size))


def align(nbytes: int) -> int:
    """Return the bytes that a place of `nbytes` takes up."""
    return max(nbytes + -nbytes % ALIGNMENT, ALIGNMENT)
