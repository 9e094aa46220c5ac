"""Guesses from the text so far: what followed the last few tokens when they were met before.

"Prompt lookup" (Saxena 2023): free to make, and often right in code, quotations, lists and
summaries. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, takewhile
from operator import eq

from tgi_trio.shard.contract import ShardSequence

_STATE = "ngrams"  # key in Sequence.state
_SIZES = (4, 3, 2)  # of the n-grams looked up, the most telling first
_LONGEST_REST = 30  # steps without guesses after a row of wrong ones


class NgramDrafter:
    """Guesses by the latest earlier occurrence of a sequence's last tokens."""

    def __init__(self, most: int, eos_ids: Iterable[int]) -> None:
        """Guess `most` tokens a step and sequence at most; never an EOS or beyond."""
        self._most = most
        self._eos_ids = frozenset(eos_ids)

    def trust(self, sequence: ShardSequence) -> int:
        """Return the guesses that a sequence's last ones have earned it, 0 while it rests."""
        return self._judge_record(sequence).allowed

    def draft(self, sequence: ShardSequence, room: int) -> int:
        """Write guesses into `token_ids` behind the known tokens; return how many, at most `room`.

        Where the earlier occurrence reaches into the guesses, they repeat themselves. A sequence
        whose last guesses were wrong gets fewer, and then none for ever longer: each takes a
        place in the step.
        """
        record = self._judge_record(sequence)
        if not record.allowed:
            record.rest -= 1
            return 0
        source = record.occurrences.before(sequence)
        if source is None:
            return 0
        ids, length = sequence.token_ids, sequence.length
        count = 0
        for i in range(min(record.allowed, room, len(ids) - length)):
            token = int(ids[source + i])
            if not sequence.sampling.ignore_eos and token in self._eos_ids:
                break
            ids[length + i] = token
            count = i + 1
        record.place, record.guesses = length, ids[length : length + count].tolist()
        return count

    def _judge_record(self, sequence: ShardSequence) -> _Record:
        record = sequence.state.get(_STATE)
        if not isinstance(record, _Record):
            record = sequence.state[_STATE] = _Record(self._most)
        if record.guesses:
            known = sequence.token_ids[record.place : sequence.length].tolist()
            record.judge(known, self._most)
        return record


class _Record:
    """What the drafter remembers of one sequence."""

    def __init__(self, most: int) -> None:
        self.occurrences = _Occurrences()
        self.guesses: list[int] = []  # the last ones, until they are judged
        self.place = 0  # where the first of them stood
        self.rest = 0  # times it still gets none
        self._most = most  # guesses it may have when it does not rest
        self._failures = 0  # times in a row that no guess was right

    @property
    def allowed(self) -> int:
        """Guesses it may have now."""
        return 0 if self.rest else self._most

    def judge(self, known: list[int], limit: int) -> None:
        """Compare the last guesses with the tokens that came in their place.

        Twice as many, up to `limit`, after all were right, else those + 1. After the second
        failure in a row it rests, and twice as long after each further one.
        """
        count = len(self.guesses)
        same = map(eq, self.guesses, known)
        right = sum(takewhile(bool, same))
        self._most = min(limit, 2 * count if right == count else right + 1)
        self._failures = 0 if right else self._failures + 1
        self.rest = min(_LONGEST_REST, 2**self._failures - 2) if self._failures else 0
        self.guesses = []


class _Occurrences:
    """Where each n-gram of one sequence was last met: n-gram -> the position that follows it."""

    def __init__(self) -> None:
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in _SIZES}
        self._seen = 0  # n-grams within the first `_seen` tokens are in

    def before(self, sequence: ShardSequence) -> int | None:
        """Return the position after the latest earlier occurrence of the longest known suffix."""
        # All but the last token: the n-grams it ends are those that are looked up.
        end = sequence.length - 1
        start = max(0, self._seen - max(_SIZES) + 1)
        tokens = sequence.token_ids[start : end + 1].tolist()
        for n, after in self._after.items():
            if end == self._seen + 1 and end >= n:  # a single new one, as in most steps
                after[tuple(tokens[-n - 1 : -1])] = end
                continue
            first = max(start, self._seen - n + 1)  # where the first new n-gram begins
            fresh = tokens[first - start : -1]
            grams = zip(*(islice(fresh, i, None) for i in range(n)), strict=False)
            after.update(zip(grams, range(first + n, end + 1), strict=False))
        self._seen = end
        for n, after in self._after.items():
            found = after.get(tuple(tokens[-n:]))
            if found is not None:
                return found
        return None
