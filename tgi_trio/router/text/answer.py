"""Reads an answer as it arrives: what is thought, what is said, what is called.

The only reader there is. The deltas of a stream are what it returns, and a body is their fold, so
the two cannot differ, however the answer is cut into pieces. Whatever fits no mark is prose: an
answer can be odd, but never an error. Pure: no I/O and no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tgi_trio.router.delta import Delta
from tgi_trio.router.text.thoughts.marks import Marks


class CallReader(Protocol):
    """Reads what follows the thoughts: content and calls."""

    @property
    def calls(self) -> int:
        """Calls begun so far."""

    @property
    def complete(self) -> bool:
        """Whether there are calls, and all of them whole."""

    def push(self, text: str) -> Delta:
        """Return what became certain with `text`."""

    def finish(self) -> Delta:
        """Return what is left to tell, now that no text will follow."""


class Region(enum.Enum):
    """What the next text belongs to."""

    BEFORE = "before"  # nothing is said yet: a thought may begin
    OPENED = "opened"  # a thought has begun, and nothing of it has come
    THOUGHT = "thought"
    CLOSED = "closed"  # a thought has ended, and nothing of an answer has come
    ANSWER = "answer"  # content and calls, to the end


class Edge(enum.Enum):
    """What leads from one region to another."""

    START = "start"  # the mark that begins a thought
    END = "end"  # the mark that ends it
    HEADER = "header"  # of a message of the model's
    OPENING = "opening"  # the mark that begins an answer
    CALL = "call"  # the whole opening of a call, and a name that can be called
    TEXT = "text"  # any other text, white space at its beginning aside


# region -> what may come there -> the next region. Marks are swallowed, also those that come twice;
# a call and other text belong to what they lead to. An edge that is not in a row is text there.
TABLE: dict[Region, dict[Edge, Region]] = {
    Region.BEFORE: {
        Edge.START: Region.OPENED,
        Edge.END: Region.CLOSED,
        Edge.HEADER: Region.BEFORE,
        Edge.OPENING: Region.ANSWER,
        Edge.TEXT: Region.ANSWER,  # with the white space before it: nothing was thought
    },
    Region.OPENED: {
        Edge.START: Region.OPENED,
        Edge.END: Region.CLOSED,
        Edge.TEXT: Region.THOUGHT,
    },
    Region.THOUGHT: {
        Edge.END: Region.CLOSED,
        Edge.CALL: Region.ANSWER,
    },
    Region.CLOSED: {
        Edge.START: Region.OPENED,  # thoughts may come in several pieces
        Edge.END: Region.CLOSED,
        Edge.HEADER: Region.CLOSED,
        Edge.OPENING: Region.ANSWER,
        Edge.TEXT: Region.ANSWER,
    },
    Region.ANSWER: {},
}


@dataclass(frozen=True, slots=True)
class CallOpening:
    """How a call begins, for an answer that calls before its thought has ended.

    Only the whole of it counts: a thought may well speak of the word that begins calls.
    """

    text: str  # up to the name
    names: tuple[str, ...]  # of the functions, each with what follows it

    def find(self, text: str) -> tuple[int, bool]:
        """Return where an opening in `text` begins, and whether it is whole; (-1, False): none."""
        position = text.find(self.text)
        while position >= 0:
            rest = text[position + len(self.text) :]
            if rest.startswith(self.names):
                return position, True
            if any(name.startswith(rest) for name in self.names):
                return position, False
            position = text.find(self.text, position + 1)
        held = overlap(text, self.text)
        return (len(text) - held, False) if held else (-1, False)


class AnswerParser:
    """Reads one answer whose model may think before it answers.

    White space around thoughts belongs to nobody. A thought that the answer's end cuts off stays a
    thought.
    """

    def __init__(
        self,
        marks: Marks | None,
        calls: CallReader,
        *,
        inside: bool = False,
        opening: CallOpening | None = None,
    ) -> None:
        """`calls` reads what follows the thoughts; `inside`: the prompt has begun one.

        No marks: there are no thoughts. `opening`: what ends a thought like its end mark, and
        belongs to the answer.
        """
        self.region = Region.OPENED if inside else Region.BEFORE
        if marks is None:
            self.region, marks = Region.ANSWER, Marks("", "")
        self._reader = calls
        self._call = opening
        self._end = marks.end
        self._closings = tuple(filter(None, (marks.closing, marks.ending)))
        known = {
            Edge.START: marks.start,
            Edge.END: marks.end,
            Edge.HEADER: marks.header,
            Edge.OPENING: marks.opening,
        }
        self._marks = {
            region: {edge: known[edge] for edge in edges if known.get(edge)}
            for region, edges in TABLE.items()
        }
        # A thought whose mark the prompt has begun and the model completes (Gemma 4).
        half = marks.start.find(">") + 1
        self._rest_of_start = marks.start[half:] if inside and half else ""
        # What begins anything but thought.
        self._signs = "".join({marks.end[:1], opening.text[:1] if opening is not None else ""})
        self._text = ""  # not yet certain what it is
        self._delta = Delta()
        self._thought = False  # something was thought
        self._apart = False  # what is thought next is another thought

    @property
    def calls(self) -> int:
        """Calls begun so far."""
        return self._reader.calls

    @property
    def complete(self) -> bool:
        """Whether there are calls, and all of them whole."""
        return self._reader.complete

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to a thought, as far as is known."""
        return self.region is Region.OPENED or self.region is Region.THOUGHT

    @property
    def answering(self) -> bool:
        """Whether the next text can only be content or calls."""
        return self.region is Region.ANSWER

    def push(self, text: str) -> Delta:
        """Return what became certain with `text`."""
        if self.region is Region.ANSWER and not self._closings:
            return self._reader.push(text)
        if self.region is Region.THOUGHT and not self._text and self._is_plain(text):
            return Delta("", [], text)
        self._text += text
        self._delta = Delta()
        while self._text and self._advance():
            pass
        return self._delta

    def finish(self) -> Delta:
        """Return what is left to tell, now that no text will follow."""
        text, self._text = self._text, ""
        self._delta = Delta()
        if self.thinking:
            self._think(text.strip() if self.region is Region.OPENED else text.rstrip())
            return self._delta
        if self.region is Region.CLOSED:
            text = text.lstrip()
        self._say(text)
        self._add(self._reader.finish())
        return self._delta

    def _is_plain(self, text: str) -> bool:
        """Whether all of a text is certain to be thought: nearly always, so it is seen first."""
        for sign in self._signs:
            if sign in text:
                return False
        return not text[-1:].isspace()

    def _advance(self) -> bool:
        """Take what is certain from the text; return whether that led to another region."""
        if self.region is Region.ANSWER:
            self._take_answer()
            return False
        if self.region is Region.THOUGHT:
            return self._take_thought()
        return self._take_beginning()

    def _take_beginning(self) -> bool:
        """Take a mark from the beginning of a region, or find that it begins with text."""
        text = self._text.lstrip()
        if not text:
            return False
        waits = False
        for edge, mark in self._marks[self.region].items():
            if text.startswith(mark):
                self._enter(TABLE[self.region][edge], text[len(mark) :])
                return True
            waits = waits or mark.startswith(text)
        if self._rest_of_start and self.region is Region.OPENED:
            rest, self._rest_of_start = self._rest_of_start, ""
            if text.startswith(rest):
                self._text = text[len(rest) :]
                return True
            if rest.startswith(text):
                self._rest_of_start = rest
                return False
        if waits:
            return False
        kept = self._text if self.region is Region.BEFORE else text
        self._enter(TABLE[self.region][Edge.TEXT], kept)
        return True

    def _enter(self, region: Region, text: str) -> None:
        self.region, self._text = region, text
        if region is not Region.OPENED:
            self._rest_of_start = ""

    def _take_thought(self) -> bool:
        """Pass on a thought, up to what ends it or may do so, less the white space before that."""
        text = self._text
        end, call, whole = text.find(self._end), -1, False
        if self._call is not None:
            call, whole = self._call.find(text)
        if end >= 0 and not 0 <= call < end:
            self._think(text[:end].rstrip())
            self._apart = self._thought
            self._enter(TABLE[self.region][Edge.END], text[end + len(self._end) :])
            return True
        if whole:
            self._think(text[:call].rstrip())
            self._enter(TABLE[self.region][Edge.CALL], text[call:])
            return True
        certain = len(text) - overlap(text, self._end)
        if call >= 0:
            certain = min(certain, call)
        thought = text[:certain].rstrip()
        self._think(thought)
        self._text = text[len(thought) :]
        return False

    def _take_answer(self) -> None:
        """Pass on the answer without the marks that close it."""
        text = self._text
        for mark in self._closings:
            text = text.replace(mark, "")
        certain = len(text) - max((overlap(text, mark) for mark in self._closings), default=0)
        self._say(text[:certain])
        self._text = text[certain:]

    def _think(self, text: str) -> None:
        """Pass on a piece of a thought; an empty line stands between two thoughts."""
        if text:
            self._delta.thought += f"\n\n{text}" if self._apart else text
            self._thought, self._apart = True, False

    def _say(self, text: str) -> None:
        if text:
            self._add(self._reader.push(text))

    def _add(self, delta: Delta) -> None:
        if delta.thought and self._apart:  # the first of a reader that knows thoughts itself
            delta.thought, self._apart = f"\n\n{delta.thought}", False
        self._delta = fold((self._delta, delta)) if self._delta else delta


def overlap(text: str, end: str) -> int:
    """Return how much of the end of `text` may be the beginning of `end`."""
    start = text.find(end[0], max(0, len(text) - len(end) + 1))
    while start >= 0 and not end.startswith(text[start:]):
        start = text.find(end[0], start + 1)
    return len(text) - start if start >= 0 else 0


def fold(deltas: Iterable[Delta]) -> Delta:
    """Return several deltas, in their order, as one."""
    whole = Delta()
    for delta in deltas:
        whole.content += delta.content
        whole.thought += delta.thought
        whole.calls += delta.calls
    return whole
