"""The same truncations as `truncation.py`, exactly, for one row whose candidates do not suffice.

Such a row is flat: thousands of tokens may survive. Its scores are sorted, without their ids: a
sort of plain float32 numbers is one pass of vector instructions, ten times cheaper than finding out
which token is where. What survives is then a matter of comparing with a threshold.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.sampling.truncation import Bools, Cuts, Floats

Scores = NDArray[np.float32]


def truncate_row(scores: Scores, cuts: Cuts, row: int) -> Bools:
    """Return which tokens survive row `row` of `cuts`: bool [V].

    `scores` float32 [V], in vocabulary order, relative to the best; what is masked is -inf.
    """
    top_k, min_p = int(cuts.top_k[row]), float(cuts.min_p[row])
    top_p, typical_p = float(cuts.top_p[row]), float(cuts.typical_p[row])
    costs = np.sort(-scores)  # best first
    costs = costs[: np.searchsorted(costs, np.inf)]
    if top_k:
        last = costs[min(top_k, len(costs)) - 1]
        costs = costs[: np.searchsorted(costs, last, side="right")]
    if top_p < 1.0:
        mass = np.exp(-costs, dtype=np.float64).cumsum()
        costs = costs[: 1 + _count_to_reach(mass, top_p * mass[-1])]
    keep: Bools = scores >= -costs[-1]
    surplus = np.count_nonzero(keep) - len(costs)
    if surplus:  # top-p keeps some of those that tie with its last one: the lower ids
        keep[np.flatnonzero(scores == -costs[-1])[-surplus:]] = False
    if typical_p < 1.0:
        best, worst = _typical(costs.astype(np.float64), typical_p)
        keep &= (scores <= -best) & (scores >= -worst)
    if min_p > 0.0:
        keep &= scores >= np.float64(scores[keep].max()) + np.log(min_p)
    return keep


def _typical(costs: Floats, mass: float) -> tuple[float, float]:
    """Return the least and the greatest cost among the tokens that together reach `mass`.

    `costs` of what is left, rising. The tokens are taken from the mean cost outwards: that is the
    entropy, but for a constant. They lie next to each other, so that a difference of two cumulative
    sums is the mass within any distance. Ties at the greatest distance are kept.
    """
    weights = np.exp(-costs)
    cumulative = np.concatenate(([0.0], weights.cumsum()))
    center = (weights * costs).sum() / cumulative[-1]
    wanted = min(mass, 1.0) * cumulative[-1]

    def within(distance: float) -> tuple[int, int]:
        first = np.searchsorted(costs, center - distance)
        return int(first), int(np.searchsorted(costs, center + distance, side="right"))

    near, far = 0.0, float(max(center - costs[0], costs[-1] - center))
    while near < (middle := (near + far) / 2) < far:
        first, end = within(middle)
        near, far = (
            (near, middle) if cumulative[end] - cumulative[first] >= wanted else (middle, far)
        )
    first, end = within(far)
    return float(costs[first]), float(costs[end - 1])


def _count_to_reach(mass: Floats, wanted: float) -> int:
    """Return the first place where cumulative `mass` is `top_counts`, the last where it never
    is."""
    return min(int(np.searchsorted(mass, wanted)), len(mass) - 1)
