"""Choosing the next token of a text between two others, as llama.cpp's sampler `infill` does.

What an editor shows while its user types is read at a glance, so a doubtful token is worse than
none: the text ends as soon as an end is at all likely, or no token is likely enough. Candidates
that begin with one another (`pri`, `print`) would lead to much the same text, so they count
together. Rules and numbers are those of llama.cpp's `llama_sampler_init_infill`; probabilities are
float64 here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np

from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.sampling.truncation import Bools, Floats, Ints

_END_WEIGHT = 3.0  # times the number of candidates: what a probability to end counts
_LEAST = 0.2  # probability of a token that is not an end


@dataclass(frozen=True, slots=True)
class Gaps:
    """What choosing in a gap needs of the model."""

    ends: frozenset[int]  # tokens that end any text
    # ids int64 [C] -> the bytes of each token's text; b"" for a special one.
    pieces: Callable[[Ints], list[bytes]]

    def choose(
        self, sequence: ShardSequence, scores: Floats, ids: Ints, number: float
    ) -> tuple[int, float]:
        """Return the next token and its log-probability among what is left.

        `scores`, `ids` [C]: of the candidates after other truncations, best first; `number`: the
        sequence's random number. Where nothing is left, that is a token that ends the text.
        """
        ends = np.isin(ids, [*self.ends, *sequence.sampling.ends, *sequence.sampling.gap_ends])
        left = keep_for_gap(scores, ends, self.pieces(ids))
        if not left.any():
            return int(ids[ends][0] if ends.any() else sequence.sampling.gap_ends[0]), 0.0
        mass = np.cumsum(np.exp(scores) * left)
        place = int(left.argmax())
        if sequence.sampling.sample:
            target = min(number * mass[-1], np.nextafter(mass[-1], 0.0))
            place = int((mass > target).argmax())
        return int(ids[place]), float(scores[place] - np.log(mass[-1]))


def keep_for_gap(scores: Floats, ends: Bools, pieces: ListLike[bytes]) -> Bools:
    """Return which candidates are left, bool [C]; none: the text ends.

    `scores` [C]: best first, of any sum; `ends` [C]: those that end the text; `pieces` [C]: their
    texts.
    """
    odds = np.exp(scores - scores.max())
    odds /= odds.sum()
    ending, going = odds[ends].sum(), odds[~ends].sum()
    if _END_WEIGHT * ending * len(scores) > going:
        return ends
    odds = _join_beginnings(odds, pieces)
    left = ends | (odds >= _LEAST)
    texts = int((left & ~ends).sum())
    if not texts:
        return np.zeros(len(scores), np.bool_)
    odds /= odds[left].sum()
    left &= ends | (odds >= 1 / (texts + 1))
    # What has been joined to another token is gone, an end as well.
    return left & (odds > 0)


def _join_beginnings(odds: Floats, pieces: ListLike[bytes]) -> Floats:
    """Return probabilities in which a token's is added to one that it begins, or is begun by.

    The likelier of two gets both.
    """
    odds = odds.copy()
    gone = [False] * len(odds)
    beginning = _find_beginning(pieces)
    for one, piece in enumerate(pieces):
        for other in beginning[piece] if piece else ():
            if gone[one]:
                break
            if one == other or gone[other]:
                continue
            to, source = (other, one) if odds[other] > odds[one] else (one, other)
            odds[to] += odds[source]
            odds[source], gone[source] = 0.0, True
    return odds


def _find_beginning(pieces: ListLike[bytes]) -> dict[bytes, list[int]]:
    """Return the places of the pieces that begin with each of them, itself included, rising.

    By way of the lengths that there are: comparing all pairs of 512 takes tens of milliseconds.
    """
    beginning: dict[bytes, list[int]] = {piece: [] for piece in pieces}
    lengths = sorted({len(piece) for piece in pieces} - {0})
    for place, piece in enumerate(pieces):
        for length in lengths:
            if length > len(piece):
                break
            if (first := piece[:length]) in beginning:
                beginning[first].append(place)
    return beginning
