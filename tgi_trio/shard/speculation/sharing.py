"""Divides a step's guesses among sequences. No torch in this file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tgi_trio.shard.contract import DraftRow, ShardSequence


def share_drafts(
    rows: Iterable[DraftRow],
    spare: int,
    *,
    trust: Callable[[ShardSequence], int],
    draft: Callable[[ShardSequence, int], int],
) -> dict[int, int]:
    """Have at most `spare` tokens guessed in all; return how many by place, of those with any.

    In equal parts, those first whose guesses are worth most (`trust`); what one leaves goes to the
    next. `draft`: guess for a sequence, up to so many tokens; returns how many.
    """
    waiting = list(rows)
    if len(waiting) > 1:
        waiting.sort(key=lambda row: -trust(row.sequence))
    counts: dict[int, int] = {}
    for served, (place, sequence, room) in enumerate(waiting):
        part = -(-spare // (len(waiting) - served))
        if min(part, room) > 0 and (count := draft(sequence, min(part, room))):
            counts[place] = count
            spare -= count
    return counts


def share_room(
    rows: Sequence[DraftRow], spare: int, *, allowed: Callable[[ShardSequence], int]
) -> list[tuple[DraftRow, int]]:
    """Return the rows that are to be guessed for, each with how many tokens; as `share_drafts`.

    For those who guess for all rows at once. `allowed`: most tokens a sequence has earned.
    """
    shared: list[tuple[DraftRow, int]] = []

    def take(row: DraftRow, room: int) -> int:
        count = min(allowed(row.sequence), room)
        if count:
            shared.append((row, count))
        return count

    by_id = {row.sequence.id: row for row in rows}
    share_drafts(rows, spare, trust=allowed, draft=lambda one, room: take(by_id[one.id], room))
    return shared
