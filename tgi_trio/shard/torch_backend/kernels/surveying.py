"""A look at every score: edits, the best token, the mass, and a token where that is all it takes.

Programs share a row: each has a part of it in registers, edits it, and leaves what it has found.
The one that comes last puts that together, in the parts' order, so nothing depends on who that is.
It chooses the best token, or draws one where nothing is cut off; for other rows it plans what
`choosing.py` is to look at. Scores stay in the dtype of the logits: a row that has edits is written
into memory of its own, all others are read where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.editing import edit_part
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier
from tgi_trio.shard.torch_backend.kernels.shortlisting import depth_of, plan_shortlist, steps_of
from tgi_trio.shard.torch_backend.kernels.thresholds import key_of, score_of

# Targets of choices that are none.
NOBODY = -1  # nothing is read or written
KEPT = -2  # the scores are written into their own memory, for a choice that comes later

_KEPT = tl.constexpr(KEPT)
_LAST = tl.constexpr(0x7FFFFFFF)
_LOG2E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit(do_not_specialize=["rows", "words"])
def survey_scores(
    found,  # float64 [R, 3]: token, log-probability, why there is none; of rows that it settles
    chosen,  # int64: the token again, at `targets`
    targets,  # int64 [R], or one of the above
    logits,  # [R, stride] of any dtype
    scores,  # float32 [R, own_stride]: where rows that have edits are written
    counts,  # what edits are made by: see `edit_part`
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
    temperatures,  # what is asked for: see `choose_tokens`
    samples,
    uniforms,
    top_k,
    top_p,
    typical_p,
    floors,
    lists,
    parts,  # float64 [R, parts, 4], written: see `look_over`
    depths,  # int32 [R, parts, DEPTHS], written for rows that are not done: see `plan_shortlist`
    cuts,  # int32 [R, parts, 2], written for the same
    # float64 [R, 6], written: state, best, mass, length of the shortlist, has edits, mean distance
    # from the best, of rows with typical-p
    plans,
    arrived,  # int32 [R], 0 before and after: programs that have
    rows,
    words,
    stride,
    own_stride,
    vocab,
    EOS: tl.constexpr,
    PARTS: tl.constexpr,  # the next power of two
    PART: tl.constexpr,  # tokens of one
    STRIP: tl.constexpr,
    DEPTHS: tl.constexpr,
    ROOM: tl.constexpr,  # of a shortlist
    OVERLAPS: tl.constexpr,
):
    """Look over some parts of a row; the last of a row's programs puts all of them together.

    What depends on nothing is loaded first: a program of few rows waits for memory, and else does
    nothing that takes long. What a row asks for is there before the kernels before this one.
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
        tl.debug_barrier()  # all that a program has found comes before it says that it has arrived
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
            # Of what is cut it is replaced by another one.
            tl.store(found + row * 3, tl.where(fault == 0, token, 0).to(tl.float64))
            tl.store(found + row * 3 + 1, logprob)
            tl.store(found + row * 3 + 2, fault.to(tl.float64))
            tl.store(chosen + target, tl.where(fault == 0, token, 0).to(tl.int64))


@triton.jit
def look_over(part, score, at, heat, typical):
    """Return a part's best score; write what is found of it to `part`, float64 [4].

    That is the best score, the first token that has it, and relative to it the mass, NaN if any
    score is, and with typical-p the sum of masses times distances. Infinite scores have none.
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
    """Return float32 masses of scores relative to that of `best`."""
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
    """Return the first id with which the mass, by rising ids, exceeds `target`."""
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
    last = tl.max(tl.where(weight > 0.0, at, 0), 0)  # where rounding has eaten the rest
    return tl.min(tl.where((mass > target) & (weight > 0.0), at, last), 0)


@triton.jit
def load_score(base, own, edited, at, there):
    """Return float32 scores of a row, from where they are."""
    plain = tl.load(base + at, mask=there & (edited == 0), other=float("-inf")).to(tl.float32)
    changed = tl.load(own + at, mask=there & (edited != 0), other=float("-inf"))
    return tl.where(edited != 0, changed, plain)
# fmt: on
