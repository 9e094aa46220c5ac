"""Leaving out what has no room: editors send as much around a gap as a user has set, or has open.

What is near the gap matters most. Other files go first, the farthest of them before the nearest;
then what stands before the gap keeps three quarters of the room, and what stands behind it one.

Counting takes a quarter of a second for a megabyte, so a text is counted from the end that stays,
no further than it takes to know that it is too long.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from tgi_trio.router.text.infill import Gap, InfillFormat, OtherFile

_BEHIND: Final = 4  # a quarter of the room
_SPARE: Final = 8  # tokens: BOS, and what texts have more together than one by one
_EACH: Final = 2  # characters of a token that are looked at first

Count = Callable[[str], Awaitable[int]]


async def fit_gap(
    gap: Gap, infill: InfillFormat, added_tokens: frozenset[str], most: int, count: Count
) -> Gap:
    """Return the gap with no more around it than `most` tokens allow; `count` counts those."""
    bare = replace(gap, before="", behind="", others=None if gap.others is None else ())
    room = max(0, most - _SPARE - await count(infill.write(bare, added_tokens)))
    before = (await _find_edge(_Side(gap.before, keeps_end=True), room, count)).least
    behind = (await _find_edge(_Side(gap.behind, keeps_end=False), room, count)).least
    if before + behind > room:
        behind = min(behind, max(room // _BEHIND, room - before))
        return replace(
            bare,
            before=await _cut(_Side(gap.before, keeps_end=True), room - behind, count),
            behind=await _cut(_Side(gap.behind, keeps_end=False), behind, count),
        )
    room -= before + behind
    kept: list[OtherFile] = []
    for other in reversed(gap.others or ()):
        written = _Side(infill.write_other(other, added_tokens), keeps_end=False)
        room -= (await _find_edge(written, room, count)).least
        if room < 0:
            break
        kept.insert(0, other)
    return replace(gap, others=None if gap.others is None else tuple(kept))


@dataclass(frozen=True, slots=True)
class _Side:
    """A text of which one end stays."""

    text: str
    keeps_end: bool  # or its beginning

    def take(self, characters: int) -> str:
        """Return the part that is so long."""
        return self.text[-characters:] if self.keeps_end else self.text[:characters]


@dataclass(frozen=True, slots=True)
class _Edge:
    """Where a text has as many tokens as have room, in characters from the end that stays."""

    fits: int  # as much has room: the whole text, or
    held: int  # (its tokens)
    too_long: int  # as much has none
    over: int  # (its tokens)

    @property
    def least(self) -> int:
        """The text's tokens, or some number of more than have room."""
        return max(self.held, self.over)


async def _find_edge(side: _Side, most: int, count: Count) -> _Edge:
    """Return about where a text has `most` tokens, by parts that are longer and longer."""
    fits, held, characters = 0, 0, _EACH * (most + 1)
    while fits < len(side.text):
        characters = min(characters, len(side.text))
        if (tokens := await count(side.take(characters))) > most:
            return _Edge(fits, held, characters, tokens)
        fits, held, characters = characters, tokens, 2 * characters
    return _Edge(fits, held, fits + 1, 0)


async def _cut(side: _Side, most: int, count: Count) -> str:
    """Return the end or the beginning of a text, of at most `most` tokens, cut between two lines.

    Within a line where not even that has room.
    """
    edge = await _find_edge(side, most, count)
    fits, held, too_long, over = edge.fits, edge.held, edge.too_long, edge.over
    if fits == len(side.text):
        return side.text
    by_half = False
    while too_long - fits > 1 and held < most:
        # Tokens are much the same length everywhere; where they are not, every other step halves.
        share = 0.5 if by_half else (most - held) / (over - held)
        middle = fits + min(max(round(share * (too_long - fits)), 1), too_long - fits - 1)
        by_half = not by_half
        if (tokens := await count(side.take(middle))) <= most:
            fits, held = middle, tokens
        else:
            too_long, over = middle, tokens
    return _end_at_line(side, fits) if fits else ""


def _end_at_line(side: _Side, characters: int) -> str:
    """Return the part of a text that is so long, without a line of which it has a piece."""
    part = side.take(characters)
    if side.keeps_end:
        _, newline, rest = part.partition("\n")
        return rest if newline and rest and side.text[-characters - 1] != "\n" else part
    whole, newline, _ = part.rpartition("\n")
    return whole + newline if newline else part
