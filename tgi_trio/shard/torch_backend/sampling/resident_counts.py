"""The slots in which the device counts sequences' tokens, and what it lacks. No tensor here.

A sequence with penalties has a slot in the table that `kernels/sampling/counting.py` updates. The
host sends the tokens that are not counted yet: all of them at first, later those that the device
has not chosen itself, and during a steady decode none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.torch_backend.row_slots import RowSlots

# What `count_tokens` does to a slot, by choice.
NONE, ADD, BEGIN = -1, 0, 1


@dataclass(frozen=True, slots=True)
class News:
    """An update of a slot."""

    slot: int
    move: int
    ids: NDArray[np.int32]  # [N], distinct
    more: NDArray[np.int32]  # [N]: what is added to their counts; see `count_tokens`


class ResidentCounts:
    """The slots of one device's table of counts."""

    def __init__(self, slots: int) -> None:
        self._slots = RowSlots(slots)
        # By slot: counted tokens of its sequence, including the one that is being chosen.
        self._counted = np.zeros(slots, np.int64)
        self._followed: list[ShardSequence] | None = None  # the rows of the last `follow`
        self._own = np.empty(0, np.int64)  # their slots

    def advance(
        self, row: ShardSequence, length: int, unknown: bool, beside: list[ShardSequence]
    ) -> News:
        """Return the update of a row's counts before its token at index `length` is chosen.

        `unknown`: the device counts the token before by itself. `beside`: rows that keep their
        slots. If tokens up to there or beyond have been counted, all are counted anew: a repeated
        step may have failed at any point, or have followed tokens that are void. Raises
        RuntimeError if more rows have penalties than there are slots.
        """
        slot = self._slots.find(row)
        if slot is None:
            slot = self._take(row, beside)
            self._counted[slot] = length
        counted = int(self._counted[slot])
        begins = counted >= length
        first = 0 if begins else counted
        self._counted[slot] = length
        # A step is repeated with all its rows: one that has left lacks tokens that it assumed.
        known = min(length - int(unknown), row.length)
        if known <= first and not begins:
            return News(slot, ADD, _NO_IDS, _NO_IDS)
        ids, more = _count(row, first, known)
        return News(slot, BEGIN if begins else ADD, ids, more)

    def follow(
        self, rows: list[ShardSequence], lengths: NDArray[np.int64] | NDArray[np.int32]
    ) -> NDArray[np.int64] | None:
        """Advance rows whose last tokens the device counts itself; return their slots.

        None, with nothing changed, if any of them lacks other tokens. `rows`: the list object stays
        the same while its rows do.
        """
        if rows is not self._followed:
            found = [slot for row in rows if (slot := self._slots.find(row)) is not None]
            if len(found) < len(rows):
                return None
            self._followed, self._own = rows, np.array(found, np.int64)
        if np.count_nonzero(self._counted[self._own] + 1 != lengths):
            return None
        self._counted[self._own] = lengths
        return self._own

    def release(self, row: ShardSequence) -> None:
        """Free a row's slot, if it has one; steps in flight may still read it."""
        self._followed = None
        self._slots.release(row)

    def _take(self, row: ShardSequence, beside: list[ShardSequence]) -> int:
        self._followed = None  # other rows may lose their slots
        slot = self._slots.take(row, beside)
        if slot is None:
            raise RuntimeError(f"more than {self._slots.slots} rows of a step have penalties")
        return slot


_NO_IDS = np.empty(0, np.int32)


def _count(row: ShardSequence, first: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the distinct ids of `token_ids[first:end]` and what they add: int32 [N] each.

    Each occurrence that counts adds two. With OpenAI's formula occurrences in the prompt do not
    count; the prompt's tokens add one.
    """
    ids, places = np.unique(row.token_ids[first:end], return_inverse=True)
    start = max(0, row.prompt_length - first) if row.sampling.absolute_penalties else 0
    more = 2 * np.bincount(places[start:], minlength=len(ids))
    if start:
        more += np.bincount(places[:start], minlength=len(ids)) > 0
    return ids.astype(np.int32), more.astype(np.int32)
