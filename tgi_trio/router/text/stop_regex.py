"""One `stop_regex` in a text that arrives in pieces; `stop.py` combines several.

A match is complete at the first character at which any text that ends there matches as a whole, and
it begins as far to the left as possible, wherever the pieces are cut. So `\\d+` ends at the first
digit, and greedy and lazy repetitions are the same.
"""

from __future__ import annotations

from tgi_trio.router.request import Expression

MOST_HELD = 1024  # characters; of a longer match only the last so many are held back, and dropped


class RegexPattern:
    """The state of one expression in one text; a `stop.Pattern`."""

    __slots__ = ("_expression", "_live", "_seen", "length", "matched", "text")

    def __init__(self, expression: Expression) -> None:
        self.text = expression.text
        self.matched = 0  # characters at the end of the text that begin a match
        self.length = 0  # characters of the match that was found
        self._expression = expression
        self._live: list[tuple[int, int]] = []  # starts of possible matches, with their positions
        self._seen = 0  # characters

    def find(self, piece: str, counts: bool = True) -> int:
        expression, seen = self._expression, self._seen
        first, last = expression.first, expression.last
        for offset, character in enumerate(piece, start=1):
            taking = expression.taking(character)
            live: list[tuple[int, int]] = []
            taken = 0  # positions; the earliest start keeps them
            for start, positions in self._live:
                positions = expression.after(positions) & taking & ~taken
                if positions:
                    live.append((start, positions))
                    taken |= positions
            if fresh := first & taking & ~taken:
                live.append((seen + offset - 1, fresh))
                taken |= fresh
            self._live = live
            if taken & last and counts:
                start = next(start for start, positions in live if positions & last)
                self.length = min(seen + offset - start, MOST_HELD)
                return offset
        if not counts:  # what is complete, and cannot go on, begins nothing
            self._live = [each for each in self._live if expression.after(each[1])]
        self._seen = seen = seen + len(piece)
        self.matched = min(seen - self._live[0][0], MOST_HELD) if self._live else 0
        return -1

    def ends_with(self, whole: str) -> int:
        return -1  # expressions match text only, and a special token is not text

    def forget(self) -> None:
        self._live, self.matched = [], 0
