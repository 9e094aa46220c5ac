"""Which sequences may guess how many tokens of a step. No torch in this file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tgi_trio.shard.contract import Drafter, ShardSequence


class DraftRow(NamedTuple):
    """A sequence that decodes in a step."""

    place: int  # among the step's rows
    sequence: ShardSequence
    room: int  # most tokens it may guess


def share_drafts(drafter: Drafter, guessers: Iterable[DraftRow], spare: int) -> dict[int, int]:
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
