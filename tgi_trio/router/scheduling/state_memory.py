"""Slots for recurrent states: two for every sequence on the shard, and snapshots for prefix reuse.

Layers with a state per sequence (short convolutions, delta rules, scans) cannot resume behind a
cached prefix from K and V alone: they need the states at that position. A snapshot is a slot with
these states; it belongs to the block of the prefix cache at whose end they were taken, and is
evicted with it. A prompt takes snapshots at the end of its last full block and where it diverges
from what is cached, since other prompts are likely to share it up to there.

A snapshot that is evicted may be copied to the host's memory (`host_tier.py`), and copied back to
another slot when a prompt has the same tokens up to there.

Every slot has exactly one owner: the free list, one sequence, or one snapshot. A sequence in
prefill pins the snapshot from which it starts and those that it takes, as long as a step may read
them. Unpinned snapshots may be evicted, least recently used first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tgi_trio.ipc.messages import StateGrant
from tgi_trio.router.scheduling.blocks import BlockAllocator
from tgi_trio.router.scheduling.host_tier import HostTier

SLOTS_EACH: Final = 2  # per sequence: a step reads one and writes the other
LEAST_SAVED: Final = 4  # blocks of computation that a snapshot must save


class StateSlots(NamedTuple):
    """Counts of slots; those that are neither free nor snapshots belong to sequences."""

    total: int
    free: int
    snapshots: int


@dataclass(slots=True, eq=False)
class Snapshot:
    """States at the end of a cached block. `pins` counts the sequences that may still read it."""

    block: int
    slot: int
    digest: bytes  # of the block
    pins: int = 0


@dataclass(slots=True)
class Save:
    """A planned snapshot, written by the step that ends at `position`."""

    position: int
    slot: int
    block: int | None  # already in the cache; None: computed by the sequence itself


@dataclass(slots=True)
class StateHold:
    """One sequence's slots and snapshots."""

    slots: tuple[int, int]
    source: Snapshot | None
    saves: list[Save]
    taken: list[Snapshot] = field(default_factory=list)  # its own, pinned during its prefill
    prefilling: bool = True

    def grant(self, held_length: int) -> StateGrant:
        """Return the shard's form; `held_length`: leading tokens whose K and V are not written."""
        return StateGrant(
            slots=self.slots,
            source=self.source.slot if self.source else 0,
            held_length=held_length,
            saves=tuple((save.position, save.slot) for save in self.saves),
        )


class StateMemory:
    """Grants slots, and keeps snapshots by their cached blocks."""

    def __init__(self, slots: int, block_size: int, host_slots: int = 0) -> None:
        """`slots`: how many can be granted; `host_slots`: copies that the host's memory holds.

        Raises ValueError if there are too few for one sequence.
        """
        if slots < SLOTS_EACH:
            raise ValueError(f"a sequence needs {SLOTS_EACH} slots for states; there are {slots}")
        self._block_size = block_size
        self._allocator = BlockAllocator(slots)
        self._by_block: dict[int, Snapshot] = {}
        self._idle: OrderedDict[Snapshot, None] = OrderedDict()  # least recently used first
        self.tier = HostTier(host_slots, states=True) if host_slots else None
        self._coming: Counter[int] = Counter()  # cached blocks whose snapshot is being computed

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

    def usable(self, blocks: ListLike[int], digests: ListLike[bytes] = ()) -> int:
        """Return behind how many leading blocks of a cached prefix a sequence can start now.

        That is up to the last block with a snapshot, on the device or (by `digests`, which may go
        on behind `blocks`) in the host's memory; 0 if pinning it would leave too few slots for the
        sequence.
        """
        tier = self.tier
        for count in range(max(len(blocks), len(digests)), 0, -1):
            snapshot = self._by_block.get(blocks[count - 1]) if count <= len(blocks) else None
            if snapshot is not None:
                spare = self.available - (0 if snapshot.pins else 1)
                return count if spare >= SLOTS_EACH else 0
            if tier is not None and count <= len(digests) and digests[count - 1] in tier:
                return count if self.available > SLOTS_EACH else 0
        return 0

    def is_coming(self, blocks: ListLike[int]) -> bool:
        """Whether a sequence is computing the snapshot at the end of these cached blocks."""
        return bool(blocks) and blocks[-1] in self._coming

    # -- granting ------------------------------------------------------------------------------

    def admit(
        self, cached: ListLike[int], length: int, saving: bool, digests: ListLike[bytes] = ()
    ) -> tuple[StateHold, int]:
        """Grant a sequence its slots; returns also behind how many `cached` blocks it starts.

        `length`: its tokens; `saving`: whether to take snapshots of it; `digests`: of `cached`, if
        the host's memory has copies. Raises ValueError unless `has_room`.
        """
        start = self.usable(cached, digests)
        source = None
        if start:
            source = self._by_block.get(cached[start - 1])
            source = source or self._copy_back(cached[start - 1], digests[start - 1])
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

    def _copy_back(self, block: int, digest: bytes) -> Snapshot:
        """Return a snapshot at the end of a cached block, of which the host's memory has a copy."""
        if self.tier is None:
            raise ValueError("there is no copy of a snapshot")
        places = self.tier.reserve([digest])  # before another is evicted, which may want its place
        (slot,) = self._take(1)
        self.tier.copy_back([digest], places, [slot])
        snapshot = self._by_block[block] = Snapshot(block, slot, digest)
        return snapshot

    def publish(
        self, hold: StateHold, computed: int, blocks: ListLike[int], digests: ListLike[bytes]
    ) -> None:
        """Let other sequences start from the snapshots that have been taken.

        `computed`: tokens computed; `blocks`: the sequence's blocks that are in the cache;
        `digests`: of the sequence's blocks, if the host's memory is to have copies.
        """
        for save in [save for save in hold.saves if save.position <= computed]:
            end = save.position // self._block_size
            if end > len(blocks):
                continue  # another sequence has published the same first, with its snapshot
            block = blocks[end - 1]
            if block in self._by_block:
                continue
            hold.saves.remove(save)
            self._no_longer_coming(save)
            digest = digests[end - 1] if digests else b""
            snapshot = self._by_block[block] = Snapshot(block, save.slot, digest, pins=1)
            hold.taken.append(snapshot)

    def settle(self, hold: StateHold) -> None:
        """Unpin snapshots: the prompt is computed, so no step reads them for this sequence."""
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
        """Take back a sequence's slots; unless `sound`, evict its snapshots that are unpinned."""
        self.settle(hold)
        if not sound:
            for snapshot in hold.taken:
                if snapshot in self._idle:
                    self._evict(snapshot, sound=False)
        self._allocator.give(list(hold.slots))

    def forget_blocks(self, blocks: Iterable[int], *, sound: bool) -> None:
        """Evict the snapshots of evicted blocks, which are unpinned; copied out if `sound`."""
        for block in blocks:
            if (snapshot := self._by_block.get(block)) is not None:
                self._evict(snapshot, sound=sound)

    def copy_out_idle(self, blocks: Iterable[int]) -> None:
        """Have the snapshots of blocks copied out that nobody uses and that may be evicted soon."""
        if self.tier is None:
            return
        for block in blocks:
            snapshot = self._by_block.get(block)
            if snapshot is not None and snapshot in self._idle:
                self.tier.copy_out([snapshot.digest], [snapshot.slot])

    def find_kept(self, block: int, digest: bytes) -> int | None:
        """Return the slot of the snapshot at the end of a cached block, if nobody uses it.

        Or minus its place in the host's memory, by the block's digest; None: there is none.
        """
        snapshot = self._by_block.get(block)
        if snapshot is not None and snapshot in self._idle:
            return snapshot.slot
        place = None if self.tier is None else self.tier.place_of(digest)
        return None if place is None else -place

    def restore(self, blocks: Mapping[int, bytes]) -> list[int]:
        """Grant a slot to a snapshot behind each of `blocks`, least recently used; returns them.

        `blocks`: with their digests.
        """
        slots = self._allocator.take(len(blocks))
        for (block, digest), slot in zip(blocks.items(), slots, strict=True):
            snapshot = self._by_block[block] = Snapshot(block, slot, digest)
            self._idle[snapshot] = None
            self._idle.move_to_end(snapshot, last=False)
        return slots

    def clear(self) -> None:
        """Free all slots; for a shard that has died."""
        self._allocator.clear()
        self._by_block.clear()
        self._idle.clear()
        self._coming.clear()
        if self.tier is not None:
            self.tier.clear()

    def _take(self, count: int) -> list[int]:
        while self._allocator.free < count and self._idle:
            self._evict(next(iter(self._idle)), sound=True)
        return self._allocator.take(count)

    def _evict(self, snapshot: Snapshot, *, sound: bool) -> None:
        if sound and self.tier is not None:
            self.tier.copy_out([snapshot.digest], [snapshot.slot])
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
            self._coming += Counter()  # drops zero counts

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
        if self.tier is not None:
            self.tier.check()
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
