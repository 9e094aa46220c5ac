"""Computed prefixes that outlive their shard: which of them are kept, and where they come back.

They are kept most recently used first, so that any first part of them is a whole tree, and numbered
by that order: a new shard has them in the blocks 1, 2, ..., and their snapshots of recurrent states
in the slots 1, 2, ... Prefixes of adapters, whose numbers are a server's own, and what follows an
image, which tokens do not identify, are not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from tgi_trio.router.scheduling.prefix_cache import TOKEN_BYTES, Node, PrefixCache
from tgi_trio.router.scheduling.state_memory import StateMemory


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A node of the tree of prefixes."""

    salt: str  # of its namespace; the adapter is none
    parent: int  # place of the run before it, among all runs; -1: it begins prompts
    tokens: bytes  # int32 ids, of whole blocks
    snapshots: tuple[int, ...] = ()  # behind which of its blocks, counted from 0, states are kept

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.tokens, np.int32).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class KeptPrefixes:
    """A tree of prefixes, each run after the one before it."""

    block_size: int
    runs: tuple[KeptRun, ...]

    def count_blocks(self, run: KeptRun) -> int:
        """Return how many blocks a run has."""
        return len(run.tokens) // (self.block_size * TOKEN_BYTES)

    @property
    def blocks(self) -> int:
        return sum(map(self.count_blocks, self.runs))

    @property
    def slots(self) -> int:
        return sum(len(run.snapshots) for run in self.runs)

    def check(self) -> None:
        """Raise ValueError unless runs are whole blocks, and each comes after the one before it."""
        for place, run in enumerate(self.runs):
            blocks, rest = divmod(len(run.tokens), max(1, self.block_size * TOKEN_BYTES))
            rising = sorted({each for each in run.snapshots if 0 <= each < blocks})
            if not blocks or rest or list(run.snapshots) != rising or not -1 <= run.parent < place:
                raise ValueError(f"run {place} of {len(self.runs)} does not belong to a tree")

    def fit(self, blocks: int, slots: int) -> KeptPrefixes:
        """Return the first runs that need at most so many blocks and slots."""
        for count, run in enumerate(self.runs):
            blocks, slots = blocks - self.count_blocks(run), slots - len(run.snapshots)
            if blocks < 0 or slots < 0:
                return KeptPrefixes(self.block_size, self.runs[:count])
        return self


class Collected(NamedTuple):
    """Prefixes, and where they are now, in the order in which they are kept."""

    prefixes: KeptPrefixes
    blocks: list[int]
    slots: list[int]


MOST_BLOCKS: Final = 100_000  # 1.6 million tokens: an order that names more would not fit a ring


class Budget:
    """The bytes that may be kept."""

    def __init__(self, left: int, block_bytes: int, slot_bytes: int) -> None:
        """`block_bytes`, `slot_bytes`: of one block, of one slot of states, on all ranks."""
        self._left = left
        self._places = self._slots = MOST_BLOCKS
        self._block_bytes = max(1, block_bytes)
        self._slot_bytes = slot_bytes

    def take_blocks(self, count: int) -> int:
        """Spend on up to `count` blocks; returns on how many."""
        count = min(count, self._left // self._block_bytes, self._places)
        self._left -= count * self._block_bytes
        self._places -= count
        return count

    def take_slot(self) -> bool:
        """Spend on a slot, if there is enough for it."""
        if self._left < self._slot_bytes or not self._slots:
            return False
        self._left -= self._slot_bytes
        self._slots -= 1
        return True


def collect(cache: PrefixCache, states: StateMemory | None, budget: Budget) -> Collected:
    """Return what is kept of a cache. Changes nothing but the budget."""
    size = cache.block_size
    runs: list[KeptRun] = []
    blocks: list[int] = []
    slots: list[int] = []
    places: dict[Node, int] = {}  # of runs that are kept to their end
    for node in cache.recent():
        adapter, salt = node.namespace
        above = node.parent
        begins = above is None or above.parent is None
        if adapter or not (begins or above in places):
            continue
        count = budget.take_blocks(_count_text(node.key, size, len(node.blocks)))
        if not count:
            continue
        own = []
        for place, block in enumerate(node.blocks[:count] if states is not None else ()):
            slot = None if states is None else states.find_kept(block)
            if slot is not None and budget.take_slot():
                own.append(place)
                slots.append(slot)
        if count == len(node.blocks):
            places[node] = len(runs)
        parent = -1 if begins or above is None else places[above]
        runs.append(KeptRun(salt, parent, node.key[: count * size * TOKEN_BYTES], tuple(own)))
        blocks += node.blocks[:count]
    return Collected(KeptPrefixes(size, tuple(runs)), blocks, slots)


def graft(kept: KeptPrefixes, blocks: list[int], cache: PrefixCache) -> dict[int, bytes]:
    """Put kept prefixes into an empty cache; returns the blocks that have a snapshot, in order,
    with their digests.

    `blocks`: all of theirs, in order. Raises ValueError or IndexError if they are no tree.
    """
    nodes: list[Node] = []
    with_states: dict[int, bytes] = {}
    at = 0
    for run in kept.runs:
        own = blocks[at : at + kept.count_blocks(run)]
        at += len(own)
        parent = None if run.parent < 0 else nodes[run.parent]
        nodes.append(cache.graft((0, run.salt), parent, run.tokens, own))
        if run.snapshots:
            digests = cache.digests_of(nodes[-1])
            with_states |= {own[place]: digests[place] for place in run.snapshots}
    return with_states


def _count_text(key: bytes, block_size: int, blocks: int) -> int:
    """Return how many blocks of a key come before its first image, whose numbers are negative."""
    ids = np.frombuffer(key, np.int32)
    images = np.flatnonzero(ids < 0)
    return int(images[0]) // block_size if len(images) else blocks
