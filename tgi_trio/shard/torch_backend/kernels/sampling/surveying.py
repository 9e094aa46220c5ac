"""A first pass over all scores: edits, the best token, the mass, and the choice where that is easy.

Programs share a row: each reads a part of it into registers, edits it, and writes what it finds.
The last one to finish combines these, in the parts' order, so the result does not depend on which
one that is. It takes the best token, or draws one if nothing is truncated; for other rows it plans
what `choosing.py` reads. Scores stay in the logits' dtype: rows with edits are copied into memory
of their own, all others are read where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier
from tgi_trio.shard.torch_backend.kernels.sampling.editing import edit_part
from tgi_trio.shard.torch_backend.kernels.sampling.shortlisting import (
    depth_of,
    plan_shortlist,
    steps_of,
)
from tgi_trio.shard.torch_backend.kernels.thresholds import key_of, score_of

# Special targets of choices.
NOBODY = -1  # no choice: nothing is read or written
KEPT = -2  # scores are copied to their own memory, for a later choice

_KEPT = tl.constexpr(KEPT)
_LAST = tl.constexpr(0x7FFFFFFF)
_LOG2E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit(do_not_specialize=["rows", "words"])
def survey_scores(
    found,  # float64 [R, 3], written for settled rows: token, log-probability, why there is none
    chosen,  # int64: the token again, at `targets`
    targets,  # int64 [R]: row of `chosen`, or one of the above
    logits,  # [R, stride] of any dtype
    scores,  # float32 [R, own_stride]: for the scores of rows with edits
    counts,  # inputs of edits, up to `amount`: see `edit_part`
    slots,
    starts,
    entries,
    frequency,
    presence,
    unit,
    repetition,
    early,
    eos,
    bits,
    green,
    allowed,
    amount,
    temperatures,  # sampling parameters, up to `lists`: see `choose_tokens`
    samples,
    uniforms,
    top_k,
    top_p,
    typical_p,
    floors,
    lists,
    parts,  # float64 [R, parts, 4], written: see `look_over`
    depths,  # int32 [R, parts, DEPTHS], written for unsettled rows: see `plan_shortlist`
    cuts,  # int32 [R, parts, 2], likewise
    # float64 [R, 6], written: state, best, mass, length of the shortlist, whether it has edits,
    # mean distance from the best (with typical-p)
    plans,
    arrived,  # int32 [R]: programs that have finished; 0 before and after
    rows,
    words,
    stride,
    own_stride,
    vocab,
    EOS: tl.constexpr,
    PARTS: tl.constexpr,  # the next power of two
    PART: tl.constexpr,  # tokens of a part
    STRIP: tl.constexpr,
    DEPTHS: tl.constexpr,
    ROOM: tl.constexpr,  # longest shortlist
    OVERLAPS: tl.constexpr,
):
    """Survey some parts of a row; the last of the row's programs combines all of them.

    Loads that depend on nothing come first: with few rows, waiting for memory is what takes a
    program longest. Sampling parameters are written before the preceding kernels begin.
    """
    let_next_begin(OVERLAPS)
    row, programs, parts_there = tl.program_id(1), tl.num_programs(0), tl.cdiv(vocab, PART)
    base, own = logits + row.to(tl.int64) * stride, scores + row.to(tl.int64) * own_stride
    target, heat = tl.load(targets + row), tl.load(temperatures + row)
    k, p, typical = tl.load(top_k + row), tl.load(top_p + row), tl.load(typical_p + row)
    floor, wanted = tl.load(floors + row), tl.load(lists + row)
    slot, too_early = tl.load(slots + row), tl.load(early + row)
    marked, permitted = tl.load(green + row), tl.load(allowed + row)
    biases = starts + 2 * (rows + 1) + row
    begin, end = tl.load(biases), tl.load(biases + 1)
    wait_for_earlier(OVERLAPS)
    at = tl.program_id(0) * PART + tl.arange(0, PART)
    following = tl.load(base + at, mask=at < vocab, other=float("-inf"))
    edited = (slot >= 0) | (end > begin) | (too_early != 0) | (marked >= 0) | (permitted >= 0)
    cuts_off = (k > 0) | (p < 1.0) | (typical < 1.0) | (floor > float("-inf"))
    parts += row.to(tl.int64) * parts_there * 4
    if target == _KEPT:
        for part in range(tl.program_id(0), parts_there, programs):
            at = part * PART + tl.arange(0, PART)
            score = tl.load(base + at, mask=at < vocab, other=0.0).to(tl.float32)
            tl.store(own + at, score, mask=at < vocab)
    elif target >= 0:
        for part in range(tl.program_id(0), parts_there, programs):
            at = part * PART + tl.arange(0, PART)
            score = following.to(tl.float32)
            ahead = at + programs * PART
            following = tl.load(base + ahead, mask=ahead < vocab, other=float("-inf"))
            if edited:
                score = edit_part(
                    score, own, at, part, row, rows, vocab, words, counts, slot, starts, entries,
                    begin, end, frequency, presence, unit, repetition, too_early, eos,
                    bits, marked, permitted, amount, EOS, PART, STRIP,
                )
            best = look_over(parts + part * 4, score, at, heat, typical)
            if cuts_off | (wanted > 0):
                depth = depth_of(score, best, steps_of(heat), DEPTHS)
                upto = tl.cumsum(tl.histogram(depth, DEPTHS, mask=at < vocab), 0)
                place = row.to(tl.int64) * parts_there + part
                tl.store(depths + place * DEPTHS + tl.arange(0, DEPTHS), upto)
        tl.debug_barrier()  # a program's results are written before it counts as arrived
        if tl.atomic_add(arrived + row, 1) == programs - 1:
            tl.store(arrived + row, 0)
            which = tl.arange(0, PARTS)
            within = which < parts_there
            bests = tl.load(parts + which * 4, mask=within, other=float("-inf")).to(tl.float32)
            firsts = tl.load(parts + which * 4 + 1, mask=within, other=0.0).to(tl.int32)
            masses = tl.load(parts + which * 4 + 2, mask=within, other=0.0)
            best = tl.max(bests, 0)
            token = tl.min(tl.where(bests == best, firsts, vocab), 0)
            fault = tl.where(best == float("inf"), 3, tl.where(best == float("-inf"), 1, 0))
            fault = tl.where(tl.max((masses != masses).to(tl.int32), 0) > 0, 2, fault)
            state, length = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
            logprob, total = tl.full([], 0.0, tl.float64), tl.full([], 1.0, tl.float64)
            mean = tl.full([], 0.0, tl.float64)
            if fault == 0:
                fair = tl.where(masses > 0.0, weigh(bests, best, heat), 0.0)
                if typical < 1.0:
                    costs = tl.load(parts + which * 4 + 3, mask=within, other=0.0)
                    costs += tl.where(masses > 0.0, masses * ((best - bests) / heat), 0.0)
                    mean = tl.sum(costs * fair, 0)
                masses *= fair
                total = tl.sum(masses, 0)
                mean /= total
                if cuts_off | (wanted > 0):
                    state, length = plan_shortlist(
                        cuts, depths, parts, row, parts_there, best, heat, total, mean, vocab,
                        k, p, typical, floor, wanted, PARTS, DEPTHS, ROOM,
                    )
                if (tl.load(samples + row) != 0) & (cuts_off == 0):
                    token = draw_token(
                        base, own, edited, vocab, bests, best, masses, heat,
                        tl.load(uniforms + row) * total, PARTS, PART,
                    )
                alone = load_score(base, own, edited, token, token < vocab)
                logprob = ((alone - best) / heat).to(tl.float64) - tl.log(total)
            plan = plans + row * 6
            tl.store(plan, state.to(tl.float64))
            tl.store(plan + 1, best.to(tl.float64))
            tl.store(plan + 2, total)
            tl.store(plan + 3, length.to(tl.float64))
            tl.store(plan + 4, edited.to(tl.float64))
            tl.store(plan + 5, mean)
            # For truncated rows, `choose_tokens` overwrites it.
            tl.store(found + row * 3, tl.where(fault == 0, token, 0).to(tl.float64))
            tl.store(found + row * 3 + 1, logprob)
            tl.store(found + row * 3 + 2, fault.to(tl.float64))
            tl.store(chosen + target, tl.where(fault == 0, token, 0).to(tl.int64))


@triton.jit
def look_over(part, score, at, heat, typical):
    """Return a part's best score, and write what is found of the part to `part`, float64 [4].

    That is: the best score, the first token that has it, the mass relative to it (NaN if any score
    is) and, with typical-p, the sum of mass times distance. Infinite scores have no mass.
    """
    order = (key_of(score).to(tl.int64) << 32) | (at ^ _LAST).to(tl.int64)
    top = tl.max(order, 0)
    best, first = score_of((top >> 32).to(tl.int32)), (top & _LAST).to(tl.int32) ^ _LAST
    weight = tl.where(best < float("inf"), weigh(score, best, heat), 0.0)
    weight = tl.where(score > float("-inf"), weight, 0.0)
    mass = tl.sum(tl.where(score != score, float("nan"), weight), 0)
    tl.store(part, best.to(tl.float64))
    tl.store(part + 1, first.to(tl.float64))
    tl.store(part + 2, mass.to(tl.float64))
    if typical < 1.0:
        cost = tl.where(weight > 0.0, weight * ((best - score) / heat), 0.0)
        tl.store(part + 3, tl.sum(cost, 0).to(tl.float64))
    return best


@triton.jit
def weigh(score, best, heat):
    """Return the masses of scores relative to that of `best`, float32."""
    return tl.exp2((score - best) * tl.minimum(1.0 / heat * _LOG2E, 1e30))


@triton.jit
def draw_token(
    base, own, edited, vocab,
    bests,  # float32 [PARTS]
    best,
    masses,  # float64 [PARTS], relative to the row's best
    heat,
    target,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """Return the first id at which the mass, summed by ascending ids, exceeds `target`."""
    part = tl.arange(0, PARTS)
    hit = (tl.cumsum(masses, 0) > target) & (masses > 0.0)
    last = tl.max(tl.where(masses > 0.0, part, 0), 0)
    which = tl.min(tl.where(hit, part, last), 0)
    before = tl.sum(tl.where(part < which, masses, 0.0), 0)
    top = tl.max(tl.where(part == which, bests, float("-inf")), 0)
    at = which * PART + tl.arange(0, PART)
    score = load_score(base, own, edited, at, at < vocab)
    weight = tl.where(score > float("-inf"), weigh(score, top, heat), 0.0)
    fair = weigh(top, best, heat).to(tl.float64)
    mass = before + tl.cumsum(weight.to(tl.float64), 0) * fair
    last = tl.max(tl.where(weight > 0.0, at, 0), 0)  # if rounding leaves too little mass
    return tl.min(tl.where((mass > target) & (weight > 0.0), at, last), 0)


@triton.jit
def load_score(base, own, edited, at, there):
    """Return a row's scores, float32, from its own memory if it has edits, else from the logits."""
    plain = tl.load(base + at, mask=there & (edited == 0), other=float("-inf")).to(tl.float32)
    changed = tl.load(own + at, mask=there & (edited != 0), other=float("-inf"))
    return tl.where(edited != 0, changed, plain)
# fmt: on
