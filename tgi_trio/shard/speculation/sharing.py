"""Which sequences may guess how many tokens of a step. No torch in this file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from tgi_trio.shard.step import Sequence


class Drafter(Protocol):
    """Guesses the next tokens of a sequence."""

    def trust(self, sequence: Sequence) -> int:
        """Return how much its guesses are worth by how the last ones did; no unit."""
        ...

    def draft(self, sequence: Sequence, room: int) -> int:
        """Write guesses into `token_ids` behind the known ones; return how many, up to `room`."""
        ...


class Guesser(NamedTuple):
    """A sequence that decodes in a step."""

    place: int  # among the step's rows
    sequence: Sequence
    room: int  # most tokens it may guess


def share_guesses(drafter: Drafter, guessers: Iterable[Guesser], spare: int) -> dict[int, int]:
    """Have at most `spare` tokens guessed in all; return how many by place, of those with any.

    In equal parts, those first whose guesses are worth most; what one leaves goes to the next.
    """
    waiting = list(guessers)
    if len(waiting) > 1:
        waiting.sort(key=lambda guesser: -drafter.trust(guesser.sequence))
    counts: dict[int, int] = {}
    for served, (place, sequence, room) in enumerate(waiting):
        part = -(-spare // (len(waiting) - served))
        if min(part, room) > 0 and (count := drafter.draft(sequence, min(part, room))):
            counts[place] = count
            spare -= count
    return counts
