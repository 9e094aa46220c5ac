"""Where an answer begins: a property of the prompt, not of the model."""

from __future__ import annotations

import enum

from tgi_trio.router.text.thoughts.derive import Thoughts
from tgi_trio.router.text.thoughts.marks import Marks


class Place(enum.Enum):
    """Where the model is when it writes its first token."""

    INSIDE = "inside"  # the prompt has begun a thought
    CLOSED = "closed"  # the prompt has ended a thought, or there is none
    MAY_OPEN = "may open"  # the model may begin one, as the first text of its answer


def find_place(prompt: str, thoughts: Thoughts, last_text: str = "") -> Place:
    """Return where an answer to `prompt` begins.

    The last mark after the beginning of the model's last message decides: earlier turns may quote
    marks. `last_text`: the text of the last message, unless it is the model's; marks before and in
    it are ignored.
    """
    marks = thoughts.marks
    rest = prompt[_behind(prompt, thoughts.header) :]
    if last_text := last_text.strip():
        rest = rest[_behind(_masked(rest, marks), last_text) :]
    start, end = rest.rfind(marks.start), rest.rfind(marks.end)
    if start > end:
        return Place.INSIDE
    if end >= 0:
        return Place.CLOSED
    if marks.opening and rest.lstrip().startswith(marks.opening):
        return Place.CLOSED  # the last message is continued
    # A template may write the first half of the mark (Gemma 4 after a tool's result).
    half = marks.start.find(">") + 1
    if 0 < half < len(marks.start) and rest.rstrip().endswith(marks.start[:half]):
        return Place.INSIDE
    return Place.MAY_OPEN


def _behind(text: str, part: str) -> int:
    """Return the position after the last `part`; 0 if there is none."""
    position = text.rfind(part) if part else -1
    return 0 if position < 0 else position + len(part)


def _masked(text: str, marks: Marks) -> str:
    """Return a text of the same length in which no word can be found inside a mark."""
    for mark in (marks.start, marks.end):
        text = text.replace(mark, "\0" * len(mark))
    return text
