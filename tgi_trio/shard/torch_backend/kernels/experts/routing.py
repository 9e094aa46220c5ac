"""Routing tokens to experts, and listing all (token, expert) pairs by expert, in one launch.

For few tokens the launch includes the product with the router (`ask_router`); for many, a library
has computed the logits (`route_tokens`).

A program has some tokens. It chooses their experts, reserves places for its pairs in each expert's
list by an atomic addition, and writes them there. The last program to finish publishes the lists'
lengths and resets the counters, so that nothing has to be cleared in between.

The order of an expert's pairs differs from run to run, but not the results: each pair is a separate
row of every product.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def route_tokens(
    weights,  # [T, PER_TOKEN]
    # int32 [EXPERTS + SHARED, T]: for each expert, token * (PER_TOKEN + SHARED) + place among the
    # token's experts; shared experts come last
    pairs,
    counts,  # int32 [EXPERTS + SHARED]: lengths of these lists
    counters,  # int32 [EXPERTS + 1]: pairs so far, programs that have finished; 0 before and after
    logits,  # [T, EXPERTS]
    bias,  # float32 [EXPERTS], added for the choice; read with HAS_BIAS
    factors,  # float32 [EXPERTS], of the experts' weights; read with HAS_FACTORS
    tokens,
    scale,  # of the weights
    jitter,  # see `ExpertsSpec`
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    PER_TOKEN: tl.constexpr,
    ROUTING: tl.constexpr,  # as in `layers/experts/routing.py`
    NORMALISE: tl.constexpr,
    CAP: tl.constexpr,  # soft cap of logits; 0: none
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    GROUPS_USED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a program
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    expert = tl.arange(0, PADDED)[None, :]
    there = (token < tokens) & (expert < EXPERTS)
    at = token.to(tl.int64) * EXPERTS + expert
    logit = tl.load(logits + at, mask=there, other=0.0).to(tl.float32)
    choose_experts(
        weights, pairs, counts, counters, logit, bias, factors, token, tokens, scale, jitter,
        EXPERTS, PADDED, PER_TOKEN, ROUTING, NORMALISE, CAP, GROUPS, PADDED_GROUPS,
        GROUPS_USED, HAS_BIAS, HAS_FACTORS, SHARED,
    )


@triton.jit(do_not_specialize=["tokens"])
def ask_router(
    weights,  # as for `route_tokens`, up to `counters`
    pairs,
    counts,
    counters,
    gate_logits,  # [T], written with HAS_GATE: products of tokens with `shared_gate`
    sums,  # float32 [blocks of tokens, PARTS, TOKENS, PADDED + HAS_GATE]: partial sums of logits
    arrived,  # int32 [blocks of tokens]: programs that have finished; 0 before and after
    x,  # [T, INPUTS], of any dtype; converted to the router's
    router,  # [EXPERTS, INPUTS]
    router_bias,  # [EXPERTS], read with HAS_ROUTER_BIAS
    shared_gate,  # [INPUTS], of the dtype of `x`: the gate of shared experts; read with HAS_GATE
    bias,  # float32 [EXPERTS], added for the choice; read with HAS_BIAS
    factors,  # float32 [EXPERTS], of the experts' weights; read with HAS_FACTORS
    tokens,
    scale,
    jitter,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,  # programs that share the inputs
    PART: tl.constexpr,  # inputs of one, a multiple of DEPTH
    DEPTH: tl.constexpr,  # inputs of one step of the loop
    TOKENS: tl.constexpr,  # of a program
    COLUMNS: tl.constexpr,  # experts of a program
    HAS_ROUTER_BIAS: tl.constexpr,
    HAS_GATE: tl.constexpr,  # then a part of the inputs has one program more
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two, at least COLUMNS
    PER_TOKEN: tl.constexpr,
    ROUTING: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAP: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    GROUPS_USED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Multiply tokens with the router; the last program of a block of tokens routes them.

    The programs of a block have some experts and a part of the inputs each (split-K). Parts are
    added in their order, so the logits do not depend on which program comes last.
    """
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    row = tl.arange(0, TOKENS)
    token = block * TOKENS + row
    there, wanted = token < tokens, column < EXPERTS
    rows = x + token.to(tl.int64)[:, None] * INPUTS
    width: tl.constexpr = PADDED + HAS_GATE
    first = sums + (block.to(tl.int64) * PARTS * TOKENS + row[:, None]) * width
    into = first + part * TOKENS * width
    if tl.program_id(1) * COLUMNS >= PADDED:
        if HAS_GATE:
            product = multiply_gate(
                rows, shared_gate, part * PART, there, INPUTS, PART, DEPTH, TOKENS
            )
            tl.store(into + PADDED, product[:, None])
    else:
        columns = router + column.to(tl.int64)[None, :] * INPUTS
        total = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for low in range(0, PART, DEPTH):
            depth = part * PART + low + tl.arange(0, DEPTH)
            inside = depth < INPUTS
            a = tl.load(rows + depth[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            b = tl.load(columns + depth[:, None], mask=inside[:, None] & wanted[None, :], other=0.0)
            total = tl.dot(a.to(b.dtype), b, total, input_precision="ieee")
        tl.store(into + column[None, :], total)
    tl.debug_barrier()  # a program's sums are written before it counts as arrived
    if tl.atomic_add(arrived + block, 1) == tl.num_programs(1) * PARTS - 1:
        tl.store(arrived + block, 0)
        expert = tl.arange(0, PADDED)
        logit = tl.zeros([TOKENS, PADDED], tl.float32)
        for i in range(PARTS):
            logit += tl.load(first + i * TOKENS * width + expert[None, :])
        if HAS_ROUTER_BIAS:
            own = tl.load(router_bias + expert, mask=expert < EXPERTS, other=0.0)
            logit += own.to(tl.float32)[None, :]
        logit = logit.to(router.dtype.element_ty).to(tl.float32)
        if HAS_GATE:
            opened = tl.zeros([TOKENS, 1], tl.float32)
            for i in range(PARTS):
                opened += tl.load(first + i * TOKENS * width + PADDED)
            opened = opened.to(gate_logits.dtype.element_ty)
            tl.store(gate_logits + token[:, None], opened, mask=there[:, None])
        choose_experts(
            weights, pairs, counts, counters, logit, bias, factors, token[:, None], tokens, scale,
            jitter, EXPERTS, PADDED, PER_TOKEN, ROUTING, NORMALISE, CAP, GROUPS, PADDED_GROUPS,
            GROUPS_USED, HAS_BIAS, HAS_FACTORS, SHARED,
        )


@triton.jit
def multiply_gate(
    rows,  # pointers [TOKENS, 1] to tokens
    shared_gate,
    begin,  # the first input of the program's part
    there,  # [TOKENS]
    INPUTS: tl.constexpr,
    PART: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the products of a part of tokens with a vector, float32 [TOKENS]."""
    total = tl.zeros([TOKENS], tl.float32)
    for low in range(0, PART, DEPTH):
        depth = begin + low + tl.arange(0, DEPTH)
        inside = depth < INPUTS
        a = tl.load(rows + depth[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        b = tl.load(shared_gate + depth, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(a.to(tl.float32) * b[None, :], 1)
    return total


@triton.jit
def choose_experts(
    weights,
    pairs,
    counts,
    counters,
    logit,  # float32 [tokens, PADDED]
    bias,
    factors,
    token,  # [tokens, 1]
    tokens,
    scale,
    jitter,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ROUTING: tl.constexpr,
    NORMALISE: tl.constexpr,
    CAP: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    GROUPS_USED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Choose the experts of some tokens from their logits, and list the pairs."""
    expert = tl.arange(0, PADDED)[None, :]
    there = (token < tokens) & (expert < EXPERTS)
    if CAP > 0.0:  # tanh(x) is 2 sigmoid(2x) - 1
        logit = CAP * (2.0 * tl.sigmoid(2.0 * logit / CAP) - 1.0)
    logit = tl.where(expert < EXPERTS, logit, float("-inf"))
    odds, score = find_odds(logit, bias, expert, EXPERTS, ROUTING, HAS_BIAS)
    if GROUPS > GROUPS_USED:
        score = bar_groups(score, expert, EXPERTS // GROUPS, GROUPS, PADDED_GROUPS, GROUPS_USED,
                           ROUTING == "grouped-sigmoid")
    place = tl.full(logit.shape, -1, tl.int32)
    for i in range(PER_TOKEN):  # not unrolled, like all loops here: that takes a compiler seconds
        hit = expert == tl.argmax(score, 1)[:, None]
        if ROUTING == "sparse-mixer":
            odds = tl.where(hit, weigh_close(logit, score, jitter), odds)
        place = tl.where(hit & there, i, place)
        score = tl.where(hit, float("-inf"), score)
    chosen = place >= 0
    weight = tl.where(chosen, odds, 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]  # all may be zero
    weight = weight * scale
    if HAS_FACTORS:
        weight = weight * tl.load(factors + expert, mask=expert < EXPERTS, other=0.0)
    at = weights + token.to(tl.int64) * PER_TOKEN + place
    tl.store(at, weight.to(weights.dtype.element_ty), mask=chosen)
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
    """Return the numbers from which weights are made, and the scores for choosing experts."""
    if ROUTING == "sparse-mixer":
        return logit, logit
    elif ROUTING == "grouped-sigmoid" or ROUTING == "sqrt-softplus":
        odds = tl.sigmoid(logit) if ROUTING == "grouped-sigmoid" else tl.sqrt(softplus(logit))
        score = odds
        if HAS_BIAS:
            score += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
        return odds, tl.where(logit == float("-inf"), logit, score)
    elif ROUTING == "sigmoid":
        score = logit
        if HAS_BIAS:
            score += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
        return tl.sigmoid(logit), score
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
def softplus(x):
    """Return log(1 + exp(x)), as exact for small exponentials as for others (Kahan's log1p)."""
    grown = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + grown
    near = tl.where(one == 1.0, grown, tl.log(one) * (grown / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def weigh_close(logit, left, jitter):
    """Return a softmax over the experts `left` that are close behind the best (sparse-mixer)."""
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
    TWO: tl.constexpr,  # a group counts by its two best experts, else by its best
):
    """Return scores, with -inf for experts outside the best groups."""
    own = expert // EACH
    group = tl.arange(0, PADDED_GROUPS)[None, :]
    worth = tl.full([score.shape[0], PADDED_GROUPS], float("-inf"), tl.float32)
    for i in range(GROUPS):
        inside = tl.where(own == i, score, float("-inf"))
        best = tl.max(inside, 1)
        if TWO:
            first = tl.argmax(inside, 1)[:, None]
            best += tl.max(tl.where(expert == first, float("-inf"), inside), 1)
        worth = tl.where(group == i, best[:, None], worth)
    used = tl.zeros(score.shape, tl.int1)
    for _ in range(USED):
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
    place,  # int32 [tokens, padded experts]: the expert's place among the token's
    chosen,
    tokens,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Write a program's pairs to the experts' lists; the last program publishes the lengths."""
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
    tl.debug_barrier()  # a program's additions are done before it counts as finished
    if tl.atomic_add(counters + EXPERTS, 1) == tl.num_programs(0) - 1:
        found = tl.atomic_xchg(counters + expert, tl.zeros([PADDED], tl.int32), mask=inside)
        tl.store(counts + expert, found, mask=inside)
        for i in tl.static_range(SHARED):
            tl.store(counts + EXPERTS + i, tokens)
        tl.store(counters + EXPERTS, 0)
