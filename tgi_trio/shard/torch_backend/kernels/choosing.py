"""Choosing a token per row on the device: truncation, then the best or a draw.

One program has one row. Scores are taken relative to the best and divided by the temperature, as
the host's sampler does. How thresholds are found is in `thresholds.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.thresholds import (
    among_ties,
    draw_in_order,
    highest,
    kept,
    key_of,
    nth_at,
    relative,
    tally,
)

# What comes out beside a token: why there is none.
FINE = 0
NOTHING_LEFT = 1  # every score is -inf
IS_NAN = 2
IS_INFINITE = 3

_LOWEST = tl.constexpr(-2139095040)  # the key of the lowest finite number
_ABOVE_BEST = tl.constexpr(1)  # a key; the best's is 0


@triton.jit
def _look_over(base, vocab, BLOCK: tl.constexpr):
    """Return (best score, the first token that has it, why nothing can be chosen).

    Lanes keep what they have seen, and meet once: a program waits for all of them each time.
    """
    place = tl.arange(0, BLOCK)
    bests = tl.full([BLOCK], float("-inf"), tl.float32)
    firsts = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for low in range(0, vocab, BLOCK):
        s = tl.load(base + low + place, mask=low + place < vocab, other=float("-inf"))
        broken = broken | (s != s).to(tl.int32)
        firsts = tl.where(s > bests, low + place, firsts)
        bests = tl.where(s > bests, s, bests)
    best = tl.max(bests, 0)
    first = tl.min(tl.where(bests == best, firsts, vocab), 0)
    fault = tl.where(best == float("inf"), 3, tl.where(best == float("-inf"), 1, 0))
    return best, first, tl.where(tl.max(broken, 0) > 0, 2, fault)


# fmt: off
@triton.jit
def _cut_typical(base, vocab, best, heat, least, last_tie, typical, total, BLOCK: tl.constexpr):
    """Return (center, distance from it, tokens of such keys): what of -x survives typical-p."""
    place = tl.arange(0, BLOCK)
    center, none = tl.full([], 0.0, tl.float32), tl.full([], float("-inf"), tl.float64)
    within = tl.full([], float("inf"), tl.float32)
    mean = tl.full([], 0.0, tl.float64)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        keep = kept(x, at, least, last_tie, center, within, none)
        terms = tl.where(keep, tl.exp(x) * -tl.maximum(x, -1e30), 0.0)
        mean += tl.sum(terms, 0).to(tl.float64)
    center = (mean / total).to(tl.float32)  # of -x: the entropy, but for log(total)
    near, far = tl.full([], -1, tl.int32), tl.full([], 0x7F800000, tl.int32)
    while far - near > 1:
        middle = near + (far - near) // 2
        bound = middle.to(tl.float32, bitcast=True)
        mass, _ = tally(
            base, vocab, best, heat, least, last_tie, center, bound, none, least, 0, BLOCK
        )
        enough = mass >= typical * total
        near, far = tl.where(enough, near, middle), tl.where(enough, middle, far)
    return center, far.to(tl.float32, bitcast=True)


@triton.jit
def _best_left(base, vocab, best, heat, least, last_tie, center, within, BLOCK: tl.constexpr):
    """Return the best of what survives."""
    place = tl.arange(0, BLOCK)
    none = tl.full([], float("-inf"), tl.float64)
    top = tl.full([], float("-inf"), tl.float32)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        keep = kept(x, at, least, last_tie, center, within, none)
        top = tl.maximum(top, tl.max(tl.where(keep, x, float("-inf")), 0))
    return top


@triton.jit
def _take(
    base, vocab, best, heat, least, last_tie, center, within, floor, top, target, draws, falling,
    BLOCK: tl.constexpr,
):
    """Return the best token or, where `draws`, that at which the mass exceeds `target`.

    The mass is added by falling scores where `falling`, else by rising ids.
    """
    key, nth = key_of(top), tl.full([], 0, tl.int32)
    if (draws != 0) & (falling != 0):
        key = highest(
            base, vocab, best, heat, least, last_tie, center, within, floor, key + 1, target,
            0, 1, BLOCK,
        )
        fit, every = among_ties(
            base, vocab, best, heat, least, last_tie, center, within, floor, key, target, BLOCK
        )
        nth = tl.minimum(fit.to(tl.int32), every - 1)
    token = tl.full([], 0, tl.int32)
    if (draws != 0) & (falling == 0):
        token = draw_in_order(
            base, vocab, best, heat, target, least, last_tie, center, within, floor, BLOCK
        )
    else:
        token = nth_at(
            base, vocab, best, heat, key, nth, least, last_tie, center, within, floor, BLOCK
        )
    return token


@triton.jit
def _survive(
    base, vocab, best, heat, least, last_tie, center, within, floor, mass, BLOCK: tl.constexpr
):
    """Replace the scores by the log-probabilities of what survives, -inf for the rest."""
    place = tl.arange(0, BLOCK)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        keep = kept(x, at, least, last_tie, center, within, floor)
        logprobs = (x.to(tl.float64) - mass).to(tl.float32)
        tl.store(base + at, tl.where(keep, logprobs, float("-inf")), mask=at < vocab)


# Sizes are not specialised: a new one must not make Triton compile another variant.
@triton.jit(do_not_specialize=["stride", "vocab"])
def choose_tokens(
    found,  # float64 [R, 3]: token, log-probability, why there is none
    chosen,  # int64: the token again, at `targets`
    targets,  # int64 [R]; -1: nothing is to be chosen, and `found` stays as it is
    scores,  # float32 [R, stride]; where `lists`, they become log-probabilities of what survives
    temperatures,  # float32 [R]
    samples,  # int32 [R]: 0 takes the best
    uniforms,  # float64 [R] in [0, 1)
    top_k,  # int32 [R], 0: all
    top_p,  # float64 [R], 1: all
    typical_p,  # float64 [R], 1: all
    floors,  # float64 [R]: log of min-p, -inf: none
    lists,  # int32 [R]: how many of the best are wanted besides; see `listing.py`
    stride,
    vocab,
    FEW: tl.constexpr,  # up to so many tokens a truncated row is drawn from by falling scores
    BLOCK: tl.constexpr,
):
    """Choose one token per row: top-k, top-p, typical-p, min-p, then the best or a draw.

    Longer than other functions are: with top-p in one of its own, the assembler spills 100 bytes a
    thread, and what is left has no parts of its own.
    """
    row = tl.program_id(0)
    target = tl.load(targets + row)
    if target < 0:
        return
    base = scores + row.to(tl.int64) * stride
    best, first, fault = _look_over(base, vocab, BLOCK)
    token, logprob = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
    if fault == 0:
        heat = tl.load(temperatures + row)
        k, p, typical = tl.load(top_k + row), tl.load(top_p + row), tl.load(typical_p + row)
        least, last_tie = tl.full([], 0, tl.int32) + _LOWEST, vocab  # every finite score survives
        above = tl.full([], 0, tl.int32) + _ABOVE_BEST
        center, none = tl.full([], 0.0, tl.float32), tl.full([], float("-inf"), tl.float64)
        within = tl.full([], float("inf"), tl.float32)
        if k > 0:
            least = highest(
                base, vocab, best, heat, least, last_tie, center, within, none, above, k,
                1, 0, BLOCK,
            )
        cut = (k > 0) | (p < 1.0) | (typical < 1.0)
        total, few = tl.full([], 0.0, tl.float64), k < 0
        if cut:  # each pass over a row takes as long as a layer's smaller kernels
            total, number = tally(
                base, vocab, best, heat, least, last_tie, center, within, none, least, 1, BLOCK
            )
            few = (k > 0) & (number < FEW)
        if p < 1.0:
            wanted = p * total
            low = highest(
                base, vocab, best, heat, least, last_tie, center, within, none, above, wanted,
                0, 0, BLOCK,
            )
            _, number = tally(
                base, vocab, best, heat, least, last_tie, center, within, none, low, 1, BLOCK
            )
            if k == 0:
                few = number < FEW
            fit, every = among_ties(
                base, vocab, best, heat, least, last_tie, center, within, none, low, wanted, BLOCK
            )
            nth = tl.minimum(tl.maximum(tl.ceil(fit), 1.0).to(tl.int32), every) - 1
            last_tie = nth_at(
                base, vocab, best, heat, low, nth, least, last_tie, center, within, none, BLOCK
            )
            least = low
            total, _ = tally(
                base, vocab, best, heat, least, last_tie, center, within, none, least, 0, BLOCK
            )
        if typical < 1.0:
            center, within = _cut_typical(
                base, vocab, best, heat, least, last_tie, typical, total, BLOCK
            )
            if (k == 0) & (p >= 1.0):
                lowest = key_of(-(center + within))
                _, number = tally(
                    base, vocab, best, heat, least, last_tie, center, within, none, lowest,
                    1, BLOCK,
                )
                few = number < FEW
        top = tl.full([], 0.0, tl.float32)  # the best, unless typical-p takes it
        if typical < 1.0:
            top = _best_left(base, vocab, best, heat, least, last_tie, center, within, BLOCK)
        floor = top.to(tl.float64) + tl.load(floors + row)
        total, _ = tally(
            base, vocab, best, heat, least, last_tie, center, within, floor, least, 0, BLOCK
        )
        token, draws = first, tl.load(samples + row)
        if (draws != 0) | (typical < 1.0):
            token = _take(
                base, vocab, best, heat, least, last_tie, center, within, floor, top,
                tl.load(uniforms + row) * total, draws,
                (cut & (few | (vocab <= FEW))).to(tl.int32), BLOCK,
            )
        mass = tl.log(total)
        logprob = ((tl.load(base + token) - best) / heat).to(tl.float64) - mass
        if tl.load(lists + row) > 0:
            _survive(
                base, vocab, best, heat, least, last_tie, center, within, floor, mass, BLOCK
            )
    tl.store(found + row * 3, token.to(tl.float64))
    tl.store(found + row * 3 + 1, logprob)
    tl.store(found + row * 3 + 2, fault.to(tl.float64))
    tl.store(chosen + target, token.to(tl.int64))
# fmt: on
