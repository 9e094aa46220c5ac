"""How the answer to one chat is parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tgi_trio.router.delta import Delta
from tgi_trio.router.text.answer import AnswerParser, CallOpening, CallReader
from tgi_trio.router.text.thoughts.marks import Marks


class WithoutCalls:
    """Parses an answer that must not contain calls by a parser of calls, and drops them."""

    calls = 0
    complete = False

    def __init__(self, inner: Callable[[], CallReader]) -> None:
        self._inner = inner()

    def push(self, text: str) -> Delta:
        """Take more text; return the thoughts and content that it makes certain."""
        return self._without_calls(self._inner.push(text))

    def finish(self) -> Delta:
        """Return what was held back of them, now that the answer has ended."""
        return self._without_calls(self._inner.finish())

    def _without_calls(self, delta: Delta) -> Delta:
        delta.calls.clear()
        return delta


@dataclass(frozen=True, slots=True)
class ReadForm:
    """Implements `request.AnswerForm`."""

    thoughts: Marks | None  # None: no thoughts are separated
    inside: bool  # the prompt has begun a thought
    calls: Callable[[], CallReader]  # returns a parser for content and calls
    opening: CallOpening | None  # how a call begins that ends a thought
    marks: Mapping[int, str]

    def read(self) -> AnswerParser:
        """Return a parser for one answer."""
        return AnswerParser(self.thoughts, self.calls(), inside=self.inside, opening=self.opening)
