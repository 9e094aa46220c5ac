"""Finds a format's texts in the text of a model, of which only a part may have arrived.

White space in a format's text is forced by the grammar. For reading it is optional, and there may
be more of it, since templates of one family differ in it. Holes in a text stand for what the model
fills in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

# Holes: characters of private use that stand for what a model fills in.
INDEX = "\ue0f0"  # the number of a call
ID = "\ue0f1"  # an id of nine letters and digits
TYPE = "\ue0f2"  # the type of a value

HOLES = {INDEX: "[0-9]{1,4}", ID: "[A-Za-z0-9]{9}", TYPE: "[a-z]{1,16}"}
_PARTS = re.compile(rf"\s+|[{''.join(HOLES)}]|[^\s{''.join(HOLES)}]+")


@dataclass(frozen=True, slots=True)
class Match:
    """Where a text was found."""

    start: int
    end: int
    holes: tuple[str, ...] = ()  # what the model filled in


class Partial:
    """The text so far may be the beginning of a match."""


PARTIAL = Partial()


@cache
def split_text(text: str) -> tuple[str, ...]:
    """Return the words and holes of a format's text, without the white space between them."""
    return tuple(part for part in _PARTS.findall(text) if not part.isspace())


def match_text(text: str, wanted: str, start: int = 0) -> Match | Partial | None:
    """Return the match of `wanted` at `start`; PARTIAL: more text is needed; None: no match."""
    position, holes = start, []
    for part in split_text(wanted):
        while position < len(text) and text[position].isspace():
            position += 1
        if part in HOLES:
            found = re.compile(HOLES[part]).match(text, position)
            if found is None or found.end() == len(text):
                # No hole is longer than 16 characters.
                return PARTIAL if len(text) - position <= 16 and _fits(text[position:]) else None
            holes.append(found[0])
            position = found.end()
        elif text.startswith(part, position):
            position += len(part)
        elif part.startswith(text[position:]):
            return PARTIAL
        else:
            return None
    return Match(start, position, tuple(holes))


def _fits(rest: str) -> bool:
    return rest == "" or rest.isalnum()


def find_text(text: str, wanted: str) -> Match | Partial | None:
    """Return the first match of `wanted`; PARTIAL: it may still come; None: it has no words."""
    words = split_text(wanted)
    if not words:
        return None
    first = words[0]
    position = text.find(first[0])
    while position >= 0:
        found = match_text(text, wanted, position)
        if found is not None:
            return found
        position = text.find(first[0], position + 1)
    return PARTIAL


def overlap(text: str, end: str) -> int:
    """Return the length of the longest proper prefix of `end` with which `text` ends."""
    start = text.find(end[0], max(0, len(text) - len(end) + 1))
    while start >= 0 and not end.startswith(text[start:]):
        start = text.find(end[0], start + 1)
    return len(text) - start if start >= 0 else 0
