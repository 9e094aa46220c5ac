"""Choosing a token per row on the device: penalties, truncation and the draw, without the host.

One program has one row. A threshold (of top-k, top-p, typical-p, of the draw itself) is found by
halving the interval of float32's bit patterns, 32 passes over the row's scores: no sort, no memory
of its own, and the same answer however wide the distribution is. Scores are taken relative to the
best and divided by the temperature, as the host's sampler does; masses are added in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What comes out beside a token: why there is none.
FINE = 0
NOTHING_LEFT = 1  # every score is -inf
IS_NAN = 2
IS_INFINITE = 3

_LOWEST = tl.constexpr(-2139095040)  # the key of the lowest finite number


@triton.jit
def _edit(scores, at, there, kind: tl.constexpr, values, frequency, presence, unit):
    """Replace the scores at `at` as one of the three lists says."""
    old = tl.load(scores + at, mask=there, other=0.0)
    if kind == 0:  # repetition: `values` is the penalty
        new = tl.where(old < 0, old * values, old / values)
    elif kind == 1:  # frequency and presence: `values` is the count
        new = old - (frequency * (values / unit) + presence).to(tl.float32)
    else:
        new = old + values
    tl.store(scores + at, new, mask=there)


# Sizes are not specialised: a new one must not make Triton compile another variant.
@triton.jit(do_not_specialize=["rows", "stride"])
def edit_scores(
    scores,  # float32 [R, stride]
    starts,  # int32 [3, R + 1]: where a row's entries begin, in each of the three lists
    entries,  # int32 [N, 2]: id and float32 bits of penalty, count or bias; an id once per list
    frequency,  # float64 [R]
    presence,  # float64 [R]
    unit,  # float64 [R] what counts are divided by
    repetition,  # float32 [R], 1: none
    inputs,  # int32 [R]: which row of `chosen` is the row's last token, -1: the lists have it
    chosen,  # int64: tokens of the step before
    early,  # int32 [R]: EOS may not follow yet
    eos,  # int32 [EOS]
    rows,
    stride,
    EOS: tl.constexpr,  # how many
    PADDED_EOS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply penalties, biases and the ban on EOS to a row's scores, in TGI's order."""
    row = tl.program_id(0)
    base = scores + row.to(tl.int64) * stride
    place = tl.arange(0, BLOCK)
    one = tl.arange(0, 1)
    heat, flat = tl.load(frequency + row), tl.load(presence + row)
    length = tl.load(unit + row)
    penalty = tl.load(repetition + row)
    before = tl.load(inputs + row)
    last = tl.where(before >= 0, tl.load(chosen + tl.maximum(before, 0)), -1).to(tl.int32)
    for kind in tl.static_range(3):
        begin = tl.load(starts + kind * (rows + 1) + row)
        end = tl.load(starts + kind * (rows + 1) + row + 1)
        found = tl.full([], 0, tl.int32)
        for low in range(begin, end, BLOCK):
            there = low + place < end
            which = entries + 2 * (low + place)
            at = tl.load(which, mask=there, other=0)
            value = tl.load(which + 1, mask=there, other=0x3F800000).to(tl.float32, bitcast=True)
            again = there & (at == last)
            found += tl.sum(again.to(tl.int32), 0)
            if kind == 1:
                value += again.to(tl.float32)
            _edit(base, at, there, kind, value, heat, flat, length)
        # The token that the host does not know yet counts as well.
        wanted = (last >= 0) & (found == 0)
        if kind == 0:
            wanted = wanted & (penalty != 1.0)
        if kind == 1:
            wanted = wanted & ((heat != 0.0) | (flat != 0.0))
        tl.debug_barrier()  # an entry of one list may be another's
        if kind < 2:
            more = one < wanted.to(tl.int32)
            single = one.to(tl.float32) + (penalty if kind == 0 else 1.0)
            _edit(base, one + tl.maximum(last, 0), more, kind, single, heat, flat, length)
            tl.debug_barrier()
    if tl.load(early + row) != 0:
        which = tl.arange(0, PADDED_EOS)
        at = tl.load(eos + which, mask=which < EOS, other=0)
        tl.store(base + at, float("-inf"), mask=which < EOS)


@triton.jit
def _key(x):
    """Return int32 that orders as the float32 `x` do."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _relative(base, at, vocab, best, heat):
    """Return scores relative to the best, after temperature; -inf beyond the vocabulary."""
    s = tl.load(base + at, mask=at < vocab, other=float("-inf"))
    return tl.where(s > float("-inf"), (s - best) / heat, float("-inf"))


@triton.jit
def _kept(x, at, least, last_tie, center, within, floor):
    """Return which tokens survive: `least` is a key, of whose ties ids to `last_tie` stay."""
    key = _key(x)
    keep = (key > least) | ((key == least) & (at <= last_tie))
    # -inf minus anything stays below every bound.
    keep = keep & (tl.abs(-x - center) <= within)
    return keep & (x.to(tl.float64) >= floor)


@triton.jit
def _tally(
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
    mass = tl.full([], 0.0, tl.float64)
    number = tl.full([], 0, tl.int32)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = _relative(base, at, vocab, best, heat)
        above = _key(x) >= lowest
        keep = above & _kept(x, at, least, last_tie, center, within, floor)
        mass += tl.sum(tl.where(keep, tl.exp(x), 0.0), 0).to(tl.float64)
        counted = above if COUNT_ALL else keep
        number += tl.sum(counted.to(tl.int32), 0)
    return mass, number


# fmt: off
@triton.jit
def _highest(
    base, vocab, best, heat, least, last_tie, center, within, floor, high, wanted,
    COUNT: tl.constexpr, BEYOND: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return the highest key below `high` at and above which there is enough, `least` if none is.

    Enough: `wanted` tokens of any kind with COUNT, else a mass of survivors that reaches `wanted`,
    or with BEYOND exceeds it.
    """
    low = least
    while high - low > 1:
        middle = low + (high - low) // 2
        mass, number = _tally(
            base, vocab, best, heat, least, last_tie, center, within, floor, middle, COUNT, BLOCK
        )
        if COUNT:
            enough = number >= wanted
        elif BEYOND:
            enough = mass > wanted
        else:
            enough = mass >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _among_ties(
    base, vocab, best, heat, least, last_tie, center, within, floor, key, wanted,
    BLOCK: tl.constexpr,
):
    """Return how many survivors of score `key` fit, whole, between those above it and `wanted`.

    As float64: 1.5 is one that fits, and half of another. With it, how many there are.
    """
    above, higher = _tally(
        base, vocab, best, heat, least, last_tie, center, within, floor, key + 1, 0, BLOCK
    )
    _, every = _tally(
        base, vocab, best, heat, least, last_tie, center, within, floor, key, 0, BLOCK
    )
    bits = tl.where(key >= 0, key, key ^ 0x7FFFFFFF)
    weight = tl.exp(bits.to(tl.float32, bitcast=True)).to(tl.float64)
    fit = tl.where(weight > 0.0, (wanted - above) / weight, 1e9)
    return tl.minimum(tl.maximum(fit, 0.0), 1e9), every - higher
# fmt: on


@triton.jit
def _nth_at(
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
        x = _relative(base, at, vocab, best, heat)
        tie = (_key(x) == key) & _kept(x, at, least, last_tie, center, within, floor)
        order = seen + tl.cumsum(tie.to(tl.int32), 0) - 1
        token += tl.sum(tl.where(tie & (order == wanted), at, 0), 0)
        seen += tl.sum(tie.to(tl.int32), 0)
    return token


@triton.jit
def _draw_in_order(
    base, vocab, best, heat, target, least, last_tie, center, within, floor, BLOCK: tl.constexpr
):
    """Return the first id with which the surviving mass, by rising ids, exceeds `target`."""
    place = tl.arange(0, BLOCK)
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], -1, tl.int32)
    last = tl.full([], 0, tl.int32)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = _relative(base, at, vocab, best, heat)
        keep = _kept(x, at, least, last_tie, center, within, floor)
        weight = tl.where(keep, tl.exp(x), 0.0)
        after = before + tl.cumsum(weight.to(tl.float64), 0)
        hit = (after > target) & (weight > 0.0)
        first = tl.min(tl.where(hit, at, vocab), 0)
        token = tl.where((token < 0) & (first < vocab), first, token)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), 0))
        before += tl.sum(weight, 0).to(tl.float64)
    return tl.where(token < 0, last, token)  # rounding has eaten the rest


@triton.jit(do_not_specialize=["stride", "vocab"])
def choose_tokens(
    found,  # float64 [R, 3]: token, log-probability, why there is none
    chosen,  # int64: the token again, at `targets`
    targets,  # int64 [R]
    scores,  # float32 [R, stride]; where `lists`, what does not survive becomes -inf
    temperatures,  # float32 [R]
    samples,  # int32 [R]: 0 takes the best
    uniforms,  # float64 [R] in [0, 1)
    top_k,  # int32 [R], 0: all
    top_p,  # float64 [R], 1: all
    typical_p,  # float64 [R], 1: all
    floors,  # float64 [R]: log of min-p, -inf: none
    lists,  # int32 [R]: the scores are wanted as they are in the end, relative and cut
    stride,
    vocab,
    FEW: tl.constexpr,  # up to so many tokens a truncated row is drawn from by falling scores
    BLOCK: tl.constexpr,
):
    """Choose one token per row: top-k, top-p, typical-p, min-p, then the best or a draw."""
    row = tl.program_id(0)
    base = scores + row.to(tl.int64) * stride
    place = tl.arange(0, BLOCK)
    best = tl.full([], float("-inf"), tl.float32)
    broken = tl.full([], 0, tl.int32)
    for low in range(0, vocab, BLOCK):
        s = tl.load(base + low + place, mask=low + place < vocab, other=float("-inf"))
        broken += tl.sum((s != s).to(tl.int32), 0)
        best = tl.maximum(best, tl.max(s, 0))
    fault = tl.where(best == float("inf"), 3, tl.where(best == float("-inf"), 1, 0))
    fault = tl.where(broken > 0, 2, fault)
    token = tl.full([], 0, tl.int32)
    logprob = tl.full([], 0.0, tl.float64)
    if fault == 0:
        heat = tl.load(temperatures + row)
        k, p, typical = tl.load(top_k + row), tl.load(top_p + row), tl.load(typical_p + row)
        lowest = tl.full([], 0, tl.int32) + _LOWEST
        least, last_tie = lowest, vocab  # every finite score survives
        center = tl.full([], 0.0, tl.float32)
        within = tl.full([], float("inf"), tl.float32)
        none = tl.full([], float("-inf"), tl.float64)
        top_key = tl.full([], 1, tl.int32)  # above the best, whose key is 0
        # fmt: off
        if k > 0:
            least = _highest(
                base, vocab, best, heat, least, last_tie, center, within, none, top_key, k,
                1, 0, BLOCK,
            )
        total, reach = _tally(
            base, vocab, best, heat, least, last_tie, center, within, none, least, 1, BLOCK
        )
        few = (k > 0) & (reach < FEW)
        if p < 1.0:
            wanted = p * total
            low = _highest(
                base, vocab, best, heat, least, last_tie, center, within, none, top_key, wanted,
                0, 0, BLOCK,
            )
            _, number = _tally(
                base, vocab, best, heat, least, last_tie, center, within, none, low, 1, BLOCK
            )
            if k == 0:
                few = number < FEW
            fit, every = _among_ties(
                base, vocab, best, heat, least, last_tie, center, within, none, low, wanted, BLOCK
            )
            nth = tl.minimum(tl.maximum(tl.ceil(fit), 1.0).to(tl.int32), every) - 1
            last_tie = _nth_at(
                base, vocab, best, heat, low, nth, least, last_tie, center, within, none, BLOCK
            )
            least = low
            total, _ = _tally(
                base, vocab, best, heat, least, last_tie, center, within, none, least, 0, BLOCK
            )
        if typical < 1.0:
            mean = tl.full([], 0.0, tl.float64)
            for low in range(0, vocab, BLOCK):
                at = low + place
                x = _relative(base, at, vocab, best, heat)
                keep = _kept(x, at, least, last_tie, center, within, none)
                terms = tl.where(keep, tl.exp(x) * -tl.maximum(x, -1e30), 0.0)
                mean += tl.sum(terms, 0).to(tl.float64)
            center = (mean / total).to(tl.float32)  # of -x: the entropy, but for log(total)
            near, far = tl.full([], -1, tl.int32), tl.full([], 0x7F800000, tl.int32)
            while far - near > 1:
                middle = near + (far - near) // 2
                bound = middle.to(tl.float32, bitcast=True)
                mass, _ = _tally(
                    base, vocab, best, heat, least, last_tie, center, bound, none, least, 0, BLOCK
                )
                enough = mass >= typical * total
                near, far = tl.where(enough, near, middle), tl.where(enough, middle, far)
            within = far.to(tl.float32, bitcast=True)
            if (k == 0) & (p >= 1.0):
                lowest_key = _key(-(center + within))
                _, number = _tally(
                    base, vocab, best, heat, least, last_tie, center, within, none, lowest_key,
                    1, BLOCK,
                )
                few = number < FEW
        top = tl.full([], float("-inf"), tl.float32)
        for low in range(0, vocab, BLOCK):
            at = low + place
            x = _relative(base, at, vocab, best, heat)
            keep = _kept(x, at, least, last_tie, center, within, none)
            top = tl.maximum(top, tl.max(tl.where(keep, x, float("-inf")), 0))
        floor = top.to(tl.float64) + tl.load(floors + row)
        total, _ = _tally(
            base, vocab, best, heat, least, last_tie, center, within, floor, least, 0, BLOCK
        )
        key, nth = _key(top), tl.full([], 0, tl.int32)
        in_order = tl.full([], 0, tl.int32)
        target = tl.load(uniforms + row) * total
        if tl.load(samples + row) != 0:
            if ((k > 0) | (p < 1.0) | (typical < 1.0)) & (few | (vocab <= FEW)):
                key = _highest(
                    base, vocab, best, heat, least, last_tie, center, within, floor, key + 1,
                    target, 0, 1, BLOCK,
                )
                fit, every = _among_ties(
                    base, vocab, best, heat, least, last_tie, center, within, floor, key, target,
                    BLOCK,
                )
                nth = tl.minimum(fit.to(tl.int32), every - 1)
            else:
                in_order += 1
        if in_order > 0:
            token = _draw_in_order(
                base, vocab, best, heat, target, least, last_tie, center, within, floor, BLOCK
            )
        else:
            token = _nth_at(
                base, vocab, best, heat, key, nth, least, last_tie, center, within, floor, BLOCK
            )
        # fmt: on
        own = tl.load(base + token)
        logprob = ((own - best) / heat).to(tl.float64) - tl.log(total)
        if tl.load(lists + row) != 0:
            for low in range(0, vocab, BLOCK):
                at = low + place
                x = _relative(base, at, vocab, best, heat)
                keep = _kept(x, at, least, last_tie, center, within, floor)
                logprobs = (x.to(tl.float64) - tl.log(total)).to(tl.float32)
                tl.store(base + at, tl.where(keep, logprobs, float("-inf")), mask=at < vocab)
    tl.store(found + row * 3, token.to(tl.float64))
    tl.store(found + row * 3 + 1, logprob)
    tl.store(found + row * 3 + 2, fault.to(tl.float64))
    tl.store(chosen + tl.load(targets + row), token.to(tl.int64))
