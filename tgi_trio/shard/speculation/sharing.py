"""Divides a step's drafts among sequences. No torch in this file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import DraftRow


def share_drafts(
    rows: Iterable[DraftRow],
    spare: int,
    *,
    trust: Callable[[ShardSequence], int],
    draft: Callable[[ShardSequence, int], int],
) -> dict[int, int]:
    """Have at most `spare` tokens drafted in all; return the numbers by place, without zeros.

    Sequences get equal parts, those with the highest `trust` first; what one leaves goes to the
    next. `draft`: drafts at most a given number of tokens for a sequence, and returns how many.
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
    """Return the rows to draft for, with their numbers of tokens, divided as by `share_drafts`.

    For drafters that draft for all rows at once. `allowed`: a sequence's limit.
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
