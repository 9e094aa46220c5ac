"""Choosing a token among those of a row that survive truncation (the best one, or a draw).

It serves the rows that `surveying.py` has not settled. The programs that share a row gather its
shortlist; the last one to finish chooses from that, or from the whole row where the shortlist would
be too long, and lists top tokens. Scores are taken relative to the best one and divided by the
temperature, as the host's sampler does. `thresholds.py` finds the thresholds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier
from tgi_trio.shard.torch_backend.kernels.sampling.listing import list_best
from tgi_trio.shard.torch_backend.kernels.sampling.shortlisting import write_shortlist
from tgi_trio.shard.torch_backend.kernels.sampling.surveying import load_score
from tgi_trio.shard.torch_backend.kernels.thresholds import (
    LOWEST,
    first_beyond,
    highest,
    kept,
    key_of,
    relative,
    score_of,
    tally,
)

_ABOVE_BEST = tl.constexpr(1)  # a key just above the best score's, which is 0
_FARTHEST = tl.constexpr(-0x7F800000)  # the key of an infinite distance


# Steps of a choice, in order: thresholds, each followed by sums of what remains; then the token.
_TOP_K, _TOP_P, _LEFT, _MEAN, _TYPICAL, _FLOOR, _TAKE = (tl.constexpr(i) for i in range(7))


# fmt: off
@triton.jit
def _survive(
    base, vocab, best, heat, least, last_tie, center, within, floor, mass, BLOCK: tl.constexpr
):
    """Replace scores by the log-probabilities of surviving tokens, -inf for the others.

    Return the best key of each lane; see `list_best`.
    """
    place = tl.arange(0, BLOCK)
    lanes = tl.full([BLOCK], 0, tl.int32) + LOWEST
    for low in range(0, vocab, BLOCK):
        at = low + place
        x = relative(base, at, vocab, best, heat)
        keep = kept(x, at, least, last_tie, center, within, floor)
        logprobs = tl.where(keep, (x.to(tl.float64) - mass).to(tl.float32), float("-inf"))
        tl.store(base + at, logprobs, mask=at < vocab)
        lanes = tl.maximum(lanes, key_of(logprobs))
    return lanes


@triton.jit(do_not_specialize=["room"])
def choose_tokens(
    found,  # float64 [R, 3]: token, log-probability, why there is none
    chosen,  # int64: the token again, at `targets`
    listed,  # int32 [R, room, 2]: see `list_best`
    targets,  # int64 [R]; negative: no choice is made, and `found` is left as it is
    logits,  # [R, stride]
    # float32 [R, own_stride]: the scores of rows with edits, and each row's shortlist in its last
    # 2 * ROOM numbers; for rows that list tokens, replaced by log-probabilities
    scores,
    temperatures,  # float32 [R]
    samples,  # int32 [R]: 0: take the best token
    uniforms,  # float64 [R] in [0, 1)
    top_k,  # int32 [R], 0: all
    top_p,  # float64 [R], 1: all
    typical_p,  # float64 [R], 1: all
    floors,  # float64 [R]: log of min-p, -inf: none
    lists,  # int32 [R]: how many top tokens are listed; see `listing.py`
    parts,  # as `survey_scores` has written them
    cuts,
    plans,
    arrived,  # int32 [R]: programs that have finished; 0 before and after
    room,
    stride,
    own_stride,
    vocab,
    FEW: tl.constexpr,  # up to as many tokens, a truncated row is drawn from by descending scores
    PART: tl.constexpr,
    BLOCK: tl.constexpr,  # scores that the last program reads at a time
    DEPTHS: tl.constexpr,
    ROOM: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Gather a row's shortlist, part by part; the last of its programs chooses."""
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
        tl.debug_barrier()  # a program's parts are written before it counts as arrived
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
    """Choose by top-k, top-p, typical-p and min-p, then take the best or draw; list top tokens.

    `base` [size] is the row or, if `named`, its shortlist. All steps are passes of one loop, so
    that their common code is compiled only once: a search for a threshold, a sum over surviving
    tokens, and a search for a token's place. Compiling these took longer than any other kernel.
    The function is longer than others because its parts would have to share twenty numbers.
    """
    k, p, typical = tl.load(top_k + row), tl.load(top_p + row), tl.load(typical_p + row)
    odds, draws, wanted = tl.load(floors + row), tl.load(samples + row), tl.load(lists + row)
    least, last_tie = tl.full([], 0, tl.int32) + LOWEST, size  # all finite scores survive
    center, within = tl.full([], 0.0, tl.float32), tl.full([], float("inf"), tl.float32)
    floor, top = tl.full([], float("-inf"), tl.float64), tl.full([], 0.0, tl.float32)
    place = tl.full([], 0, tl.int32)
    cut_before = (k > 0) | (p < 1.0)
    cut, few = cut_before | (typical < 1.0), k < 0
    settles = cut | (odds > float("-inf"))  # other rows already have their token
    takes = settles & ((draws != 0) | (typical < 1.0))
    for step in range(_TOP_K, _TAKE + 1):
        if _is_asked(step, k, p, typical, settles, takes):
            falling = (step == _TAKE) & (draws != 0) & cut & (few | (vocab <= FEW))
            low, high = least, tl.full([], 0, tl.int32) + _ABOVE_BEST
            share = tl.where(step == _TOP_P, p, tl.where(step == _TYPICAL, typical, 0.0)) * total
            if step == _TOP_K:
                share = k.to(tl.float64)
            if step == _TYPICAL:
                center, low = mean.to(tl.float32), tl.full([], 0, tl.int32) + _FARTHEST
            if step == _FLOOR:
                floor = top.to(tl.float64) + odds
            if step == _TAKE:
                high, share = key_of(top) + 1, tl.load(uniforms + row) * total
            bound = tl.where(step == _TAKE, high - 1, least)
            if (step == _TOP_K) | (step == _TOP_P) | (step == _TYPICAL) | falling:
                bound = highest(
                    base, size, best, heat, least, last_tie, center, within, floor, low, high,
                    share, step == _TOP_K, step == _TYPICAL, step == _TAKE, BLOCK,
                )
            if step == _TOP_K:
                least = bound
            if step == _TYPICAL:
                within = (-bound).to(tl.float32, bitcast=True)
                bound = key_of(-(center + within))
            nth = tl.full([], 0.0, tl.float64)
            if (step < _TAKE) | falling:
                mass, over, ties, nearest, number = tally(
                    base, size, best, heat, least, last_tie, center, within, floor, bound,
                    step == _MEAN, BLOCK,
                )
                nth = _count_fitting(bound, ties, share - over, step == _TOP_P)
                first = (step == _TOP_K) | ((step == _TOP_P) & (k == 0))
                if first | ((step == _TYPICAL) & (cut_before == 0)):
                    few = number < FEW
                if (step == _TOP_K) | (step == _LEFT) | (step == _FLOOR):
                    total = mass
                if step == _MEAN:
                    mean = mass / total
                if step == _TYPICAL:
                    top = nearest
            if (step == _TOP_P) | (step == _TAKE):
                tied = (step == _TOP_P) | falling | (draws == 0)
                place = first_beyond(
                    base, size, best, heat, least, last_tie, center, within, floor, bound, tied,
                    tl.where(tied, nth, share), BLOCK,
                )
            if step == _TOP_P:
                least, last_tie = bound, place
    if settles:
        logprob = 0.0 - tl.log(total)  # of the best token
        if takes:
            logprob += ((tl.load(base + place) - best) / heat).to(tl.float64)
            name = tl.load(names + place, mask=named, other=0.0).to(tl.int32)
            token = tl.where(named, name, place)
            tl.store(found, token.to(tl.float64))
            tl.store(chosen, token.to(tl.int64))
        tl.store(found + 1, logprob)
    if wanted > 0:
        tl.debug_barrier()  # all threads have read the score of what is chosen
        lanes = _survive(
            base, size, best, heat, least, last_tie, center, within, floor, tl.log(total), BLOCK
        )
        tl.debug_barrier()  # before what has been written is read
        list_best(listed, lanes, base, names, named, wanted, room, size, BLOCK)


@triton.jit
def _is_asked(step, k, p, typical, settles, takes):
    """Return whether a row needs a step."""
    cut = ((step == _TOP_K) & (k > 0)) | (((step == _TOP_P) | (step == _LEFT)) & (p < 1.0))
    odd = (step == _TYPICAL) | ((step == _MEAN) & ((k > 0) | (p < 1.0)))  # else it is already known
    return cut | (odd & (typical < 1.0)) | ((step == _FLOOR) & settles) | ((step == _TAKE) & takes)


@triton.jit
def _count_fitting(key, ties, mass, whole):
    """Return, as float64 and counted from 0, where `mass` ends among the `ties` tokens at `key`.

    That is the first token that does not fit as a whole; if `whole`, the last one of which any part
    fits, but at least the first.
    """
    weight = tl.exp(score_of(key)).to(tl.float64)
    fit = tl.where(weight > 0.0, mass / weight, 1e9)
    fit = tl.minimum(tl.maximum(fit, 0.0), 1e9)
    most = tl.where(whole, tl.maximum(tl.ceil(fit), 1.0).to(tl.int32) - 1, fit.to(tl.int32))
    return tl.minimum(most, ties - 1).to(tl.float64)
# fmt: on
