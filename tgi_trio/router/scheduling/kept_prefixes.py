"""Computed prefixes that outlive their shard: which of them are kept, and where they come back.

They are kept most recently used first, so that any first part of them is a whole tree, and numbered
by that order: a new shard has them in the blocks 1, 2, ..., and their snapshots of recurrent states
in the slots 1, 2, ... Those for which it has no room come to the host's memory, if it has copies
there, and what was in the host's memory alone is kept behind the rest. Prefixes of adapters, whose
numbers are a server's own, and what follows an image, which tokens do not identify, are not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from tgi_trio.router.scheduling.block_digests import Origin, begin_digests, extend_digests
from tgi_trio.router.scheduling.host_tier import HostTier
from tgi_trio.router.scheduling.prefix_cache import TOKEN_BYTES, PrefixCache
from tgi_trio.router.scheduling.prefix_nodes import Node
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
        if self.block_size < 1:
            raise ValueError(f"a block of {self.block_size} tokens does not belong to a tree")
        for place, run in enumerate(self.runs):
            blocks, rest = divmod(len(run.tokens), self.block_size * TOKEN_BYTES)
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

    def divide(
        self, blocks: int, slots: int, host_blocks: int, host_slots: int
    ) -> tuple[KeptPrefixes, int]:
        """Return the first runs for which a device and the host's memory have room.

        And how many of them are on the device. The last of the others may be cut short.
        """
        runs = list(self.fit(blocks, slots).runs)
        on_device = len(runs)
        for run in self.runs[on_device:]:
            count = min(self.count_blocks(run), host_blocks)
            if not count:
                break
            snapshots = tuple(at for at in run.snapshots if at < count)[:host_slots]
            tokens = run.tokens[: count * self.block_size * TOKEN_BYTES]
            runs.append(KeptRun(run.salt, run.parent, tokens, snapshots))
            host_blocks, host_slots = host_blocks - count, host_slots - len(snapshots)
            if len(tokens) < len(run.tokens):
                break
        return KeptPrefixes(self.block_size, tuple(runs)), on_device


class Collected(NamedTuple):
    """Prefixes, and where they are now, in the order in which they are kept.

    A negative number is a place of the host's memory.
    """

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


class _Block(NamedTuple):
    """A block that is kept."""

    origin: Origin
    run: object  # what it has in common with those that may be in a run with it
    number: int
    slot: int  # of the snapshot behind it; 0: there is none


class _Run:
    """Blocks that are kept one behind the other."""

    __slots__ = ("blocks", "parent", "salt", "slots", "snapshots", "tokens")

    def __init__(self, salt: str, parent: int) -> None:
        self.salt, self.parent = salt, parent
        self.tokens = bytearray()
        self.blocks: list[int] = []
        self.snapshots: list[int] = []
        self.slots: list[int] = []

    def add(self, block: _Block) -> None:
        self.tokens += block.origin.tokens
        if block.slot:
            self.snapshots.append(len(self.blocks))
            self.slots.append(block.slot)
        self.blocks.append(block.number)


PIECE: Final = 128  # blocks, which take 2 ms, after which others may run
FORGOTTEN: Final = 2048  # parts of a listing that are freed in the same time


@dataclass(frozen=True, slots=True)
class _Listing:
    """What is found on the way to `Collected`."""

    kept: dict[bytes, _Block] = field(default_factory=dict)
    followers: Counter[bytes] = field(default_factory=Counter)
    runs: list[_Run] = field(default_factory=list)
    ends: dict[bytes, int] = field(default_factory=dict)  # runs by the digests of their last blocks

    def forget(self) -> Iterator[None]:
        """Free everything, and yield after every part of it: 100,000 blocks take 20 ms."""
        for parts in (self.kept, self.followers, self.ends):
            while parts:
                for _ in range(min(FORGOTTEN, len(parts))):
                    parts.popitem()
                yield
        while self.runs:
            del self.runs[-FORGOTTEN:]
            yield


def collect(
    cache: PrefixCache,
    states: StateMemory | None,
    tier: HostTier | None,
    budget: Budget,
    has_changed: Callable[[], bool] = lambda: False,
) -> Iterator[Collected | None]:
    """Yield None after every `PIECE` blocks or so, and at last what is kept of a cache and copies.

    Changes nothing but the budget. Nothing is found where anything `has_changed` when it goes on.
    """
    listing = _Listing()
    found = None
    for found in _collect(cache, states, tier, budget, listing):
        if found is None:
            yield None
            if has_changed():
                break
    for _ in listing.forget():
        yield None
    if found is not None and not has_changed():
        yield found


def _collect(
    cache: PrefixCache,
    states: StateMemory | None,
    tier: HostTier | None,
    budget: Budget,
    listing: _Listing,
) -> Iterator[Collected | None]:
    """Yield what `collect` does, and leave in `listing` what it took."""
    kept, followers = listing.kept, listing.followers
    done = 0

    def keep(digest: bytes, origin: Origin, run: object, number: int) -> bool:
        """Keep a block if that can be used, and paid; returns whether it is kept."""
        if digest in kept:
            return True
        if origin.namespace[0] or _has_image(origin.tokens):
            return False
        if origin.before not in kept and origin.before != begin_digests(origin.namespace):
            return False
        if not budget.take_blocks(1):
            return False
        slot = None if states is None else states.find_kept(max(0, number), digest)
        paid = slot is not None and budget.take_slot()
        kept[digest] = _Block(origin, run, number, slot if paid and slot is not None else 0)
        followers[origin.before] += 1
        return True

    for node in cache.recent():
        useful, last = True, 0
        while useful and last < len(node.blocks):
            first, last = last, min(last + PIECE, len(node.blocks))
            digests = cache.digests_of(node, last)[first:last]
            origins, blocks = cache.origins_of(node, first, last), node.blocks[first:last]
            for digest, origin, block in zip(digests, origins, blocks, strict=True):
                if not (useful := keep(digest, origin, node, block)):
                    break
            if (done := done + last - first) >= PIECE:
                done = 0
                yield None
    for digest, origin, place in tier.recent() if tier is not None else ():
        keep(digest, origin, tier, -place)
        if (done := done + 1) >= PIECE:
            done = 0
            yield None
    yield from _join(cache.block_size, listing)


def _join(block_size: int, listing: _Listing) -> Iterator[Collected | None]:
    """Yield blocks as runs, which end where several others follow; likewise piece by piece."""
    kept, followers, runs, ends = listing.kept, listing.followers, listing.runs, listing.ends
    for done, (digest, block) in enumerate(kept.items(), 1):
        before = block.origin.before
        place = ends.get(before, -1)
        if place < 0 or followers[before] > 1 or kept[before].run is not block.run:
            runs.append(_Run(block.origin.namespace[1], place))
            place = len(runs) - 1
        runs[place].add(block)
        ends[digest] = place
        if not done % PIECE:
            yield None
    made: list[KeptRun] = []
    blocks: list[int] = []
    slots: list[int] = []
    for done, run in enumerate(runs, 1):
        made.append(KeptRun(run.salt, run.parent, bytes(run.tokens), tuple(run.snapshots)))
        blocks += run.blocks
        slots += run.slots
        if not done % PIECE:
            yield None
    yield Collected(KeptPrefixes(block_size, tuple(made)), blocks, slots)


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


def restore_copies(
    kept: KeptPrefixes, on_device: int, tier: HostTier, of_states: HostTier | None
) -> None:
    """Take the runs behind the first `on_device`, which a new shard has in the host's memory.

    `of_states`: likewise, for the snapshots behind their blocks.
    """
    size = kept.block_size * TOKEN_BYTES
    digests: list[list[bytes]] = []
    copies: list[bytes] = []
    origins: list[Origin] = []
    snapshots: list[bytes] = []
    for place, run in enumerate(kept.runs):
        namespace = (0, run.salt)
        before = begin_digests(namespace) if run.parent < 0 else digests[run.parent][-1]
        own: list[bytes] = []
        extend_digests(own, before, run.tokens, size)
        digests.append(own)
        if place >= on_device:
            copies += own
            origins += [
                Origin(namespace, each, run.tokens[at * size : (at + 1) * size])
                for at, each in enumerate([before, *own[:-1]])
            ]
            snapshots += [own[at] for at in run.snapshots]
    tier.restore(copies, origins)
    if of_states is not None:
        of_states.restore(snapshots)


def _has_image(tokens: bytes) -> bool:
    """Return whether any of these is of an image, whose numbers are negative."""
    return max(tokens[TOKEN_BYTES - 1 :: TOKEN_BYTES], default=0) >= 0x80  # by their sign bits
