"""Which sequence brings the shard down: found by bisection, while all others go on.

A shard that dies takes no work with it: all sequences are computed again. But one that kills the
shard would do so again and again. Once may be chance (an operator, a kernel short of memory), so
after a first death all come back together. A sequence that is on the shard at a second death, and
has got no further since the first, is a suspect. Suspects come back in groups half as large as the
one that died with the shard, and no other sequence joins them. A group that gets further is
cleared, and the next one follows; so is a suspect that was not there when the shard died again. One
that is alone with the shard when that dies for the `DEATHS`-th time is the culprit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tgi_trio.router.scheduling.lifecycle import HELD, SequenceState
from tgi_trio.router.scheduling.sequence import Sequence

DEATHS: Final = 3  # of the shard, with no progress in between, that convict a sequence
TOKENS: Final = 8  # more tokens than when the shard died: it got further


class Isolation:
    """The suspects, and how many of them may be on the shard together."""

    def __init__(self) -> None:
        self._suspects: dict[int, Sequence] = {}
        self._group = 0
        self.explained = False  # the last death is blamed on a sequence, or on one of several

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._suspects

    def lose(self, held: Iterable[Sequence]) -> Sequence | None:
        """The shard has died with `held` on it; returns the culprit once it is known."""
        for sequence in self._suspects.values():
            if sequence.state is SequenceState.WAITING:
                sequence.deaths = 0  # it was somebody else
        self._suspects.clear()
        self.explained = False
        for sequence in held:
            if len(sequence.emitted) >= sequence.emitted_at_death + TOKENS:
                sequence.deaths = 0
            sequence.deaths += 1
            sequence.emitted_at_death = len(sequence.emitted)
            if sequence.deaths > 1:
                self._suspects[sequence.id] = sequence
        if not self._suspects:
            return None
        self.explained = True
        self._group = max(1, len(self._suspects) // 2)
        if len(self._suspects) == 1:
            (sequence,) = self._suspects.values()
            if sequence.deaths >= DEATHS:
                self._suspects.clear()
                return sequence
        return None

    def places(self) -> int | None:
        """Return how many suspects may join the batch now; None when there is no suspect left."""
        if not self._suspects:
            return None
        for sequence in list(self._suspects.values()):
            further = len(sequence.emitted) >= sequence.emitted_at_death + TOKENS
            if further or sequence.state is SequenceState.FINISHED:
                del self._suspects[sequence.id]
        if not self._suspects:
            return None
        held = sum(sequence.state in HELD for sequence in self._suspects.values())
        return max(0, self._group - held)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError when more suspects are on the shard than may be together."""
        known = {sequence.id for sequence in sequences}
        alive = [s for s in self._suspects.values() if s.id in known]
        if sum(sequence.state in HELD for sequence in alive) > self._group:
            raise AssertionError(f"more than {self._group} suspects are on the shard")
        if any(sequence.deaths < 2 for sequence in alive):
            raise AssertionError("someone is a suspect after one death of the shard")
