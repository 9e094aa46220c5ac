"""Which experts each token goes to, and all (token, expert) pairs by expert, in one launch.

A program has some tokens. It chooses their experts, takes room for its pairs in each expert's list
by an atomic addition, and writes them there. The program that is done last hands the lists' lengths
on and leaves the counters at zero, as it found them, so nothing has to be cleared in between.

In which order an expert's pairs lie differs from run to run; what is computed of them does not:
each is a row of its own in every product.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def route_tokens(
    weights,  # [T, PER_TOKEN]
    # int32 [EXPERTS + SHARED, T]: of each expert, token * (PER_TOKEN + SHARED) + place among the
    # token's; those that every token goes to come last
    pairs,
    counts,  # int32 [EXPERTS + SHARED]: how many
    counters,  # int32 [EXPERTS + 1], 0 before and after: pairs so far, programs that are done
    logits,  # [T, EXPERTS]
    bias,  # float32 [EXPERTS] for the choice, read with HAS_BIAS
    tokens,
    scale,  # of the weights
    jitter,  # as `ExpertsSpec` has it
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    PER_TOKEN: tl.constexpr,
    ROUTING: tl.constexpr,  # as in `layers/routing.py`
    NORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    GROUPS_USED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a program
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    expert = tl.arange(0, PADDED)[None, :]
    there = (token < tokens) & (expert < EXPERTS)
    at = token.to(tl.int64) * EXPERTS + expert
    logit = tl.load(logits + at, mask=there, other=0.0).to(tl.float32)
    logit = tl.where(expert < EXPERTS, logit, float("-inf"))
    odds, score = find_odds(logit, bias, expert, EXPERTS, ROUTING, HAS_BIAS)
    if GROUPS > GROUPS_USED:
        score = bar_groups(score, expert, EXPERTS // GROUPS, GROUPS, PADDED_GROUPS, GROUPS_USED,
                           ROUTING == "grouped-sigmoid")
    place = tl.full([BLOCK, PADDED], -1, tl.int32)
    for i in tl.static_range(PER_TOKEN):
        hit = expert == tl.argmax(score, 1)[:, None]
        if ROUTING == "sparse-mixer":
            odds = tl.where(hit, weigh_close(logit, score, jitter), odds)
        place = tl.where(hit & there, i, place)
        score = tl.where(hit, float("-inf"), score)
    chosen = place >= 0
    weight = tl.where(chosen, odds, 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]  # all may be zero
    at = weights + token.to(tl.int64) * PER_TOKEN + place
    tl.store(at, (weight * scale).to(weights.dtype.element_ty), mask=chosen)
    list_pairs(
        pairs, counts, counters, token, place, chosen, tokens, EXPERTS, PADDED, PER_TOKEN, SHARED
    )
# fmt: on


@triton.jit
def find_odds(
    logit,  # float32 [tokens, padded experts], -inf where there is none
    bias,
    expert,
    EXPERTS: tl.constexpr,
    ROUTING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return what weights are made of, and scores that experts are chosen by."""
    if ROUTING == "sparse-mixer":
        return logit, logit
    elif ROUTING == "grouped-sigmoid":
        odds = tl.sigmoid(logit)
        score = odds
        if HAS_BIAS:
            score += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
        return odds, tl.where(logit == float("-inf"), logit, score)
    else:
        tl.static_assert(
            ROUTING == "softmax" or ROUTING == "grouped-softmax" or ROUTING == "biased-softmax"
        )
        best = tl.max(logit, 1)[:, None]
        odds = tl.exp(logit - best)
        odds = odds / tl.sum(odds, 1)[:, None]
        score = logit
        if ROUTING == "biased-softmax" and HAS_BIAS:
            score = odds + tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
        return odds, tl.where(logit == float("-inf"), logit, score)


@triton.jit
def weigh_close(logit, left, jitter):
    """Return a softmax over what is `left` close behind its best (sparse-mixer)."""
    best = tl.max(left, 1)[:, None]
    behind = best - logit > 2.0 * jitter * tl.maximum(tl.abs(logit), best)
    odds = tl.where(behind, 0.0, tl.exp(left - best))
    return odds / tl.sum(odds, 1)[:, None]


@triton.jit
def bar_groups(
    score,  # float32 [tokens, padded experts]
    expert,
    EACH: tl.constexpr,  # experts of a group
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    USED: tl.constexpr,
    TWO: tl.constexpr,  # a group is worth its two best experts, rather than its best
):
    """Return -inf for the experts of all groups but the best."""
    own = expert // EACH
    group = tl.arange(0, PADDED_GROUPS)[None, :]
    worth = tl.full([score.shape[0], PADDED_GROUPS], float("-inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        inside = tl.where(own == i, score, float("-inf"))
        best = tl.max(inside, 1)
        if TWO:
            first = tl.argmax(inside, 1)[:, None]
            best += tl.max(tl.where(expert == first, float("-inf"), inside), 1)
        worth = tl.where(group == i, best[:, None], worth)
    used = tl.zeros(score.shape, tl.int1)
    for _ in tl.static_range(USED):
        best = tl.argmax(worth, 1)[:, None]
        used = used | (own == best)
        worth = tl.where(group == best, float("-inf"), worth)
    return tl.where(used, score, float("-inf"))


@triton.jit
def list_pairs(
    pairs,
    counts,
    counters,
    token,
    place,  # int32 [tokens, padded experts]: which of a token's an expert is
    chosen,
    tokens,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Write a program's pairs to their experts' lists; the last program hands on the lengths."""
    expert = tl.arange(0, PADDED)
    inside = expert < EXPERTS
    ones = chosen.to(tl.int32)
    more = tl.sum(ones, 0)
    before = tl.atomic_add(counters + expert, more, mask=inside & (more > 0))
    order = before[None, :] + tl.cumsum(ones, 0) - ones
    at = expert[None, :].to(tl.int64) * tokens + order
    first = token * (PER_TOKEN + SHARED)
    tl.store(pairs + at, first + place, mask=chosen)
    for i in tl.static_range(SHARED):
        at = pairs + (EXPERTS + i) * tokens.to(tl.int64) + token
        tl.store(at, first + PER_TOKEN + i, mask=token < tokens)
    tl.debug_barrier()  # all of a program's additions come before it says that it is done
    if tl.atomic_add(counters + EXPERTS, 1) == tl.num_programs(0) - 1:
        found = tl.atomic_xchg(counters + expert, tl.zeros([PADDED], tl.int32), mask=inside)
        tl.store(counts + expert, found, mask=inside)
        for i in tl.static_range(SHARED):
            tl.store(counts + EXPERTS + i, tokens)
        tl.store(counters + EXPERTS, 0)
