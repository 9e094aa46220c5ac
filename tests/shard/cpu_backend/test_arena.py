"""Memory for kernels is ours alone, begins on a page, and asks for huge pages where it is large."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from tgi_trio.shard.cpu_backend.arena import Arena, address, allocate_zeroed


def flags_of(where: int) -> set[str]:
    """Return the kernel's flags of the mapping that holds an address; see proc(5), VmFlags."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= where < end
        elif inside and first == "VmFlags:":
            return set(rest.split())
    raise AssertionError(f"no mapping holds {where:#x}")


@pytest.mark.parametrize("size", [1, 4 << 20])
def test_zeroed_memory_is_private_and_advised(size: int) -> None:
    values = allocate_zeroed((size,))
    assert address(values) % mmap.PAGESIZE == 0
    assert not values.any()
    values[:] = 1
    flags = flags_of(address(values))
    assert "sh" not in flags  # shared memory gets small pages, advised or not
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert ("hg" in flags) == (size >= 2 << 20)


def test_zeroed_has_shape_and_type() -> None:
    values = allocate_zeroed((3, 5), np.uint16)
    assert values.shape == (3, 5)
    assert values.dtype == np.uint16
    assert allocate_zeroed((0,)).size == 0


def test_an_arena_puts_small_arrays_next_to_each_other_in_huge_pages() -> None:
    arena = Arena()
    first, second = arena.allocate((3, 7), np.uint32), arena.allocate((5,), np.uint16)
    assert first.shape == (3, 7) and first.dtype == np.uint32
    assert second.shape == (5,) and second.dtype == np.uint16
    assert address(first) % (2 << 20) == 0
    assert address(second) == address(first) + 128  # the next cache line
    first[:] = 1
    assert not second.any()
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags_of(address(first))


def test_an_arena_has_room_for_arrays_of_any_size() -> None:
    arena = Arena()
    small = arena.allocate((64,), np.uint8)
    large = [arena.allocate((size,), np.uint8) for size in (48 << 20, 48 << 20, 200 << 20)]
    for i, array in enumerate(large):
        array[[0, -1]] = i + 1
    assert [array[[0, -1]].tolist() for array in large] == [[1, 1], [2, 2], [3, 3]]
    assert not small.any()
    assert all(address(array) % 64 == 0 for array in large)
