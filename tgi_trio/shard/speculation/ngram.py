"""Drafts by n-gram look-up: the tokens after the latest occurrence of the last few tokens.

"Prompt lookup" (Saxena 2023): it costs nearly nothing, and is often right in code, quotations,
lists and summaries. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import DraftRow
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.speculation.record import Record, find_record, judge_record, write_drafts
from tgi_trio.shard.speculation.sharing import share_drafts, share_room

_STATE = "ngrams"  # key in Sequence.state
_FOUND = "ngrams found"  # the sequence's length when a runner last had drafts for it
_NEAR = 4  # number of tokens after that in which there may be more drafts
_SIZES = (4, 3, 2)  # of the n-grams looked up, the longest first


class NgramDrafter:
    """Drafts by the latest earlier occurrence of a sequence's last tokens."""

    def __init__(self, most: int, eos_ids: Iterable[int]) -> None:
        """Draft at most `most` tokens per step and sequence; never an EOS or beyond."""
        self._most = most
        self._eos_ids = frozenset(eos_ids)

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        return share_drafts(rows, spare, trust=self.trust, draft=self.draft)

    def trust(self, sequence: ShardSequence) -> int:
        """Return the number of drafts that a sequence may have by its record, 0 while it rests."""
        return judge_record(sequence, self._most).allowed

    def draft(self, sequence: ShardSequence, room: int) -> int:
        """Write drafts into `token_ids` after the known tokens; return how many, at most `room`.

        If the earlier occurrence extends into the drafts, they repeat themselves. A sequence whose
        last drafts were wrong gets fewer, then none for longer and longer, since each takes a
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
        # One by one: if the occurrence extends into the drafts, each is read from earlier ones.
        coming = (int(ids[source + i]) for i in range(most))
        return write_drafts(sequence, record, coming, most, self._eos_ids)


class FollowingNgrams(NgramDrafter):
    """The same for a runner that looks n-grams up as well, with this rule, after its choices.

    A step that follows another before that is read has the runner's drafts, other steps those that
    are found here. See `FollowingDrafter`.
    """

    follows = True

    def __init__(self, most: int, eos_ids: Iterable[int], last: LastStep) -> None:
        """`last`: the runner's, with its drafts after each choice, int64 [most], -1 for none."""
        super().__init__(most, eos_ids)
        self._last = last

    def follow(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        """Reserve room for drafts of sequences that had any within their last tokens.

        It is not known yet what the runner will find. Repeated text tends to continue: a sequence
        without drafts gets no places, which have a cost, until something has been found.
        """
        self._note_found(rows)
        asking, allowed = [], {}
        for row in rows:
            sequence, record = row.sequence, self._record(row.sequence)
            if not record.allowed:
                record.rest -= 1
            elif record.drafts or self._is_near(sequence):
                asking.append(row)
                allowed[sequence.id] = record.allowed
        shared = share_room(asking, spare, allowed=lambda one: allowed[one.id])
        return {row.place: count for row, count in shared}

    def judge(self, sequence: ShardSequence, count: int, right: int) -> None:
        self._record(sequence).note(count, right, self._most)

    def _note_found(self, rows: Sequence[DraftRow]) -> None:
        """Note the sequences for which the runner has drafts after their last token."""
        places = self._last.find_places(row.sequence for row in rows)
        if not places:
            return
        firsts = self._last.pick(list(places.values()))[:, 0].tolist()
        found = {key for key, first in zip(places, firsts, strict=True) if first >= 0}
        for row in rows:
            if row.sequence.id in found:
                row.sequence.state[_FOUND] = row.sequence.length

    def _is_near(self, sequence: ShardSequence) -> bool:
        """Return whether drafts have been found within a sequence's last tokens."""
        length = sequence.state.get(_FOUND)
        return isinstance(length, int) and sequence.length - length <= _NEAR

    def _record(self, sequence: ShardSequence) -> Record:
        return find_record(sequence, self._most, adapts=True)


def _occurrences(sequence: ShardSequence) -> _Occurrences:
    found = sequence.state.get(_STATE)
    if not isinstance(found, _Occurrences):
        found = sequence.state[_STATE] = _Occurrences()
    return found


class _Occurrences:
    """The last occurrence of each n-gram of one sequence: n-gram -> the position after it."""

    def __init__(self) -> None:
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in _SIZES}
        self._seen = 0  # n-grams within the first `_seen` tokens are included

    def before(self, sequence: ShardSequence) -> int | None:
        """Return the position after the latest earlier occurrence of the longest known suffix."""
        # All but the last token: n-grams that end with it are those to look up.
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
