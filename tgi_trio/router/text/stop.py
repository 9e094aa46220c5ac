"""Stop strings and stop expressions in a text that arrives in pieces.

The generation ends where a stop string, or a match of an expression (`stop_regex.py`), is first
complete, wherever the pieces are cut: across any number of tokens or in the middle of one. If
several are complete at the same character, the longest counts. TGI looks only at the end of each
token's text; this differs from it for a stop string that ends inside a token (found here) or is
longer than its window of 200 characters (found here).

A special token is matched as a whole, not by its letters: a stop string is that token's text alone
(`</s>`) or ends with it (a newline, then `<|user|>`). TGI searches its letters, so `>` would end at
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tgi_trio.router.request import Expression
from tgi_trio.router.text.stop_regex import RegexPattern


class Pattern(Protocol):
    """Something that ends a text, and how much of it the text ends with."""

    text: str  # as the client wrote it
    matched: int  # characters at the end of the text that may become a match
    length: int  # characters of the match that was found

    def find(self, piece: str, counts: bool = True) -> int:
        """Return the end of the first match in `piece`, or -1 if none is complete in it.

        Without `counts` a match that is complete in `piece` is no match.
        """

    def ends_with(self, whole: str) -> int:
        """Return the length of the text before `whole`, a special token, in a match that it ends.

        -1 if it ends none.
        """

    def forget(self) -> None:
        """Start again: no match continues from earlier text."""


class _Pattern:
    """One stop string, matched by the algorithm of Knuth, Morris and Pratt (1977).

    The failure table grows only as far as the text has matched, so that a stop string of a megabyte
    costs nothing until a model starts to write it. Each character takes amortised constant time.
    """

    __slots__ = ("_failure", "length", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = len(text)
        self.matched = 0  # characters; the longest proper prefix that the text ends with
        self._failure = [0, 0]  # [k]: longest proper border of text[:k]

    def find(self, piece: str, counts: bool = True) -> int:
        text, matched, position = self.text, self.matched, 0
        while position < len(piece):
            if not matched:  # nothing is pending: search for the next place to begin in C
                position = piece.find(text[0], position)
                if position < 0:
                    break
            character = piece[position]
            while matched and text[matched] != character:
                matched = self._border(matched)
            if text[matched] == character:
                matched += 1
            position += 1
            if matched == len(text):
                if counts:
                    self.matched = matched
                    return position
                matched = self._border(matched)
        self.matched = matched
        return -1

    def ends_with(self, whole: str) -> int:
        """Return the length of the text before `whole` in this stop string; -1 if not complete.

        It is complete if it ends with `whole`, and the text ends with the rest of it.
        """
        before = len(self.text) - len(whole)
        if before < 0 or not self.text.endswith(whole):
            return -1
        matched = self.matched
        while matched > before:
            matched = self._border(matched)
        return before if matched == before else -1

    def forget(self) -> None:
        self.matched = 0

    def _border(self, length: int) -> int:
        failure, text = self._failure, self.text
        while len(failure) <= length:
            last = text[len(failure) - 1]
            border = failure[-1]
            while border and text[border] != last:
                border = failure[border]
            failure.append(border + 1 if text[border] == last else 0)
        return failure[length]


class StopMatcher:
    """Finds the first of several stop strings; holds back text that may become one."""

    __slots__ = ("_held", "_keep", "_patterns", "found", "matched", "waits")

    def __init__(
        self, stops: Iterable[str], keep: bool, regexes: Iterable[Expression] = ()
    ) -> None:
        """`keep`: the stop string stays in the text (TGI) instead of being cut off (OpenAI).

        With `keep`, nothing is held back. Empty stop strings are ignored.
        """
        self._patterns: list[Pattern] = [_Pattern(stop) for stop in stops if stop]
        self._patterns += map(RegexPattern, regexes)
        self._keep = keep
        self._held = ""
        self.matched = False
        self.waits = False  # what is complete now is text as any other, but a match may begin in it
        self.found: str | None = None  # the stop string or expression that ended the text

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is now certain to be output, and whether the output ends here.

        After a match all text is dropped.
        """
        if self.matched:
            return "", True
        if not self._patterns:
            return text, False
        if self.waits:
            return self._pass_over(text), False
        end, pattern = self._first_match(text)
        if pattern is not None:
            self.matched, self.found = True, pattern.text
            if self._keep:
                return text[:end], True
            held, self._held = self._held, ""
            return (held + text[:end])[: len(held) + end - pattern.length], True
        return self._release(text), False

    def _pass_over(self, text: str) -> str:
        """Return what `push` would if no match were complete in `text`; one may begin there."""
        for pattern in self._patterns:
            pattern.find(text, counts=False)
        return self._release(text)

    def name(self, special: str) -> bool:
        """Return whether a stop string is complete with a special token of this text.

        The part of the stop string before it, if held back, is dropped.
        """
        if self.matched:
            return True
        if self.waits:
            return False
        ends = [(pattern.ends_with(special), pattern.text) for pattern in self._patterns]
        before, text = max(ends, default=(-1, ""), key=lambda end: end[0])
        if before < 0:
            return False
        self.found = text
        self._held = self._held[: len(self._held) - before]
        self._forget()
        return True

    def flush(self) -> str:
        """Return the text held back, once no stop string can follow from it."""
        held, self._held = self._held, ""
        self._forget()
        return held

    def _release(self, text: str) -> str:
        """Return the text that is in no match, now that there is more of it."""
        if self._keep:
            return text
        text = self._held + text
        certain = len(text) - max(pattern.matched for pattern in self._patterns)
        self._held = text[certain:]
        return text[:certain]

    def _forget(self) -> None:
        for pattern in self._patterns:
            pattern.forget()

    def _first_match(self, text: str) -> tuple[int, Pattern | None]:
        """Return the end in `text` of the first complete match, and its pattern; or (-1, None)."""
        first, best = -1, None
        for pattern in self._patterns:
            end = pattern.find(text)
            if end >= 0 and (best is None or (end, -pattern.length) < (first, -best.length)):
                first, best = end, pattern
        return first, best
