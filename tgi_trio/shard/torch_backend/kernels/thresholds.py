"""Finding thresholds in the scores of a row, without a sort and without memory for it.

A threshold is found by bisecting float32's bit patterns, narrowed each time to those that occur: a
dozen passes over the row or its shortlist, with an exact result however flat the distribution is.
`x` is a score relative to the row's best, after the temperature; masses are summed in float64.
`vocab` is the length of what is read, row or shortlist, and an id is a place in it. What differs
between passes is passed as variables, not constants, so that each function is compiled only once;
compiling these takes long.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-2139095040)  # the key of the lowest finite number


@triton.jit
def key_of(x):
    """Return int32 keys that are ordered like the float32 `x`."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """Return the float32 of a key."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def relative(base, at, vocab, best, heat):
    """Return scores relative to the best, after temperature; -inf beyond the vocabulary."""
    s = tl.load(base + at, mask=at < vocab, other=float("-inf"))
    return tl.where(s > float("-inf"), (s - best) / heat, float("-inf"))


@triton.jit
def kept(x, at, least, last_tie, center, within, floor):
    """Return which tokens survive; of ties at the key `least`, ids up to `last_tie` do."""
    key = key_of(x)
    keep = (key > least) | ((key == least) & (at <= last_tie))
    # -inf minus anything exceeds every bound.
    keep = keep & (tl.abs(-x - center) <= within)
    return keep & (x.to(tl.float64) >= floor)


# fmt: off
@triton.jit
def highest(
    base, vocab, best, heat, least, last_tie, center, within, floor,
    low,  # the result if there is never enough
    high,
    wanted,  # float64
    counts,  # each survivor weighs 1 instead of its mass
    by_distance,  # keys are by the distance of -x from `center`
    beyond,  # exactly `wanted` is not enough
    BLOCK: tl.constexpr,
):
    """Return the highest key below `high` such that survivors at and above it weigh enough.

    By distance, the key is minus the bits of the distance, so farther tokens have lower keys.
    """
    place = tl.arange(0, BLOCK)
    while high - low > 1:
        middle = low + (high - low) // 2
        # Summed by lane, and over lanes only once, since a program waits for its lanes each time.
        mass = tl.zeros([BLOCK], tl.float64)
        above = tl.full([BLOCK], 0, tl.int32) + high  # the nearest keys on either side
        below = tl.full([BLOCK], 0, tl.int32) + low
        for first in range(0, vocab, BLOCK):
            at = first + place
            x = relative(base, at, vocab, best, heat)
            keep = kept(x, at, least, last_tie, center, within, floor)
            distance = tl.abs(-x - center).to(tl.int32, bitcast=True)
            key = tl.where(by_distance, -distance, key_of(x))
            over, under = keep & (key >= middle), keep & (key < middle)
            mass += tl.where(over, tl.where(counts, 1.0, tl.exp(x)), 0.0).to(tl.float64)
            above = tl.where(over, tl.minimum(above, key), above)
            below = tl.where(under, tl.maximum(below, key), below)
        weight = tl.sum(mass, 0)
        if (weight > wanted) | ((weight == wanted) & (beyond == 0)):
            low = tl.maximum(middle, tl.min(above, 0))
        else:
            high = tl.max(below, 0) + 1
    return low


@triton.jit
def tally(
    base, vocab, best, heat, least, last_tie, center, within, floor,
    bound,  # a key
    spreads,  # masses are multiplied by the distance from the best, which gives the entropy
    BLOCK: tl.constexpr,
):
    """Return (mass, mass above `bound`, number at `bound`, best x) of the surviving tokens.

    The fifth result is the number of all tokens at or above `bound`.
    """
    place = tl.arange(0, BLOCK)
    mass, over = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    ties, number = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        key, keep = key_of(x), kept(x, at, least, last_tie, center, within, floor)
        weight = tl.exp(x)
        weight = tl.where(spreads, weight * -tl.maximum(x, -1e30), weight)
        weight = tl.where(keep, weight, 0.0).to(tl.float64)
        mass += weight
        over += tl.where(key > bound, weight, 0.0)
        ties += (keep & (key == bound)).to(tl.int32)
        top = tl.where(keep, tl.maximum(top, x), top)
        number += (key >= bound).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(over, 0), tl.sum(ties, 0), tl.max(top, 0), tl.sum(number, 0)


@triton.jit
def first_beyond(
    base, vocab, best, heat, least, last_tie, center, within, floor,
    key,
    tied,  # only survivors at `key` count, 1 each; otherwise all count by their mass
    target,  # float64
    BLOCK: tl.constexpr,
):
    """Return the first id at which survivors, summed by ascending ids, weigh more than `target`."""
    place = tl.arange(0, BLOCK)
    before = tl.full([], 0.0, tl.float64)
    token, last = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        keep = kept(x, at, least, last_tie, center, within, floor)
        weight = tl.where(tied, (key_of(x) == key).to(tl.float32), tl.exp(x))
        weight = tl.where(keep, weight, 0.0)
        after = before + tl.cumsum(weight.to(tl.float64), 0)
        first = tl.min(tl.where((after > target) & (weight > 0.0), at, vocab), 0)
        token = tl.where((token < 0) & (first < vocab), first, token)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), 0))
        before += tl.sum(weight.to(tl.float64), 0)
    return tl.where(token < 0, last, token)  # if rounding leaves too little mass
# fmt: on
