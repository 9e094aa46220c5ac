"""The free list of KV blocks."""

from __future__ import annotations


class BlockAllocator:
    """Allocates and frees the block ids 1 .. total, in O(1) per block.

    Every block has exactly one owner: this free list, one sequence, or the prefix cache. Shared
    blocks are the prefix cache's, which counts their users; no reference counts are needed here.
    Block 0 is the shard's scratch block and is never handed out.
    """

    def __init__(self, total: int) -> None:
        """`total`: number of blocks. Raises ValueError for less than one."""
        if total < 1:
            raise ValueError(f"a block allocator needs at least one usable block, not {total}")
        self.total = total
        # Taken from the end: low ids first, and the last freed first.
        self._free = list(range(total, 0, -1))
        self._is_free = bytearray(b"\1" * (total + 1))
        self._is_free[0] = 0

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks. Raises ValueError if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        if count <= 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        is_free = self._is_free
        for block in taken:
            is_free[block] = 0
        return taken

    def give(self, blocks: list[int]) -> None:
        """Free `blocks`. Raises ValueError for one that is free already or out of range."""
        is_free = self._is_free
        for block in blocks:
            if not 0 < block <= self.total or is_free[block]:
                raise ValueError(f"block {block} is not in use and cannot be freed")
            is_free[block] = 1
        self._free.extend(reversed(blocks))

    def clear(self) -> None:
        """Free all blocks."""
        self.__init__(self.total)  # type: ignore[misc]

    def check(self, owned: set[int]) -> None:
        """Raise AssertionError unless every block is either free or in `owned`."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is in the free list twice")
        if free & owned:
            raise AssertionError(f"blocks {sorted(free & owned)[:8]} are free and in use")
        if free | owned != set(range(1, self.total + 1)):
            lost = set(range(1, self.total + 1)) - free - owned
            raise AssertionError(f"blocks {sorted(lost)[:8]} are lost")
        if {i for i, flag in enumerate(self._is_free) if flag} != free:
            raise AssertionError("free flags and free list differ")
