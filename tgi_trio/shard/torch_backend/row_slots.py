"""Assigns sequences the slots of a table on a device. No torch in this file."""

from __future__ import annotations

from collections.abc import Iterable

from tgi_trio.shard.contract import ShardSequence


class RowSlots:
    """Which sequence has which slot, by the objects' identity; sequences with slots are kept."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))[::-1]
        self._held: dict[int, tuple[ShardSequence, int]] = {}

    def find(self, row: ShardSequence) -> int | None:
        """Return a sequence's slot, None if it has none."""
        held = self._held.get(id(row))
        return None if held is None else held[1]

    def take(self, row: ShardSequence, beside: Iterable[ShardSequence]) -> int | None:
        """Give a sequence a slot and return it; None if the sequences in `beside` hold all.

        If none is free, sequences that are not in `beside` lose theirs. Work in flight may still
        read such a slot: the stream keeps the order.
        """
        if not self._free:
            kept = {id(other) for other in beside}
            for other, _ in [held for key, held in self._held.items() if key not in kept]:
                self.release(other)
        if not self._free:
            return None
        slot = self._free.pop()
        self._held[id(row)] = (row, slot)
        return slot

    def release(self, row: ShardSequence) -> int | None:
        """Free and return the slot of a sequence; None if it has none."""
        held = self._held.pop(id(row), None)
        if held is None:
            return None
        self._free.append(held[1])
        return held[1]
