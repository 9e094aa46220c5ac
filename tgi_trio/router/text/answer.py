"""Parses an answer as it arrives, into thoughts, content and calls.

Streams and bodies share this parser: a stream sends the deltas that it returns, and a body is their
fold, so the two cannot differ, however the answer is cut into pieces. Text that matches no mark is
prose, so an answer can be odd, but never an error. Pure: no I/O and no clock.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from tgi_trio.router.delta import Delta
from tgi_trio.router.text.thoughts.marks import Marks


class CallReader(Protocol):
    """Parses what follows the thoughts: content and calls."""

    @property
    def calls(self) -> int:
        """Number of calls begun so far."""

    @property
    def complete(self) -> bool:
        """Whether there are calls, all of them complete."""

    def push(self, text: str) -> Delta:
        """Take more text; return what it makes certain."""

    def finish(self) -> Delta:
        """Return what was held back, now that the answer has ended."""


class Region(enum.Enum):
    """What the next text is part of."""

    BEFORE = "before"  # nothing has come yet: a thought may begin
    OPENED = "opened"  # a thought has begun, without text so far
    THOUGHT = "thought"
    CLOSED = "closed"  # a thought has ended, and no answer has begun
    ANSWER = "answer"  # content and calls, to the end


class Edge(enum.Enum):
    """What leads from one region to another."""

    START = "start"  # the mark that begins a thought
    END = "end"  # the mark that ends it
    HEADER = "header"  # of one of the model's messages
    OPENING = "opening"  # the mark that begins an answer
    CALL = "call"  # a complete opening of a call, with the name of a function
    TEXT = "text"  # any other text but white space


# region -> what may come there -> the next region. Marks are dropped, repeated ones too; a call and
# other text belong to the region that they lead to. An edge that a row lacks is text there.
TABLE: dict[Region, dict[Edge, Region]] = {
    Region.BEFORE: {
        Edge.START: Region.OPENED,
        Edge.END: Region.CLOSED,
        Edge.HEADER: Region.BEFORE,
        Edge.OPENING: Region.ANSWER,
        Edge.TEXT: Region.ANSWER,  # with the white space before it, as there was no thought
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
    """How a call begins, for answers that call before their thought has ended.

    Only a complete opening counts, since a thought may mention the word that begins calls.
    """

    text: str  # up to the name
    names: tuple[str, ...]  # of the functions, each with the text after it
    # The text that begins nothing but a call, where calls are forced; "": there is none.
    certain: str = ""

    def cut_at(self, text: str) -> int:
        """Return where a call begins that the end of the answer has cut off; -1: there is none."""
        position, _ = self.find(text)
        return position if self.certain and text.startswith(self.certain, position) else -1

    def find(self, text: str) -> tuple[int, bool]:
        """Return where an opening begins, and whether it is complete; (-1, False): none does."""
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
    """Parses one answer of a model that may think first.

    White space around thoughts is dropped. A thought that is cut off by the end of the answer stays
    a thought.
    """

    def __init__(
        self,
        marks: Marks | None,
        calls: CallReader,
        *,
        inside: bool = False,
        opening: CallOpening | None = None,
    ) -> None:
        """`calls` parses what follows the thoughts; `inside`: the prompt has begun one.

        `marks`: None if there are no thoughts. `opening`: ends a thought as its end mark does, but
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
        # For a start mark of which the prompt has the first half (Gemma 4).
        half = marks.start.find(">") + 1
        self._rest_of_start = marks.start[half:] if inside and half else ""
        # First characters of what can end a thought.
        self._signs = "".join({marks.end[:1], opening.text[:1] if opening is not None else ""})
        self._text = ""  # not yet classified
        self._delta = Delta()
        self._thought = False  # there has been a thought
        self._apart = False  # a further thought would be a separate one

    @property
    def calls(self) -> int:
        """Number of calls begun so far."""
        return self._reader.calls

    @property
    def complete(self) -> bool:
        """Whether there are calls, all of them complete."""
        return self._reader.complete

    @property
    def thinking(self) -> bool:
        """Whether the next text is part of a thought, as far as is known."""
        return self.region is Region.OPENED or self.region is Region.THOUGHT

    @property
    def calling(self) -> bool:
        """Whether what is held back of a thought may turn out to begin a call."""
        if self._call is None or self.region is not Region.THOUGHT:
            return False
        return self._call.find(self._text)[0] >= 0

    @property
    def answering(self) -> bool:
        """Whether the next text can only be content or calls."""
        return self.region is Region.ANSWER

    def push(self, text: str) -> Delta:
        """Take more text; return what it makes certain."""
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
        """Return what was held back, now that the answer has ended."""
        text, self._text = self._text, ""
        self._delta = Delta()
        inside = self._call if self.region is Region.THOUGHT else None
        if inside is not None and (call := inside.cut_at(text)) >= 0:
            self._think(text[:call].rstrip())
            self.region, text = TABLE[self.region][Edge.CALL], text[call:]
        if self.thinking:
            self._think(text.strip() if self.region is Region.OPENED else text.rstrip())
            return self._delta
        if self.region is Region.CLOSED:
            text = text.lstrip()
        self._pass_on(text)
        self._add(self._reader.finish())
        return self._delta

    def _is_plain(self, text: str) -> bool:
        """Return whether all of a text certainly is thought; this is the common case, made fast."""
        for sign in self._signs:
            if sign in text:
                return False
        return not text[-1:].isspace()

    def _advance(self) -> bool:
        """Consume what is certain of the text; return whether the region changed."""
        if self.region is Region.ANSWER:
            self._take_answer()
            return False
        if self.region is Region.THOUGHT:
            return self._take_thought()
        return self._take_beginning()

    def _take_beginning(self) -> bool:
        """Consume a mark at the beginning of a region, or enter the region of other text."""
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
        """Pass a thought on, up to what ends it or may do so, without white space before that."""
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
        """Pass the answer on without the marks that close it."""
        text = self._text
        for mark in self._closings:
            text = text.replace(mark, "")
        certain = len(text) - max((overlap(text, mark) for mark in self._closings), default=0)
        self._pass_on(text[:certain])
        self._text = text[certain:]

    def _think(self, text: str) -> None:
        """Pass a piece of a thought on; an empty line separates two thoughts."""
        if text:
            self._delta.thought += f"\n\n{text}" if self._apart else text
            self._thought, self._apart = True, False

    def _pass_on(self, text: str) -> None:
        if text:
            self._add(self._reader.push(text))

    def _add(self, delta: Delta) -> None:
        if delta.thought and self._apart:  # the first of a reader that parses thoughts itself
            delta.thought, self._apart = f"\n\n{delta.thought}", False
        self._delta = fold((self._delta, delta)) if self._delta else delta


def overlap(text: str, end: str) -> int:
    """Return the length of the longest proper prefix of `end` with which `text` ends."""
    start = text.find(end[0], max(0, len(text) - len(end) + 1))
    while start >= 0 and not end.startswith(text[start:]):
        start = text.find(end[0], start + 1)
    return len(text) - start if start >= 0 else 0


def fold(deltas: Iterable[Delta]) -> Delta:
    """Return several deltas, in order, as one."""
    whole = Delta()
    for delta in deltas:
        whole.content += delta.content
        whole.thought += delta.thought
        whole.calls += delta.calls
    return whole
