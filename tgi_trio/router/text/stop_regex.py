"""One `stop_regex` in a text that arrives in pieces; `stop.py` sees to several beside stop strings.

A match is complete at the first character at which any text that ends there matches as a whole, and
begins as far to the left as it can: the same wherever the pieces are cut. Nobody knows sooner, so
`\\d+` ends at the first digit; greedy and lazy repetitions mean the same.
"""

from __future__ import annotations

from tgi_trio.router.request import Expression

MOST_HELD = 1024  # characters; of a longer match only so many are held back, and dropped


class RegexPattern:
    """Where one expression is in one text; a `stop.Pattern`."""

    __slots__ = ("_expression", "_live", "_seen", "length", "matched", "text")

    def __init__(self, expression: Expression) -> None:
        self.text = expression.text
        self.matched = 0  # characters; the text ends with the beginning of a match of this length
        self.length = 0  # characters of the match that was found
        self._expression = expression
        self._live: list[tuple[int, int]] = []  # where a match may have begun, and its positions
        self._seen = 0  # characters

    def find(self, piece: str) -> int:
        expression, seen = self._expression, self._seen
        first, last = expression.first, expression.last
        for offset, character in enumerate(piece, start=1):
            taking = expression.taking(character)
            live: list[tuple[int, int]] = []
            taken = 0  # positions; whoever came first has them
            for start, positions in self._live:
                positions = expression.after(positions) & taking & ~taken
                if positions:
                    live.append((start, positions))
                    taken |= positions
            if fresh := first & taking & ~taken:
                live.append((seen + offset - 1, fresh))
                taken |= fresh
            self._live = live
            if taken & last:
                start = next(start for start, positions in live if positions & last)
                self.length = min(seen + offset - start, MOST_HELD)
                return offset
        self._seen = seen = seen + len(piece)
        self.matched = min(seen - self._live[0][0], MOST_HELD) if self._live else 0
        return -1

    def ends_with(self, whole: str) -> int:
        return -1  # a special token is no text, which is all that an expression speaks of

    def forget(self) -> None:
        self._live, self.matched = [], 0
