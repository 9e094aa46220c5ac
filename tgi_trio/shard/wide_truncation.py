"""The same truncations as `truncation.py`, exactly, for one row whose candidates do not suffice.

Such a row is flat: thousands of tokens may survive. Instead of sorting the vocabulary, its mass is
put into buckets by key, and only the bucket in which the wanted mass is reached gets sorted.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.truncation import Bools, Cuts, Floats

_BUCKETS = 4096


def truncate_row(scores: Floats, cuts: Cuts, row: int) -> Bools:
    """Return which tokens survive row `row` of `cuts`: bool [V].

    `scores` float64 [V], in vocabulary order, relative to the best; what is masked is -inf.
    """
    top_k, min_p = int(cuts.top_k[row]), float(cuts.min_p[row])
    top_p, typical_p = float(cuts.top_p[row]), float(cuts.typical_p[row])
    keep = np.isfinite(scores)
    if top_k:
        keep &= scores >= np.partition(scores, -top_k)[-top_k]
    weights = np.exp(scores) * keep
    if top_p < 1.0:
        keep = _until(-scores, weights, top_p * weights.sum(), ties=False)
        weights *= keep
    if typical_p < 1.0:
        surprisals = np.log(weights.sum()) - np.where(keep, scores, 0.0)
        probabilities = weights / weights.sum()
        distances = np.abs(surprisals - (probabilities * surprisals).sum())
        keep = _until(distances, probabilities, typical_p, ties=True)
    if min_p > 0.0:
        keep &= scores >= scores[keep].max() + np.log(min_p)
    return keep


def _until(keys: Floats, weights: Floats, mass: float, *, ties: bool) -> Bools:
    """Return the entries with the smallest keys whose weights together reach `mass`: bool [V].

    Entries of weight 0 never belong to them. The one that reaches `mass` does, and so do, with
    `ties`, all with the same key; without, lower indices come first.
    """
    chosen = np.zeros(len(keys), np.bool_)
    places = np.flatnonzero(weights)
    keys, weights = keys[places], weights[places]
    low, high = keys.min(), keys.max()
    scale = (_BUCKETS - 1) / (high - low) if high > low else 0.0
    buckets = ((keys - low) * scale).astype(np.int64)
    filled = np.cumsum(np.bincount(buckets, weights, _BUCKETS))
    # Where rounding keeps the sum of everything below `mass`, everything stays.
    crossing = min(int(np.searchsorted(filled, mass)), int(buckets.max()))
    before = filled[crossing - 1] if crossing else 0.0
    inside = np.flatnonzero(buckets == crossing)
    inside = inside[np.argsort(keys[inside], kind="stable")]
    reached = before + np.cumsum(weights[inside])
    last = min(int((reached < mass).sum()), len(inside) - 1)
    kept = buckets < crossing
    kept[inside[: last + 1]] = True
    if ties:
        kept |= keys == keys[inside[last]]
    chosen[places] = kept
    return chosen
