"""Guesses from the text so far: what followed the last few tokens when they were met before.

"Prompt lookup" (Saxena 2023): free to make, and often right in code, quotations, lists and
summaries. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from tgi_trio.shard.contract import DraftRow, ShardSequence
from tgi_trio.shard.speculation.record import judge_record, write_guesses
from tgi_trio.shard.speculation.sharing import share_drafts

_STATE = "ngrams"  # key in Sequence.state
_SIZES = (4, 3, 2)  # of the n-grams looked up, the most telling first


class NgramDrafter:
    """Guesses by the latest earlier occurrence of a sequence's last tokens."""

    def __init__(self, most: int, eos_ids: Iterable[int]) -> None:
        """Guess `most` tokens a step and sequence at most; never an EOS or beyond."""
        self._most = most
        self._eos_ids = frozenset(eos_ids)

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        return share_drafts(rows, spare, trust=self.trust, draft=self.draft)

    def trust(self, sequence: ShardSequence) -> int:
        """Return the guesses that a sequence's last ones have earned it, 0 while it rests."""
        return judge_record(sequence, self._most).allowed

    def draft(self, sequence: ShardSequence, room: int) -> int:
        """Write guesses into `token_ids` behind the known tokens; return how many, at most `room`.

        Where the earlier occurrence reaches into the guesses, they repeat themselves. A sequence
        whose last guesses were wrong gets fewer, and then none for ever longer: each takes a
        place in the step.
        """
        record = judge_record(sequence, self._most)
        if not record.allowed:
            record.rest -= 1
            return 0
        source = _occurrences(sequence).before(sequence)
        if source is None:
            return 0
        ids, most = sequence.token_ids, min(record.allowed, room)
        # One by one: where the occurrence reaches into the guesses, each is read from those before.
        coming = (int(ids[source + i]) for i in range(most))
        return write_guesses(sequence, record, coming, most, self._eos_ids)


def _occurrences(sequence: ShardSequence) -> _Occurrences:
    found = sequence.state.get(_STATE)
    if not isinstance(found, _Occurrences):
        found = sequence.state[_STATE] = _Occurrences()
    return found


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
