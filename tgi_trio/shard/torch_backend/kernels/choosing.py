"""Choosing among the tokens of a row that survive truncation: the best or a draw; and listing some.

For rows that are not done when they have been looked over (`surveying.py`). Programs that share a
row bring its shortlist together; the last of them chooses from that, or from the whole row where a
shortlist would be too long. Scores are taken relative to the best and divided by the temperature,
as the host's sampler does. How thresholds are found is in `thresholds.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.listing import list_best
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier
from tgi_trio.shard.torch_backend.kernels.shortlisting import write_shortlist
from tgi_trio.shard.torch_backend.kernels.surveying import load_score
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


# fmt: off
@triton.jit
def _mean_left(base, vocab, best, heat, least, last_tie, total, BLOCK: tl.constexpr):
    """Return the mean distance from the best of what survives: the entropy, but for log(total)."""
    place = tl.arange(0, BLOCK)
    center, none = tl.full([], 0.0, tl.float32), tl.full([], float("-inf"), tl.float64)
    within = tl.full([], float("inf"), tl.float32)
    terms = tl.zeros([BLOCK], tl.float64)
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        keep = kept(x, at, least, last_tie, center, within, none)
        terms += tl.where(keep, tl.exp(x) * -tl.maximum(x, -1e30), 0.0).to(tl.float64)
    return tl.sum(terms, 0) / total


@triton.jit
def _cut_typical(
    base, vocab, best, heat, least, last_tie, center, typical, total, BLOCK: tl.constexpr
):
    """Return how far from `center` what of -x survives typical-p may be, as `highest` finds it."""
    place = tl.arange(0, BLOCK)
    none = tl.full([], float("-inf"), tl.float64)
    every = tl.full([], float("inf"), tl.float32)
    near, far = tl.full([], -1, tl.int32), tl.full([], 0x7F800000, tl.int32)
    while far - near > 1:
        middle = near + (far - near) // 2
        mass = tl.zeros([BLOCK], tl.float64)
        widest = tl.full([BLOCK], 0, tl.int32)  # up to the middle
        closest = tl.full([BLOCK], 0, tl.int32) + far  # beyond it
        for low in range(0, vocab, BLOCK):
            at = low + place
            x = relative(base, at, vocab, best, heat)
            keep = kept(x, at, least, last_tie, center, every, none)
            distance = tl.abs(-x - center).to(tl.int32, bitcast=True)
            inside = keep & (distance <= middle)
            mass += tl.where(inside, tl.exp(x), 0.0).to(tl.float64)
            widest = tl.where(inside, tl.maximum(widest, distance), widest)
            outside = keep & (distance > middle)
            closest = tl.where(outside, tl.minimum(closest, distance), closest)
        if tl.sum(mass, 0) >= typical * total:
            far = tl.max(widest, 0)
        else:
            near = tl.min(closest, 0) - 1
    return far.to(tl.float32, bitcast=True)


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


@triton.jit(do_not_specialize=["room"])
def choose_tokens(
    found,  # float64 [R, 3]: token, log-probability, why there is none
    chosen,  # int64: the token again, at `targets`
    listed,  # int32 [R, room, 2]: see `list_best`
    targets,  # int64 [R]; negative: nothing is to be chosen, and `found` stays as it is
    logits,  # [R, stride]
    # float32 [R, own_stride]: scores of rows that have edits, and in the last 2 * ROOM of a row its
    # shortlist; where `lists`, what is listed from becomes log-probabilities of what survives
    scores,
    temperatures,  # float32 [R]
    samples,  # int32 [R]: 0 takes the best
    uniforms,  # float64 [R] in [0, 1)
    top_k,  # int32 [R], 0: all
    top_p,  # float64 [R], 1: all
    typical_p,  # float64 [R], 1: all
    floors,  # float64 [R]: log of min-p, -inf: none
    lists,  # int32 [R]: how many of the best are wanted besides; see `listing.py`
    parts,  # as `survey_scores` leaves them
    cuts,
    plans,
    arrived,  # int32 [R], 0 before and after: programs that have
    room,
    stride,
    own_stride,
    vocab,
    FEW: tl.constexpr,  # up to so many tokens a truncated row is drawn from by falling scores
    PART: tl.constexpr,
    BLOCK: tl.constexpr,  # scores that the last program looks at together
    DEPTHS: tl.constexpr,
    ROOM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Bring parts of a row to where it is chosen from; the last of a row's programs chooses."""
    let_next_begin(OVERLAPS)
    row, programs, parts_there = tl.program_id(1), tl.num_programs(0), tl.cdiv(vocab, PART)
    target = tl.load(targets + row)
    wait_for_earlier(OVERLAPS)
    plan = plans + row * 6
    state = tl.load(plan)
    if (target >= 0) & (state > 0.0):
        best, total = tl.load(plan + 1).to(tl.float32), tl.load(plan + 2)
        edited, heat = tl.load(plan + 4).to(tl.int32), tl.load(temperatures + row)
        base, own = logits + row.to(tl.int64) * stride, scores + row.to(tl.int64) * own_stride
        short = own + own_stride - 2 * ROOM
        named = state == 1.0
        for part in range(tl.program_id(0), parts_there, programs):
            at = part * PART + tl.arange(0, PART)
            place = row.to(tl.int64) * parts_there + part
            if named:
                depth, offset = tl.load(cuts + place * 2), tl.load(cuts + place * 2 + 1)
                top = tl.load(parts + place * 4).to(tl.float32)
                if depth > 0:
                    score = load_score(base, own, edited, at, at < vocab)
                    write_shortlist(
                        short, short + ROOM, score, at, vocab, top, heat, depth, offset, DEPTHS
                    )
            elif edited == 0:
                tl.store(own + at, load_score(base, own, edited, at, at < vocab), mask=at < vocab)
        tl.debug_barrier()  # a part is there before its program says that it has arrived
        if tl.atomic_add(arrived + row, 1) == programs - 1:
            tl.store(arrived + row, 0)
            size = tl.where(named, tl.load(plan + 3).to(tl.int32), vocab)
            _choose(
                found + row * 3, chosen + target, listed + row.to(tl.int64) * room * 2,
                own + tl.where(named, own_stride - 2 * ROOM, 0), short + ROOM, named, size, best,
                heat, total, tl.load(plan + 5), row, samples, uniforms, top_k, top_p, typical_p,
                floors, lists, room, vocab, FEW, BLOCK,
            )


@triton.jit
def _choose(
    found, chosen, listed, base, names, named, size, best, heat, total, mean, row,
    samples, uniforms, top_k, top_p, typical_p, floors, lists, room, vocab,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose by top-k, top-p, typical-p, min-p, then the best or a draw, and list the best.

    From `base` [size], the row or, `named`, its shortlist. Longer than other functions are: with
    top-p in one of its own, the assembler spills 100 bytes a thread, and what is left has no parts
    of its own.
    """
    k, p, typical = tl.load(top_k + row), tl.load(top_p + row), tl.load(typical_p + row)
    least, last_tie = tl.full([], 0, tl.int32) + _LOWEST, size  # every finite score survives
    above = tl.full([], 0, tl.int32) + _ABOVE_BEST
    center, none = tl.full([], 0.0, tl.float32), tl.full([], float("-inf"), tl.float64)
    within, floor = tl.full([], float("inf"), tl.float32), none
    if k > 0:
        least = highest(
            base, size, best, heat, least, last_tie, center, within, none, above, k, 1, 0, BLOCK
        )
    cut_before = (k > 0) | (p < 1.0)
    cut = cut_before | (typical < 1.0)
    few = k < 0
    if k > 0:
        total, number = tally(
            base, size, best, heat, least, last_tie, center, within, none, least, 1, BLOCK
        )
        few = number < FEW
    if p < 1.0:
        wanted = p * total
        low = highest(
            base, size, best, heat, least, last_tie, center, within, none, above, wanted,
            0, 0, BLOCK,
        )
        _, number = tally(
            base, size, best, heat, least, last_tie, center, within, none, low, 1, BLOCK
        )
        if k == 0:
            few = number < FEW
        fit, every = among_ties(
            base, size, best, heat, least, last_tie, center, within, none, low, wanted, BLOCK
        )
        nth = tl.minimum(tl.maximum(tl.ceil(fit), 1.0).to(tl.int32), every) - 1
        last_tie = nth_at(
            base, size, best, heat, low, nth, least, last_tie, center, within, none, BLOCK
        )
        least = low
        total, _ = tally(
            base, size, best, heat, least, last_tie, center, within, none, least, 0, BLOCK
        )
    if typical < 1.0:
        if cut_before:
            mean = _mean_left(base, size, best, heat, least, last_tie, total, BLOCK)
        center = mean.to(tl.float32)
        within = _cut_typical(
            base, size, best, heat, least, last_tie, center, typical, total, BLOCK
        )
        if cut_before == 0:
            lowest = key_of(-(center + within))
            _, number = tally(
                base, size, best, heat, least, last_tie, center, within, none, lowest, 1, BLOCK
            )
            few = number < FEW
    lowest_odds = tl.load(floors + row)
    if cut | (lowest_odds > float("-inf")):  # other rows have their token
        top = tl.full([], 0.0, tl.float32)  # the best, unless typical-p takes it
        if typical < 1.0:
            top = _best_left(base, size, best, heat, least, last_tie, center, within, BLOCK)
        floor = top.to(tl.float64) + lowest_odds
        total, _ = tally(
            base, size, best, heat, least, last_tie, center, within, floor, least, 0, BLOCK
        )
        logprob = 0.0 - tl.log(total)  # of the best
        draws = tl.load(samples + row)
        if (draws != 0) | (typical < 1.0):
            place = _take(
                base, size, best, heat, least, last_tie, center, within, floor, top,
                tl.load(uniforms + row) * total, draws,
                (cut & (few | (vocab <= FEW))).to(tl.int32), BLOCK,
            )
            logprob += ((tl.load(base + place) - best) / heat).to(tl.float64)
            token = tl.load(names + place, mask=named, other=0.0).to(tl.int32)
            token = tl.where(named, token, place)
            tl.store(found, token.to(tl.float64))
            tl.store(chosen, token.to(tl.int64))
        tl.store(found + 1, logprob)
    wanted = tl.load(lists + row)
    if wanted > 0:
        _survive(
            base, size, best, heat, least, last_tie, center, within, floor, tl.log(total), BLOCK
        )
        tl.debug_barrier()  # what has been written is read
        list_best(listed, base, names, named, wanted, room, size, BLOCK)
# fmt: on
