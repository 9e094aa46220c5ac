"""Where on the device sequences' tokens are counted, and what the counts lack. No tensor here.

A sequence with penalties gets a slot of the table that `kernels/counting.py` moves. The host says
what is new to it: everything when it comes, what nobody counted yet afterwards; in a steady decode
nothing, since the last token is the one that the device chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.torch_backend.row_slots import RowSlots

# By choice, of `count_tokens`: what becomes of a slot.
NONE, ADD, BEGIN = -1, 0, 1


@dataclass(frozen=True, slots=True)
class News:
    """What a slot is to be told."""

    slot: int
    move: int
    ids: NDArray[np.int32]  # [N] distinct
    more: NDArray[np.int32]  # [N] what is added to their counts; see `count_tokens`


class ResidentCounts:
    """The slots of one device's table."""

    def __init__(self, slots: int) -> None:
        self._slots = RowSlots(slots)
        # By slot: tokens of its sequence, the one included that is being chosen.
        self._counted = np.zeros(slots, np.int64)
        self._followed: list[ShardSequence] | None = None  # whose slots have been found
        self._own = np.empty(0, np.int64)  # these

    def advance(
        self, row: ShardSequence, length: int, unknown: bool, beside: list[ShardSequence]
    ) -> News:
        """Return what a row's counts lack before its token at place `length` is chosen.

        `unknown`: the token before is the device's to count. `beside`: rows that keep their slots.
        What has been counted up to there or beyond is counted anew: a step that is repeated may
        have failed at any point, or have been launched upon tokens that are void. Raises
        RuntimeError when more rows have penalties than there are slots.
        """
        slot = self._slots.find(row)
        if slot is None:
            slot = self._take(row, beside)
            self._counted[slot] = length
        counted = int(self._counted[slot])
        begins = counted >= length
        first = 0 if begins else counted
        self._counted[slot] = length
        known = length - int(unknown)
        if known <= first and not begins:
            return News(slot, ADD, _NO_IDS, _NO_IDS)
        ids, more = _count(row, first, known)
        return News(slot, BEGIN if begins else ADD, ids, more)

    def follow(
        self, rows: list[ShardSequence], lengths: NDArray[np.int64] | NDArray[np.int32]
    ) -> NDArray[np.int64] | None:
        """Do what `advance` does for rows whose last tokens are the device's to count: their slots.

        None, and nothing is done, where any of them lacks more. `rows`: a list that stays the same.
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
        """Take back the slot of a row, if it has one; what has been launched may still read it."""
        self._followed = None
        self._slots.release(row)

    def _take(self, row: ShardSequence, beside: list[ShardSequence]) -> int:
        self._followed = None  # others may lose theirs
        slot = self._slots.take(row, beside)
        if slot is None:
            raise RuntimeError(f"more than {self._slots.slots} rows of a step have penalties")
        return slot


_NO_IDS = np.empty(0, np.int32)


def _count(row: ShardSequence, first: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the distinct ids of `token_ids[first:end]` and what they add: int32 [N] each.

    Two for an occurrence that counts. With OpenAI's formula those in the prompt do not; that a
    token stands there is told by one more.
    """
    ids, places = np.unique(row.token_ids[first:end], return_inverse=True)
    start = max(0, row.prompt_length - first) if row.sampling.absolute_penalties else 0
    more = 2 * np.bincount(places[start:], minlength=len(ids))
    if start:
        more += np.bincount(places[:start], minlength=len(ids)) > 0
    return ids.astype(np.int32), more.astype(np.int32)
