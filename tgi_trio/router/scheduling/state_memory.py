"""Slots of states: two for every sequence on the shard, and snapshots that prefixes start from.

A model whose layers keep a state per sequence (short convolutions, delta rules, scans) cannot go on
behind a cached prefix with its K and V alone: it needs the states as they were there. A snapshot is
a slot that holds them, behind a block of the prefix cache, and goes with that block. It is taken
where a prompt has its last full block, and where it leaves what the cache holds already: that is
what others will have in common with it.

Every slot has exactly one owner: the free list, one sequence, or one snapshot. Who computes a
prompt pins the snapshot it starts from and those it takes, for as long as a step may read them.
What nobody pins may be evicted, least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tgi_trio.ipc.messages import StateGrant
from tgi_trio.router.scheduling.blocks import BlockAllocator

SLOTS_EACH: Final = 2  # of a sequence: a step reads one and writes the other
LEAST_SAVED: Final = 4  # blocks that a snapshot must spare whoever starts from it


class StateSlots(NamedTuple):
    """How many slots there are; what is neither free nor a snapshot is a sequence's."""

    total: int
    free: int
    snapshots: int


@dataclass(slots=True, eq=False)
class Snapshot:
    """States behind a cached block. `pins` counts the sequences that may still read it."""

    block: int
    slot: int
    pins: int = 0


@dataclass(slots=True)
class Save:
    """A snapshot to come: it is written by the step that ends at `position`."""

    position: int
    slot: int
    block: int | None  # of the cache already; None: it is computed by the sequence itself


@dataclass(slots=True)
class StateHold:
    """What one sequence has."""

    slots: tuple[int, int]
    source: Snapshot | None
    saves: list[Save]
    taken: list[Snapshot] = field(default_factory=list)  # of its own, pinned while it prefills
    prefilling: bool = True

    def grant(self, held_length: int) -> StateGrant:
        """Return what the shard is told; `held_length`: tokens whose K and V it does not write."""
        return StateGrant(
            slots=self.slots,
            source=self.source.slot if self.source else 0,
            held_length=held_length,
            saves=tuple((save.position, save.slot) for save in self.saves),
        )


class StateMemory:
    """Grants slots, keeps snapshots by the block that they stand behind."""

    def __init__(self, slots: int, block_size: int) -> None:
        """`slots` can be handed out; raises ValueError when no sequence could ever have its own."""
        if slots < SLOTS_EACH:
            raise ValueError(f"a sequence needs {SLOTS_EACH} slots for states; there are {slots}")
        self._block_size = block_size
        self._allocator = BlockAllocator(slots)
        self._by_block: dict[int, Snapshot] = {}
        self._idle: OrderedDict[Snapshot, None] = OrderedDict()  # least recently used first
        self._coming: Counter[int] = Counter()  # cached blocks that a snapshot is being made for

    @property
    def total(self) -> int:
        return self._allocator.total

    @property
    def free(self) -> int:
        return self._allocator.free

    @property
    def snapshots(self) -> int:
        return len(self._by_block)

    @property
    def available(self) -> int:
        """Slots that can be granted now."""
        return self._allocator.free + len(self._idle)

    @property
    def has_room(self) -> bool:
        """Whether one more sequence can be admitted."""
        return self.available >= SLOTS_EACH

    # -- prefixes ------------------------------------------------------------------------------

    def usable(self, blocks: ListLike[int]) -> int:
        """Return how many leading blocks of a cached prefix a sequence can start behind now.

        Those up to the last that has a snapshot; none where its own slots would be lacking then.
        """
        for count in range(len(blocks), 0, -1):
            snapshot = self._by_block.get(blocks[count - 1])
            if snapshot is not None:
                spare = self.available - (0 if snapshot.pins else 1)
                return count if spare >= SLOTS_EACH else 0
        return 0

    def is_coming(self, blocks: ListLike[int]) -> bool:
        """Whether somebody makes the snapshot behind these cached blocks right now."""
        return bool(blocks) and blocks[-1] in self._coming

    # -- granting ------------------------------------------------------------------------------

    def admit(self, cached: ListLike[int], length: int, saving: bool) -> tuple[StateHold, int]:
        """Return the slots of a sequence, and behind how many of its `cached` blocks it starts.

        `length`: its tokens; `saving`: whether snapshots of it are worth anything. Raises
        ValueError unless there is room.
        """
        start = self.usable(cached)
        source = self._by_block[cached[start - 1]] if start else None
        if source is not None:
            self._pin(source)
        first, second = self._take(SLOTS_EACH)
        hold = StateHold((first, second), source, [])
        if not saving:
            return hold, start
        at = start
        last = (length - 1) // self._block_size
        for end in sorted({len(cached), last}):
            if end - at >= LEAST_SAVED and self.available:
                (slot,) = self._take(1)
                block = cached[end - 1] if end <= len(cached) else None
                hold.saves.append(Save(end * self._block_size, slot, block))
                if block is not None:
                    self._coming[block] += 1
                at = end
        return hold, start

    def publish(self, hold: StateHold, computed: int, blocks: ListLike[int]) -> None:
        """Let others start from the snapshots that are taken.

        `computed`: tokens; `blocks`: those of the sequence that are in the cache.
        """
        for save in [save for save in hold.saves if save.position <= computed]:
            end = save.position // self._block_size
            if end > len(blocks):
                continue  # somebody published the same first, and has the snapshot of it
            block = blocks[end - 1]
            if block in self._by_block:
                continue
            hold.saves.remove(save)
            self._no_longer_coming(save)
            snapshot = self._by_block[block] = Snapshot(block, save.slot, pins=1)
            hold.taken.append(snapshot)

    def settle(self, hold: StateHold) -> None:
        """The prompt is computed: no step reads snapshots for this sequence any more."""
        if not hold.prefilling:
            return
        hold.prefilling = False
        for snapshot in (hold.source, *hold.taken):
            if snapshot is not None:
                self._unpin(snapshot)
        hold.source = None
        for save in hold.saves:
            self._no_longer_coming(save)
        self._allocator.give([save.slot for save in hold.saves])
        hold.saves.clear()

    def release(self, hold: StateHold, sound: bool) -> None:
        """Take everything back; unless `sound`, what nobody else uses of its snapshots goes."""
        self.settle(hold)
        if not sound:
            for snapshot in hold.taken:
                if snapshot in self._idle:
                    self._evict(snapshot)
        self._allocator.give(list(hold.slots))

    def forget_blocks(self, blocks: Iterable[int]) -> None:
        """Blocks have left the cache: so do their snapshots, which nobody pins."""
        for block in blocks:
            if (snapshot := self._by_block.get(block)) is not None:
                self._evict(snapshot)

    def clear(self) -> None:
        """Forget everything: the shard that held it is gone."""
        self._allocator.clear()
        self._by_block.clear()
        self._idle.clear()
        self._coming.clear()

    def _take(self, count: int) -> list[int]:
        while self._allocator.free < count and self._idle:
            self._evict(next(iter(self._idle)))
        return self._allocator.take(count)

    def _evict(self, snapshot: Snapshot) -> None:
        del self._idle[snapshot]
        del self._by_block[snapshot.block]
        self._allocator.give([snapshot.slot])

    def _pin(self, snapshot: Snapshot) -> None:
        self._idle.pop(snapshot, None)
        snapshot.pins += 1

    def _unpin(self, snapshot: Snapshot) -> None:
        snapshot.pins -= 1
        if not snapshot.pins:
            self._idle[snapshot] = None

    def _no_longer_coming(self, save: Save) -> None:
        if save.block is not None:
            self._coming[save.block] -= 1
            self._coming += Counter()  # drops what is zero

    # -- invariants ----------------------------------------------------------------------------

    def check(self, holds: Iterable[StateHold], cached: Iterable[int]) -> None:
        """Raise AssertionError unless every slot has one owner and every pin a sequence.

        `cached`: all blocks of the prefix cache.
        """
        owned = [snapshot.slot for snapshot in self._by_block.values()]
        pins: Counter[Snapshot] = Counter()
        coming: Counter[int] = Counter()
        for hold in holds:
            owned += [*hold.slots, *(save.slot for save in hold.saves)]
            coming.update(save.block for save in hold.saves if save.block is not None)
            if hold.prefilling:
                pins.update(hold.taken)
                pins.update([hold.source] if hold.source else [])
            elif hold.saves or hold.source:
                raise AssertionError("a sequence that generates holds on to snapshots")
        if len(set(owned)) != len(owned):
            raise AssertionError("a slot has two owners")
        self._allocator.check(set(owned))
        if not self._by_block.keys() <= set(cached):
            raise AssertionError("a snapshot stands behind a block that is not cached")
        if not pins.keys() <= set(self._by_block.values()):
            raise AssertionError("a snapshot in use is gone")
        for snapshot in self._by_block.values():
            if snapshot.pins != pins[snapshot] or (snapshot in self._idle) != (not snapshot.pins):
                raise AssertionError(f"{snapshot} should have {pins[snapshot]} pins")
        if not self._idle.keys() <= set(self._by_block.values()) or coming != self._coming:
            raise AssertionError("snapshots to evict, or to come, are not those there are")
