"""Finds by bisection the sequence that crashes the shard, while all others go on.

When a shard dies, its sequences are computed again, so one that crashes it would do so again and
again. A single death may be chance (an operator, the kernel's OOM killer), so after the first all
sequences return together. A sequence that is on the shard at a second death, without progress since
the first, is a suspect. Suspects return in groups of half the size of the group that died, without
any other sequence beside them. A group that makes progress is cleared and the next one follows; so
is a suspect that was not on the shard when it died again. A suspect that is alone on the shard at
its death number `DEATHS` is the culprit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tgi_trio.router.scheduling.lifecycle import HELD, SequenceState
from tgi_trio.router.scheduling.sequence import Sequence

DEATHS: Final = 3  # deaths of the shard without progress in between that convict a sequence
TOKENS: Final = 8  # tokens more than at the shard's death that count as progress


class Isolation:
    """The suspects, and how many of them may be on the shard at once."""

    def __init__(self) -> None:
        self._suspects: dict[int, Sequence] = {}
        self._group = 0
        self.explained = False  # the last death is blamed on a sequence, found or among suspects

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._suspects

    def lose(self, held: Iterable[Sequence]) -> Sequence | None:
        """Note that the shard died with `held` on it; returns the culprit once it is known."""
        for sequence in self._suspects.values():
            if sequence.state is SequenceState.WAITING:
                sequence.deaths = 0  # it was not on the shard: another one crashed it
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
        """Return how many suspects may join the batch now; None if there are no suspects."""
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
        """Raise AssertionError if more suspects are on the shard than may be at once."""
        known = {sequence.id for sequence in sequences}
        alive = [s for s in self._suspects.values() if s.id in known]
        if sum(sequence.state in HELD for sequence in alive) > self._group:
            raise AssertionError(f"more than {self._group} suspects are on the shard")
        if any(sequence.deaths < 2 for sequence in alive):
            raise AssertionError("someone is a suspect after one death of the shard")
