"""TGI's allocator cases (spec 10.1) on our memory, with our two differences.

A full hit leaves the block of the last token to compute, and blocks are taken in rising order; so
block numbers are not compared, but prefixes, sharing and free counts are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.router.scheduling.harness import request
from tgi_trio.router.scheduling.kv_memory import KvMemory
from tgi_trio.router.scheduling.sequence import Sequence


@dataclass
class Memory:
    """`alloc` and `free` as the cases have them, around a KvMemory."""

    block_size: int
    blocks: int  # block 0 included
    held: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = KvMemory(self.blocks - 1, self.block_size, caching=True)

    def alloc(self, tokens: int, key: list[int]) -> Sequence:
        sequence = Sequence(0, request(key, 1), 0, 0.0, 0)
        match = self.memory.match(sequence)
        self.memory.admit(sequence, match, tokens)
        assert 0 not in sequence.blocks
        sequence.target = len(key)
        self.held.append(sequence)
        self.memory.check(self.held)
        return sequence

    def free(self, sequence: Sequence) -> None:
        """Give back after the whole prompt has been computed."""
        sequence.computed = sequence.target
        self.held.remove(sequence)
        self.memory.release(sequence)
        self.memory.check(self.held)


def test_block_size() -> None:
    memory = Memory(2, 12)
    first = memory.alloc(8, [0, 1, 2, 3])
    assert len(first.blocks) == 4 and first.cached_at_start == 0
    blocks = first.blocks
    memory.free(first)
    again = memory.alloc(8, [0, 1, 2, 3])
    assert again.cached_at_start == 2  # TGI: 4, of which one token is computed again in place
    assert again.blocks[:1] == blocks[:1]


def test_not_aligned() -> None:
    memory = Memory(2, 12)
    first = memory.alloc(7, [0, 1, 2])
    assert len(first.blocks) == 4 and first.cached_at_start == 0
    blocks = first.blocks
    memory.free(first)
    again = memory.alloc(7, [0, 1, 2])
    assert again.cached_at_start == 2 and again.blocks[0] == blocks[0]


def test_reuse() -> None:
    memory = Memory(1, 12)
    first = memory.alloc(8, [0, 1, 2, 3])
    blocks = first.blocks
    memory.free(first)
    again = memory.alloc(8, [0, 1, 2, 3])
    assert again.cached_at_start == 3 and again.blocks[:3] == blocks[:3]


def test_the_oldest_is_evicted_first() -> None:
    memory = Memory(1, 7)
    first, second = memory.alloc(4, [0, 1, 2, 3]), memory.alloc(2, [4, 5])
    blocks = set(first.blocks)
    memory.free(first)
    memory.free(second)
    third = memory.alloc(4, [6, 7, 8, 9])
    assert third.cached_at_start == 0 and set(third.blocks) == blocks
    assert memory.alloc(2, [4, 5]).cached_at_start == 1


def test_fully_overlapping() -> None:
    memory = Memory(1, 10)
    first, second = memory.alloc(4, [0, 1, 2, 3]), memory.alloc(4, [0, 1, 2, 3])
    memory.free(second)
    memory.free(first)
    assert memory.memory.free == 5
    assert memory.alloc(4, [0, 1, 2, 3]).cached_at_start == 3


def test_partially_overlapping() -> None:
    memory = Memory(1, 20)
    first = memory.alloc(4, [0, 1])
    memory.free(first)
    second = memory.alloc(8, [0, 1, 2, 3, 4, 5])
    assert second.cached_at_start == 2
    third = memory.alloc(8, [0, 1, 2, 3, 6, 7])
    assert third.cached_at_start == 2 and third.blocks[:2] == second.blocks[:2]
    assert not set(third.blocks[2:]) & set(second.blocks[2:])
    memory.free(third)
    memory.free(second)
    assert memory.memory.free == 11
    fourth, fifth = memory.alloc(6, [0, 1, 2, 3, 4, 5]), memory.alloc(6, [0, 1, 2, 3, 6, 7])
    assert fourth.cached_at_start == fifth.cached_at_start == 5
    assert fourth.blocks[:4] == fifth.blocks[:4] and fourth.blocks[4] != fifth.blocks[4]
