"""Leaving out what has no room: editors send as much around a gap as a user has set, or has open.

What is near the gap matters most. Other files go first, the farthest of them before the nearest;
then what stands before the gap keeps three quarters of the room, and what stands behind it one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from tgi_trio.router.text.infill import Gap, InfillFormat, OtherFile

_BEHIND: Final = 4  # a quarter of the room
_SPARE: Final = 8  # tokens: BOS, and what texts have more together than one by one

Count = Callable[[str], Awaitable[int]]


async def fit_gap(
    gap: Gap, infill: InfillFormat, added_tokens: frozenset[str], most: int, count: Count
) -> Gap:
    """Return the gap with no more around it than `most` tokens allow; `count` counts those."""
    bare = replace(gap, before="", behind="", others=None if gap.others is None else ())
    room = max(0, most - _SPARE - await count(infill.write(bare, added_tokens)))
    before, behind = await count(gap.before), await count(gap.behind)
    if before + behind > room:
        behind = min(behind, max(room // _BEHIND, room - before))
        return replace(
            bare,
            before=await _cut(gap.before, room - behind, count, keeps_end=True),
            behind=await _cut(gap.behind, behind, count, keeps_end=False),
        )
    room -= before + behind
    kept: list[OtherFile] = []
    for other in reversed(gap.others or ()):
        room -= await count(infill.write_other(other, added_tokens))
        if room < 0:
            break
        kept.insert(0, other)
    return replace(gap, others=None if gap.others is None else tuple(kept))


async def _cut(text: str, most: int, count: Count, *, keeps_end: bool) -> str:
    """Return the end or the beginning of a text, of at most `most` tokens, cut between two lines.

    Within a line where not even that has room.
    """
    if await count(text) <= most:
        return text
    fits, too_long = 0, len(text)  # characters
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        part = text[-middle:] if keeps_end else text[:middle]
        if await count(part) <= most:
            fits = middle
        else:
            too_long = middle
    if not fits:
        return ""
    if keeps_end:
        part = text[-fits:]
        _, newline, rest = part.partition("\n")
        return rest if newline and rest and text[-fits - 1] != "\n" else part
    part = text[:fits]
    whole, newline, _ = part.rpartition("\n")
    return whole + newline if newline else part
