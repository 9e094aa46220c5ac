"""Guesses from the text so far: what followed the last few tokens when they were met before.

"Prompt lookup" (Saxena 2023): free to make, and often right in code, quotations, lists and
summaries. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from tgi_trio.shard.step import Sequence

_STATE = "ngrams"  # key in Sequence.state
_SIZES = (4, 3, 2)  # of the n-grams looked up, the most telling first
_LONGEST_REST = 30  # steps without guesses after a row of wrong ones


class NgramDrafter:
    """Guesses by the latest earlier occurrence of a sequence's last tokens."""

    def __init__(self, most: int, eos_ids: Iterable[int]) -> None:
        """Guess `most` tokens a step and sequence at most; never an EOS or beyond."""
        self._most = most
        self._eos_ids = frozenset(eos_ids)

    def draft(self, sequence: Sequence, room: int) -> int:
        """Write guesses into `token_ids` behind the known tokens; return how many, at most `room`.

        Where the earlier occurrence reaches into the guesses, they repeat themselves. A sequence
        whose last guesses were wrong gets fewer, and then none for ever longer: each takes a
        place in the step.
        """
        ids, length = sequence.token_ids, sequence.length
        state = sequence.state.get(_STATE)
        if not isinstance(state, _Drafted):
            state = sequence.state[_STATE] = _Drafted(self._most)
        if not state.ready(length, self._most):
            return 0
        source = state.occurrences.before(sequence)
        if source is not None:
            for i in range(min(state.most, room, len(ids) - length)):
                token = ids[source + i]
                if not sequence.sampling.ignore_eos and int(token) in self._eos_ids:
                    break
                ids[length + i] = token
                state.count = i + 1
        return state.count


class _Drafted:
    """What the drafter remembers of one sequence."""

    def __init__(self, most: int) -> None:
        self.occurrences = _Occurrences()
        self.most = most  # guesses it may have at the moment
        self.count = 0  # guesses it had last
        self._length = 0  # and the tokens it had then
        self._failures = 0  # times in a row that no guess was right
        self._rest = 0  # steps it still sits out

    def ready(self, length: int, limit: int) -> bool:
        """Judge the last guesses; return whether it may have some now, and decide on `most`.

        Twice as many, up to `limit`, after all were right, else those + 1. After the second
        failure in a row it rests, and twice as long after each further one.
        """
        right = max(0, length - self._length - 1)
        if self.count:
            self.most = min(limit, 2 * self.count if right >= self.count else right + 1)
            self._failures = 0 if right else self._failures + 1
            self._rest = min(_LONGEST_REST, 2**self._failures - 2) if self._failures else 0
        self.count, self._length = 0, length
        if self._rest:
            self._rest -= 1
            return False
        return True


class _Occurrences:
    """Where each n-gram of one sequence was last met: n-gram -> the position that follows it."""

    def __init__(self) -> None:
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in _SIZES}
        self._seen = 0  # n-grams within the first `_seen` tokens are in

    def before(self, sequence: Sequence) -> int | None:
        """Return the position after the latest earlier occurrence of the longest known suffix."""
        # All but the last token: the n-grams it ends are those that are looked up.
        end = sequence.length - 1
        start = max(0, self._seen - max(_SIZES) + 1)
        tokens = sequence.token_ids[start : end + 1].tolist()
        for n, after in self._after.items():
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
