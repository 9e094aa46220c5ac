"""Thresholds of one row's scores, without a sort and without memory of their own.

A threshold is found by halving the interval of float32's bit patterns, each time down to those that
occur: a dozen passes over the row, or over its shortlist, and the same answer however wide the
distribution is. `x` is a score relative to the
row's best, after the temperature; masses are added in float64. `vocab` is the length of what is
looked at, and an id a place in it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """Return int32 that orders as the float32 `x` do."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def score_of(key):
    """Return the float32 that has a key."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def relative(base, at, vocab, best, heat):
    """Return scores relative to the best, after temperature; -inf beyond the vocabulary."""
    s = tl.load(base + at, mask=at < vocab, other=float("-inf"))
    return tl.where(s > float("-inf"), (s - best) / heat, float("-inf"))


@triton.jit
def kept(x, at, least, last_tie, center, within, floor):
    """Return which tokens survive: `least` is a key, of whose ties ids to `last_tie` stay."""
    key = key_of(x)
    keep = (key > least) | ((key == least) & (at <= last_tie))
    # -inf minus anything stays below every bound.
    keep = keep & (tl.abs(-x - center) <= within)
    return keep & (x.to(tl.float64) >= floor)


@triton.jit
def tally(
    base,
    vocab,
    best,
    heat,
    least,
    last_tie,
    center,
    within,
    floor,
    lowest,
    COUNT_ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return (mass, number) of the tokens that survive and whose key is at least `lowest`.

    `COUNT_ALL`: the number is of all tokens with such a key instead.
    """
    place = tl.arange(0, BLOCK)
    # By lane, and added up once: a program waits for all of its lanes each time.
    mass = tl.zeros([BLOCK], tl.float64)
    number = tl.zeros([BLOCK], tl.int32)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        above = key_of(x) >= lowest
        keep = above & kept(x, at, least, last_tie, center, within, floor)
        mass += tl.where(keep, tl.exp(x), 0.0).to(tl.float64)
        counted = above if COUNT_ALL else keep
        number += counted.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(number, 0)


# fmt: off
@triton.jit
def highest(
    base, vocab, best, heat, least, last_tie, center, within, floor, high, wanted,
    COUNT: tl.constexpr, BEYOND: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return the highest key below `high` at and above which there is enough, `least` if none is.

    Enough: `wanted` tokens of any kind with COUNT, else a mass of survivors that reaches `wanted`,
    or with BEYOND exceeds it.
    """
    place = tl.arange(0, BLOCK)
    low = least
    while high - low > 1:
        middle = low + (high - low) // 2
        mass = tl.zeros([BLOCK], tl.float64)
        number = tl.zeros([BLOCK], tl.int32)
        above = tl.full([BLOCK], 0, tl.int32) + high  # the nearest keys on either side
        below = tl.full([BLOCK], 0, tl.int32) + low
        for first in range(0, vocab, BLOCK):
            at = first + place
            x = relative(base, at, vocab, best, heat)
            key = key_of(x)
            if COUNT:
                number += (key >= middle).to(tl.int32)
                counts = key > least
            else:
                counts = kept(x, at, least, last_tie, center, within, floor)
                mass += tl.where(counts & (key >= middle), tl.exp(x), 0.0).to(tl.float64)
            above = tl.where(counts & (key >= middle), tl.minimum(above, key), above)
            below = tl.where(counts & (key < middle), tl.maximum(below, key), below)
        if COUNT:
            enough = tl.sum(number, 0) >= wanted
        elif BEYOND:
            enough = tl.sum(mass, 0) > wanted
        else:
            enough = tl.sum(mass, 0) >= wanted
        if enough:
            low = tl.maximum(middle, tl.min(above, 0))
        else:
            high = tl.max(below, 0) + 1
    return low


@triton.jit
def among_ties(
    base, vocab, best, heat, least, last_tie, center, within, floor, key, wanted,
    BLOCK: tl.constexpr,
):
    """Return how many survivors of score `key` fit, whole, between those above it and `wanted`.

    As float64: 1.5 is one that fits, and half of another. With it, how many there are.
    """
    above, higher = tally(
        base, vocab, best, heat, least, last_tie, center, within, floor, key + 1, 0, BLOCK
    )
    _, every = tally(
        base, vocab, best, heat, least, last_tie, center, within, floor, key, 0, BLOCK
    )
    weight = tl.exp(score_of(key)).to(tl.float64)
    fit = tl.where(weight > 0.0, (wanted - above) / weight, 1e9)
    return tl.minimum(tl.maximum(fit, 0.0), 1e9), every - higher
# fmt: on


@triton.jit
def nth_at(
    base,
    vocab,
    best,
    heat,
    key,
    wanted,
    least,
    last_tie,
    center,
    within,
    floor,
    BLOCK: tl.constexpr,
):
    """Return the id of the `wanted`-th surviving token (from 0) whose key is `key`."""
    place = tl.arange(0, BLOCK)
    seen = tl.full([], 0, tl.int32)
    token = tl.full([], 0, tl.int32)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        tie = (key_of(x) == key) & kept(x, at, least, last_tie, center, within, floor)
        order = seen + tl.cumsum(tie.to(tl.int32), 0) - 1
        token += tl.sum(tl.where(tie & (order == wanted), at, 0), 0)
        seen += tl.sum(tie.to(tl.int32), 0)
    return token


@triton.jit
def draw_in_order(
    base, vocab, best, heat, target, least, last_tie, center, within, floor, BLOCK: tl.constexpr
):
    """Return the first id with which the surviving mass, by rising ids, exceeds `target`."""
    place = tl.arange(0, BLOCK)
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        keep = kept(x, at, least, last_tie, center, within, floor)
        weight = tl.where(keep, tl.exp(x), 0.0)
        after = before + tl.cumsum(weight.to(tl.float64), 0)
        hit = (after > target) & (weight > 0.0)
        first = tl.min(tl.where(hit, at, vocab), 0)
        token = tl.where((token < 0) & (first < vocab), first, token)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), 0))
        before += tl.sum(weight.to(tl.float64), 0)
    return tl.where(token < 0, last, token)  # rounding has eaten the rest
