"""A drafter's record of one sequence: how many last drafts were right. No torch in this file."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import takewhile
from operator import eq
from typing import Final

from tgi_trio.shard.contract import ShardSequence

LONGEST_REST: Final = 30  # most steps without drafts after repeated wrong ones
# The same without adaptation: a trial costs as much as all its drafts, which is more than a plain
# step, so one in thirty would cost 3 %.
LONGEST_DEAR_REST: Final = 126
_STATE: Final = "drafts"  # key in ShardSequence.state


class Record:
    """The number of drafts that a sequence may have, given how its last ones did."""

    def __init__(self, most: int, *, adapts: bool = True) -> None:
        """`adapts`: after wrong drafts there are fewer, instead of all or none."""
        self.drafts: list[int] = []  # the last ones, until they are verified
        self.place = 0  # position of the first of them
        self.rest = 0  # steps to come without drafts
        self._most = most  # drafts that it may have unless it rests
        self._adapts = adapts
        self._failures = 0  # consecutive times that no draft was right

    @property
    def allowed(self) -> int:
        """Number of drafts that it may have now."""
        return 0 if self.rest else self._most

    def judge(self, known: list[int], limit: int) -> None:
        """Compare the last drafts with the tokens that were chosen in their place.

        If all were right, twice as many are allowed next, up to `limit`; otherwise the number of
        right ones + 1. After the second failure in a row the sequence rests, and twice as long
        after each further one.
        """
        same = map(eq, self.drafts, known)
        self.note(len(self.drafts), sum(takewhile(bool, same)), limit)

    def note(self, count: int, right: int, limit: int) -> None:
        """Do the same, given how many of the last drafts were right."""
        if self._adapts:
            self._most = min(limit, 2 * count if right == count else right + 1)
        self._failures = 0 if right else self._failures + 1
        longest = LONGEST_REST if self._adapts else LONGEST_DEAR_REST
        self.rest = min(longest, 2**self._failures - 2) if self._failures else 0
        self.drafts = []


def find_record(sequence: ShardSequence, most: int, *, adapts: bool) -> Record:
    """Return a sequence's record without judging; `most` drafts at a time."""
    record = sequence.state.get(_STATE)
    if not isinstance(record, Record):
        record = sequence.state[_STATE] = Record(most, adapts=adapts)
    return record


def judge_record(sequence: ShardSequence, most: int, *, adapts: bool = True) -> Record:
    """Return a sequence's record, with its last drafts judged; `most` drafts at a time."""
    record = find_record(sequence, most, adapts=adapts)
    if record.drafts:
        known = sequence.token_ids[record.place : sequence.length].tolist()
        record.judge(known, most)
    return record


def write_drafts(
    sequence: ShardSequence,
    record: Record,
    drafts: Iterable[int],
    most: int,
    eos_ids: Collection[int],
) -> int:
    """Write up to `most` drafts after a sequence's known tokens; return how many.

    Never an EOS or beyond, unless the sequence ignores it, nor beyond its buffer. `drafts` is
    consumed one by one, since each may depend on those already written.
    """
    ids, length = sequence.token_ids, sequence.length
    count, coming = 0, iter(drafts)
    while count < min(most, len(ids) - length):
        token = next(coming, None)
        if token is None or (token in eos_ids and not sequence.sampling.ignore_eos):
            break
        ids[length + count] = token
        count += 1
    record.place, record.drafts = length, ids[length : length + count].tolist()
    return count


def take_rest(sequences: Iterable[ShardSequence]) -> int:
    """Return the number of steps that all sequences still rest, and subtract it from their rests.

    0 if a sequence does not rest, or has no record yet.
    """
    records = [sequence.state.get(_STATE) for sequence in sequences]
    known = [record for record in records if isinstance(record, Record)]
    if not known or len(known) < len(records):
        return 0
    shortest = min(record.rest for record in known)
    for record in known:
        record.rest -= shortest
    return shortest
