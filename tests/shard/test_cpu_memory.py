"""Memory for kernels is ours alone, begins on a page, and asks for huge pages where it is large."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from tgi_trio.shard.cpu.memory import address, zeroed


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
    values = zeroed((size,))
    assert address(values) % mmap.PAGESIZE == 0
    assert not values.any()
    values[:] = 1
    flags = flags_of(address(values))
    assert "sh" not in flags  # shared memory gets small pages, advised or not
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert ("hg" in flags) == (size >= 2 << 20)


def test_zeroed_has_shape_and_type() -> None:
    values = zeroed((3, 5), np.uint16)
    assert values.shape == (3, 5)
    assert values.dtype == np.uint16
    assert zeroed((0,)).size == 0
