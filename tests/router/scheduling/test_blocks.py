"""The free list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.router.scheduling.blocks import BlockAllocator


def test_block_0_is_never_handed_out() -> None:
    allocator = BlockAllocator(5)
    assert sorted(allocator.take(5)) == [1, 2, 3, 4, 5]
    assert allocator.free == 0


def test_mistakes_are_refused() -> None:
    allocator = BlockAllocator(3)
    with pytest.raises(ValueError, match="4 blocks wanted, 3 free"):
        allocator.take(4)
    taken = allocator.take(2)
    allocator.give(taken[:1])
    for wrong in (taken[0], 0, 4, -1):
        with pytest.raises(ValueError, match="cannot be freed"):
            allocator.give([wrong])
    with pytest.raises(ValueError, match="at least one"):
        BlockAllocator(0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_taken_and_free_are_always_the_whole(moves: list[tuple[bool, int]]) -> None:
    allocator = BlockAllocator(20)
    owned: list[int] = []
    for take, count in moves:
        if take and count <= allocator.free:
            taken = allocator.take(count)
            assert len(taken) == count and not set(taken) & set(owned)
            owned += taken
        elif not take:
            allocator.give(owned[:count])
            del owned[:count]
        allocator.check(set(owned))
    allocator.clear()
    allocator.check(set())


def test_check_sees_lost_and_doubled_blocks() -> None:
    allocator = BlockAllocator(4)
    taken = allocator.take(2)
    with pytest.raises(AssertionError, match="lost"):
        allocator.check(set(taken[:1]))
    with pytest.raises(AssertionError, match="free and in use"):
        allocator.check({*taken, *allocator.take(1), 4})
