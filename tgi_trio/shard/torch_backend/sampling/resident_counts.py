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

# By choice, of `count_tokens`: what becomes of a slot.
NONE, ADD, BEGIN = -1, 0, 1


@dataclass(slots=True)
class _Held:
    """A sequence's slot."""

    row: ShardSequence
    slot: int
    counted: int  # tokens of the sequence, the one included that is being chosen


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
        self.slots = slots
        self._free = list(range(slots))[::-1]
        self._held: dict[int, _Held] = {}  # by the identity of sequences, which it keeps

    def advance(
        self, row: ShardSequence, length: int, unknown: bool, beside: list[ShardSequence]
    ) -> News:
        """Return what a row's counts lack before its token at place `length` is chosen.

        `unknown`: the token before is the device's to count. `beside`: rows that keep their slots.
        What has been counted up to there or beyond is counted anew: a step that is repeated may
        have failed at any point, or have been launched upon tokens that are void. Raises
        RuntimeError when more rows have penalties than there are slots.
        """
        held = self._held.get(id(row))
        if held is None:
            held = self._held[id(row)] = _Held(row, self._take(beside), length)
        begins = held.counted >= length
        first = 0 if begins else held.counted
        held.counted = length
        known = length - int(unknown)
        if known <= first and not begins:
            return News(held.slot, ADD, _NO_IDS, _NO_IDS)
        ids, more = _count(row, first, known)
        return News(held.slot, BEGIN if begins else ADD, ids, more)

    def release(self, row: ShardSequence) -> None:
        """Take back the slot of a row, if it has one; what has been launched may still read it."""
        held = self._held.pop(id(row), None)
        if held is not None:
            self._free.append(held.slot)

    def _take(self, beside: list[ShardSequence]) -> int:
        if not self._free:
            kept = {id(row) for row in beside}
            for key in [key for key in self._held if key not in kept]:
                self.release(self._held[key].row)
        if not self._free:
            raise RuntimeError(f"more than {self.slots} rows of a step have penalties")
        return self._free.pop()


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
