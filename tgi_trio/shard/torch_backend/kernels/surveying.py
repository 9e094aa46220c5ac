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
from tgi_trio.shard.torch_backend.kernels.shortlisting import depth_of, plan_shortlist, steps_of
from tgi_trio.shard.torch_backend.kernels.thresholds import key_of, score_of

# Targets of choices that are none.
NOBODY = -1  # nothing is read or written
KEPT = -2  # the scores are written into their own memory, for a choice that comes later

_KEPT = tl.constexpr(KEPT)
_LAST = tl.constexpr(0x7FFFFFFF)


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
    parts,  # float64 [R, parts, 3], written: best score, the first token that has it, mass
    depths,  # int32 [R, parts, DEPTHS], written for rows that are not done: see `plan_shortlist`
    cuts,  # int32 [R, parts, 2], written for the same
    plans,  # float64 [R, 5], written: state, best, mass, length of the shortlist, has edits
    arrived,  # int32 [R], 0 before and after: parts that have
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
):
    """Look over one part of a row; the last of a row's programs puts them together."""
    part, row = tl.program_id(0), tl.program_id(1)
    target = tl.load(targets + row)
    at = part * PART + tl.arange(0, PART)
    there = at < vocab
    base, own = logits + row.to(tl.int64) * stride, scores + row.to(tl.int64) * own_stride
    if target == _KEPT:
        tl.store(own + at, tl.load(base + at, mask=there, other=0.0).to(tl.float32), mask=there)
    elif target >= 0:
        score = tl.load(base + at, mask=there, other=float("-inf")).to(tl.float32)
        score, edited = edit_part(
            score, own, at, part, row, rows, vocab, words, counts, slots, starts, entries,
            frequency, presence, unit, repetition, early, eos, bits, green, allowed, amount,
            EOS, PART, STRIP,
        )
        heat = tl.load(temperatures + row)
        best, first, mass = look_over(score, at, heat)
        number = tl.num_programs(0)
        place = row.to(tl.int64) * number + part
        tl.store(parts + place * 3, best.to(tl.float64))
        tl.store(parts + place * 3 + 1, first.to(tl.float64))
        tl.store(parts + place * 3 + 2, mass)
        k, p, typical = tl.load(top_k + row), tl.load(top_p + row), tl.load(typical_p + row)
        floor, wanted = tl.load(floors + row), tl.load(lists + row)
        cuts_off = (k > 0) | (p < 1.0) | (typical < 1.0) | (floor > float("-inf"))
        if cuts_off | (wanted > 0):
            depth = depth_of(score, best, steps_of(heat), DEPTHS)
            upto = tl.cumsum(tl.histogram(depth, DEPTHS, mask=there), 0)
            tl.store(depths + place * DEPTHS + tl.arange(0, DEPTHS), upto)
        tl.debug_barrier()  # all that a program has found comes before it says that it has arrived
        if tl.atomic_add(arrived + row, 1) == number - 1:
            tl.store(arrived + row, 0)
            which = tl.arange(0, PARTS)
            places = parts + (row.to(tl.int64) * number + which) * 3
            within = which < number
            bests = tl.load(places, mask=within, other=float("-inf")).to(tl.float32)
            firsts = tl.load(places + 1, mask=within, other=0.0).to(tl.int32)
            masses = tl.load(places + 2, mask=within, other=0.0)
            best = tl.max(bests, 0)
            token = tl.min(tl.where(bests == best, firsts, vocab), 0)
            fault = tl.where(best == float("inf"), 3, tl.where(best == float("-inf"), 1, 0))
            fault = tl.where(tl.max((masses != masses).to(tl.int32), 0) > 0, 2, fault)
            state, length = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
            logprob, total = tl.full([], 0.0, tl.float64), tl.full([], 1.0, tl.float64)
            if fault == 0:
                masses *= tl.where(masses > 0.0, tl.exp((bests - best) / heat), 0.0)
                total = tl.sum(masses, 0)
                if cuts_off | (wanted > 0):
                    state, length = plan_shortlist(
                        cuts, depths, parts, row, number, best, heat, total, vocab, k, p, typical,
                        floor, wanted, PARTS, DEPTHS, ROOM,
                    )
                if (tl.load(samples + row) != 0) & (cuts_off == 0):
                    token = draw_token(
                        base, own, edited, vocab, bests, best, masses, heat,
                        tl.load(uniforms + row) * total, PARTS, PART,
                    )
                alone = load_score(base, own, edited, token, token < vocab)
                logprob = ((alone - best) / heat).to(tl.float64) - tl.log(total)
            plan = plans + row * 5
            tl.store(plan, state.to(tl.float64))
            tl.store(plan + 1, best.to(tl.float64))
            tl.store(plan + 2, total)
            tl.store(plan + 3, length.to(tl.float64))
            tl.store(plan + 4, edited.to(tl.float64))
            # Of what is cut it is replaced by another one.
            tl.store(found + row * 3, tl.where(fault == 0, token, 0).to(tl.float64))
            tl.store(found + row * 3 + 1, logprob)
            tl.store(found + row * 3 + 2, fault.to(tl.float64))
            tl.store(chosen + target, tl.where(fault == 0, token, 0).to(tl.int64))


@triton.jit
def look_over(score, at, heat):
    """Return (best score, the first token that has it, mass relative to it): NaN if any score is.

    The mass is of the scores divided by the temperature; of no score that is infinite.
    """
    order = (key_of(score).to(tl.int64) << 32) | (at ^ _LAST).to(tl.int64)
    top = tl.max(order, 0)
    best, first = score_of((top >> 32).to(tl.int32)), (top & _LAST).to(tl.int32) ^ _LAST
    counts = (score > float("-inf")) & (best < float("inf"))
    weight = tl.where(counts, tl.exp((score - best) / heat), 0.0)
    weight = tl.where(score != score, float("nan"), weight)
    return best, first, tl.sum(weight.to(tl.float64), 0)


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
    weight = tl.where(score > float("-inf"), tl.exp((score - top) / heat), 0.0)
    fair = tl.exp((top - best) / heat).to(tl.float64)
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
