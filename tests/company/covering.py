"""Tables in which any two levels of two factors meet, and what has met in those that were run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

Factors = Mapping[str, Sequence[str]]  # the levels of each
Row = Mapping[str, str]  # the level that it has of each factor
Level = tuple[str, str]  # a factor and its level
Pair = tuple[Level, Level]  # in the order of the factors' names, where both are of one row

_TRIES = 6  # rows among which the one with the most new pairs is taken


def pairs_of(row: Row) -> Iterator[Pair]:
    """Yield the pairs that meet in a row."""
    yield from combinations(sorted(row.items()), 2)


def all_pairs(factors: Factors) -> set[Pair]:
    """Return all that can meet."""
    every = set[Pair]()
    for one, other in combinations(sorted(factors), 2):
        for mine, theirs in product(factors[one], factors[other]):
            every.add(((one, mine), (other, theirs)))
    return every


def cover(factors: Factors, seed: int) -> list[dict[str, str]]:
    """Return rows in which all pairs meet, different ones for each seed."""
    draw, left, rows = random.Random(seed), all_pairs(factors), list[dict[str, str]]()
    while left:
        kept = draw.choice(sorted(left))
        best = max(
            (_complete(factors, kept, left, draw) for _ in range(_TRIES)),
            key=lambda row: sum(pair in left for pair in pairs_of(row)),
        )
        left.difference_update(pairs_of(best))
        rows.append(best)
    return rows


def _complete(factors: Factors, kept: Pair, left: set[Pair], draw: random.Random) -> dict[str, str]:
    """Return a row with a pair that has not met, and levels that meet others for the first time."""
    row = dict(kept)
    names = [name for name in factors if name not in row]
    draw.shuffle(names)
    for name in names:
        levels = list(factors[name])
        draw.shuffle(levels)
        row[name] = max(levels, key=lambda level: _news(row, (name, level), left))
    return row


def _news(row: Row, level: Level, left: set[Pair]) -> int:
    return sum(_sorted(level, other) in left for other in row.items())


def _sorted(one: Level, other: Level) -> Pair:
    return (one, other) if one <= other else (other, one)


class Coverage:
    """What has met: in one request, of two neighbours, and of a request and its circumstances."""

    def __init__(self, asked: Factors, around: Factors) -> None:
        """`asked`: what requests ask for; `around`: what is so for a whole company."""
        own = _levels(asked)
        self._left: dict[str, set[Pair]] = {
            "in one request": all_pairs(asked),
            "of two neighbours": {_sorted(mine, theirs) for mine in own for theirs in own},
            "of a request and what is around": set(product(own, _levels(around))),
            "around": all_pairs(around),
        }
        self._all = {name: len(each) for name, each in self._left.items()}

    def note(self, around: Row, requests: Iterable[Row]) -> None:
        """Take in a company that has been served."""
        rows = list(requests)
        for row in rows:
            self._left["in one request"].difference_update(pairs_of(row))
            met = product(row.items(), around.items())
            self._left["of a request and what is around"].difference_update(met)
        for one, other in combinations(rows, 2):
            beside = (_sorted(*pair) for pair in product(one.items(), other.items()))
            self._left["of two neighbours"].difference_update(beside)
        self._left["around"].difference_update(pairs_of(around))

    @property
    def left(self) -> dict[str, set[Pair]]:
        """The pairs that have not met, by kind."""
        return {name: set(each) for name, each in self._left.items()}

    def lines(self) -> list[str]:
        """Return a line for each kind: how many pairs have met, and those that have not."""
        found = []
        for name, left in self._left.items():
            some = [" with ".join(": ".join(level) for level in pair) for pair in sorted(left)[:3]]
            rest = f", not {'; '.join(some)}{', ...' if len(left) > 3 else ''}" if left else ""
            found.append(f"{name}: {self._all[name] - len(left)} of {self._all[name]} pairs{rest}")
        return found


def _levels(factors: Factors) -> list[Level]:
    return [(name, level) for name, levels in factors.items() for level in levels]
