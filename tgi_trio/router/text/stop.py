"""Stop strings in a text that arrives in pieces.

The generation ends where a stop string is first complete, wherever the pieces are cut: across any
number of tokens or in the middle of one. When several are complete at the same character the
longest counts. TGI looks only at the end of each token's text; this differs from it where a stop
string ends inside a token (found here) or is longer than its window of 200 characters (found here).
"""

from __future__ import annotations

from collections.abc import Iterable


class _Pattern:
    """One stop string and how much of it the text ends with (Knuth, Morris and Pratt, 1977).

    The failure table grows only as far as the text has matched, so that a stop string of a megabyte
    costs nothing until a model starts to write it; each character costs amortised constant time.
    """

    __slots__ = ("_failure", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters; the longest proper prefix that the text ends with
        self._failure = [0, 0]  # [k]: longest proper border of text[:k]

    def find(self, piece: str) -> int:
        """Return the end of the first match in `piece`, or -1 when none is complete in it."""
        text, matched, position = self.text, self.matched, 0
        while position < len(piece):
            if not matched:  # nothing is pending: let C find the next place to begin
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
                self.matched = matched
                return position
        self.matched = matched
        return -1

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
    """Finds the first of several stop strings; holds text back while it may become one."""

    __slots__ = ("_held", "_keep", "_patterns", "matched")

    def __init__(self, stops: Iterable[str], keep: bool) -> None:
        """`keep`: the stop string stays in the text (TGI) instead of being cut off (OpenAI).

        With `keep` nothing is ever held back. Empty stop strings are ignored.
        """
        self._patterns = [_Pattern(stop) for stop in stops if stop]
        self._keep = keep
        self._held = ""
        self.matched = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is now certain to be part of the output, and whether it ends here.

        After a match everything is swallowed.
        """
        if self.matched:
            return "", True
        if not self._patterns:
            return text, False
        end, length = self._first_match(text)
        if end >= 0:
            self.matched = True
            if self._keep:
                return text[:end], True
            held, self._held = self._held, ""
            return (held + text[:end])[: len(held) + end - length], True
        if self._keep:
            return text, False
        text = self._held + text
        certain = len(text) - max(pattern.matched for pattern in self._patterns)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """Return the text held back, once no more will follow."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int]:
        """Return end in `text` and length of the stop string completed first, or (-1, 0)."""
        best = (-1, 0)
        for pattern in self._patterns:
            end = pattern.find(text)
            length = len(pattern.text)
            if end >= 0 and (best[0] < 0 or (end, -length) < (best[0], -best[1])):
                best = (end, length)
        return best
