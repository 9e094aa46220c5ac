"""Top-k, top-p, typical-p and min-p over each row's best candidates, and the choice among them.

Sorting a whole vocabulary takes milliseconds per row, and nearly always a few hundred of the best
tokens suffice. So a row is represented by its best C tokens in order, and by the mass of the whole
row. If these do not suffice (`settled` is False), the caller tries again with more, and finally
with `wide_truncation`. All sums are in float64, from the best token on, row by row, so a row's
outcome depends neither on C nor on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.messages import SamplingParameters

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Cuts:
    """The truncations of R rows; each array is [R], "off" values as in SamplingParameters."""

    top_k: Ints
    top_p: Floats
    typical_p: Floats
    min_p: Floats

    @classmethod
    def of(cls, rows: ListLike[SamplingParameters], vocab_size: int) -> Cuts:
        """Collect the rows' parameters; a top_k of the whole vocabulary is off."""
        return cls(
            top_k=np.array([s.top_k if s.top_k < vocab_size else 0 for s in rows], np.int64),
            top_p=np.array([s.top_p for s in rows], np.float64),
            typical_p=np.array([s.typical_p for s in rows], np.float64),
            min_p=np.array([s.min_p for s in rows], np.float64),
        )

    def __getitem__(self, rows: Ints) -> Cuts:
        return Cuts(self.top_k[rows], self.top_p[rows], self.typical_p[rows], self.min_p[rows])


@dataclass
class Kept:
    """The remaining candidates of R rows of C."""

    keep: Bools  # [R, C]
    mass: Floats  # [R, C] cumulative exp(score) of the kept candidates
    settled: Bools  # [R] False: candidates beyond C might be kept as well

    @property
    def total(self) -> Floats:
        """Mass of everything kept: float64 [R]."""
        return self.mass[:, -1]

    def first(self) -> Ints:
        """Return the place of each row's best kept candidate: int64 [R]."""
        places: Ints = self.keep.argmax(axis=1)
        return places

    def draw(self, uniforms: Floats) -> Ints:
        """Return the place that each row's uniform number in [0, 1) selects: int64 [R]."""
        # Rounding must not carry a target up to the total: no place would be above it.
        targets = np.minimum(uniforms * self.total, np.nextafter(self.total, 0.0))
        places: Ints = (self.mass > targets[:, None]).argmax(axis=1)
        return places


def truncate(scores: Floats, totals: Floats, entropies: Floats, cuts: Cuts, *, whole: bool) -> Kept:
    """Apply `cuts` in the order top-k, top-p, typical-p, min-p; a row has one of the first three.

    `scores` [R, C]: each row's best scores, best first, relative to its best. `totals` [R]:
    sum of exp(score) over the whole row, and `entropies` [R]: its entropy in nats; both are only
    read for rows without top-k, entropies only for rows with typical-p. `whole`: the candidates
    are the whole vocabulary. Ties at a threshold of top-k and typical-p are kept.
    """
    rows = np.arange(len(scores))
    weights = np.exp(scores)
    worst = scores[:, -1]
    keep = np.isfinite(scores)
    settled = np.full(len(scores), whole)
    undecided = np.zeros(len(scores), np.bool_)  # rows that no later cut can settle either

    limited = cuts.top_k > 0
    if limited.any():
        reach = np.clip(cuts.top_k, 1, scores.shape[1]) - 1
        least = np.where(limited, scores[rows, reach], -np.inf)
        keep &= scores >= least[:, None]
        # The next candidate may tie with the k-th, unless the last one here is below it.
        enough = (cuts.top_k <= scores.shape[1]) & (least > worst)
        settled |= limited & enough
        undecided = limited & ~settled
        totals = np.where(limited, _mass(weights, keep)[:, -1], totals)

    nucleus = cuts.top_p < 1.0
    if nucleus.any():
        kept = weights * keep
        mass = np.cumsum(kept, axis=1)
        # A token is dropped if those before it have the mass already; the best one always stays.
        beyond = mass - kept >= (cuts.top_p * totals)[:, None]
        beyond[:, 0] = False
        keep &= ~(beyond & nucleus[:, None])
        settled |= nucleus & (_least(scores, keep) > worst)
        totals = np.where(nucleus, _mass(weights, keep)[:, -1], totals)

    typical = cuts.typical_p < 1.0
    if typical.any():
        cut = limited | nucleus
        near, enough = _typical(
            scores - np.log(totals)[:, None], keep, np.where(cut, np.nan, entropies), cuts.typical_p
        )
        keep &= near | ~typical[:, None]
        settled |= typical & ~cut & enough
        totals = np.where(typical, _mass(weights, keep)[:, -1], totals)

    floored = cuts.min_p > 0.0
    if floored.any():
        best = scores[rows, keep.argmax(axis=1)]
        with np.errstate(divide="ignore"):
            least = np.where(floored, best + np.log(cuts.min_p), -np.inf)
        keep &= scores >= least[:, None]

    return Kept(keep, _mass(weights, keep), settled & ~undecided)


def could_settle(scores: Floats, totals: Floats, cuts: Cuts, width: int) -> Bools:
    """Return for which rows `width` candidates might suffice, by the fewer in `scores`: bool [R].

    They do not if they cannot reach the required mass, with each unknown one counted like the last
    known one. Arguments as for `truncate`.
    """
    weights = np.exp(scores)
    most = weights.sum(axis=1) + (width - scores.shape[1]) * weights[:, -1]
    share = np.where(cuts.top_p < 1.0, cuts.top_p, cuts.typical_p)
    reached = most * (1.0 + 1e-6) >= share * totals  # totals are sums in another order
    return np.where(cuts.top_k > 0, cuts.top_k <= width, reached)


def _typical(
    logprobs: Floats, keep: Bools, entropies: Floats, masses: Floats
) -> tuple[Bools, Bools]:
    """Return which candidates are typical [R, C], and whether none beyond them can be [R].

    `entropies` is NaN where the kept candidates are the whole distribution.
    """
    rows = np.arange(len(logprobs))
    surprisals = np.where(keep, -logprobs, np.inf)
    probabilities = np.where(keep, np.exp(logprobs), 0.0)
    own = np.cumsum(probabilities * np.where(keep, surprisals, 0.0), axis=1)[:, -1]
    center = np.where(np.isnan(entropies), own, entropies)[:, None]
    distances = np.abs(surprisals - center)
    order = np.argsort(distances, axis=1, kind="stable")
    mass = np.cumsum(np.take_along_axis(probabilities, order, axis=1), axis=1)
    last = np.minimum((mass < masses[:, None]).sum(axis=1), keep.sum(axis=1) - 1)
    limits = distances[rows, order[rows, last]]
    enough = (mass[:, -1] >= masses) & (limits < surprisals[:, -1] - center[:, 0])
    return distances <= limits[:, None], enough


def _mass(weights: Floats, keep: Bools) -> Floats:
    # A cumulative sum runs strictly from the left, unlike numpy's pairwise sum, so its last entry
    # does not depend on how many dropped candidates follow.
    return np.cumsum(weights * keep, axis=1)


def _least(scores: Floats, keep: Bools) -> Floats:
    """Return each row's lowest kept score: float64 [R]."""
    least: Floats = np.where(keep, scores, np.inf).min(axis=1)
    return least
