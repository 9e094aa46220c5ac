"""Several hidden states of a token (hyper-connections), in two launches around each part.

`read_streams` makes weights, and of them the sum that a part reads; `write_streams` adds the part's
result to all states, and multiplies them with what computes the next weights. The first of all are
multiplied by `mix_streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.combining import sum_experts
from tgi_trio.shard.torch_backend.kernels.fused import normalise
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


@triton.jit(do_not_specialize=["tokens"])
def mix_streams(
    parts,  # float32 [T, shares, WEIGHTS + 1], written: the last is the sum of squares
    streams,  # [T, SIZE]: all states of a token
    mix,  # float32 [WEIGHTS, SIZE]
    tokens,
    SIZE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    PADDED: tl.constexpr,  # to a power of two, at least 16
    TOKENS: tl.constexpr,  # of a program
    DEPTH: tl.constexpr,  # numbers of a step of the loop
    PRECISION: tl.constexpr,  # of products of float32
    OVERLAPS: tl.constexpr,
):
    """Multiply a share of some tokens' numbers: as many shares as the grid's second dimension."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    begin, end = find_share((SIZE + DEPTH - 1) // DEPTH)
    total, square = tl.zeros([TOKENS, PADDED], tl.float32), tl.zeros([TOKENS], tl.float32)
    for step in range(begin, end):
        place = step * DEPTH + tl.arange(0, DEPTH)[None, :]
        there = (token < tokens) & (place < SIZE)
        x = tl.load(streams + token * SIZE + place, mask=there, other=0.0).to(tl.float32)
        total = multiply(total, x, mix, place, place < SIZE, SIZE, WEIGHTS, PADDED, PRECISION)
        square += tl.sum(x * x, 1)
    store_parts(parts, total, square, token, tokens, WEIGHTS, PADDED)


@triton.jit
def find_share(steps):
    """Return the first of all steps that a program does, and the end."""
    each = tl.cdiv(steps, tl.num_programs(1))
    begin = tl.program_id(1) * each
    return begin, tl.minimum(begin + each, steps)


@triton.jit
def multiply(
    total,  # float32 [TOKENS, PADDED]
    x,  # float32 [TOKENS, DEPTH]
    mix,
    place,  # [1, DEPTH]: of the numbers in a row of `mix`, where they are `inside`
    inside,
    SIZE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `total` with the products of some more numbers."""
    which = tl.arange(0, PADDED)[:, None]
    y = tl.load(mix + which * SIZE + place, mask=(which < WEIGHTS) & inside, other=0.0)
    return tl.dot(x, tl.trans(y), total, input_precision=PRECISION)


@triton.jit
def store_parts(
    parts,
    total,
    square,  # float32 [TOKENS]
    token,  # int64 [TOKENS, 1]
    tokens,
    WEIGHTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Store a share of what weights are made of."""
    number = tl.arange(0, PADDED)[None, :]
    into = parts + (token * tl.num_programs(1) + tl.program_id(1)) * (WEIGHTS + 1)
    tl.store(into + number, total, mask=(token < tokens) & (number < WEIGHTS))
    tl.store(into + WEIGHTS, square[:, None], mask=token < tokens)


@triton.jit(do_not_specialize=["shares"])
def read_streams(
    normed,  # [T, HIDDEN]: the norm of what the part reads; without KIND, that itself
    added,  # float32 [T, COUNT]: the weight of the part's result in each state
    mixture,  # float32 [T, COUNT, COUNT]: of each state in each; with ITERATIONS
    parts,  # float32 [T, shares, WEIGHTS + 1], as for `mix_streams`
    streams,  # [T, COUNT, HIDDEN]
    base,  # float32 [WEIGHTS]: of each state 1, with ADDS 2, and with ITERATIONS COUNT more
    scale,  # float32 [1 to 3]
    gain,  # [HIDDEN], read with HAS_GAIN
    bias,
    mix_eps,
    eps,
    most,
    added_eps,
    norm_eps,
    shares,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,  # powers of two
    MOST_SHARES: tl.constexpr,  # a power of two
    ADDS: tl.constexpr,  # a part follows, whose result is added; else only the sum is wanted
    ITERATIONS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PADDED_HIDDEN: tl.constexpr,
    KIND: tl.constexpr,  # as for `normalise`; "": no norm
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Weigh a token's states; see `HyperConnection.enter`."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    weights: tl.constexpr = COUNT + (COUNT if ADDS else 0) + (COUNT * COUNT if ITERATIONS else 0)
    share = tl.arange(0, MOST_SHARES)
    own = parts + token * shares * (weights + 1)
    at = own + share * (weights + 1) + weights
    square = tl.sum(tl.load(at, mask=share < shares, other=0.0), 0)
    size = tl.rsqrt(square / (COUNT * HIDDEN) + mix_eps)
    state = tl.arange(0, PADDED)
    inside = state < COUNT
    x = weigh(own, base, tl.load(scale), size, state, inside, shares, weights, MOST_SHARES)
    read = tl.where(inside, tl.sigmoid(x) + eps, 0.0)
    if ADDS:
        x = weigh(
            own + COUNT, base + COUNT, tl.load(scale + 1), size, state, inside, shares, weights,
            MOST_SHARES,
        )  # fmt: skip
        tl.store(added + token * COUNT + state, most * tl.sigmoid(x) + added_eps, mask=inside)
    if ITERATIONS:
        place = tl.arange(0, PADDED * PADDED)
        there = (place // PADDED < COUNT) & (place % PADDED < COUNT)
        place = place // PADDED * COUNT + place % PADDED
        x = weigh(
            own + 2 * COUNT, base + 2 * COUNT, tl.load(scale + 2), size, place, there, shares,
            weights, MOST_SHARES,
        )  # fmt: skip
        odds = balance(tl.reshape(x, (PADDED, PADDED)), eps, COUNT, PADDED, ITERATIONS)
        into = mixture + token * COUNT * COUNT + place
        tl.store(into, tl.reshape(odds, (PADDED * PADDED,)), mask=there)
    place = tl.arange(0, PADDED_HIDDEN)[None, :]
    total = tl.zeros([1, PADDED_HIDDEN], tl.float32)
    for i in tl.static_range(COUNT):
        at = streams + (token * COUNT + i) * HIDDEN + place
        weight = tl.sum(tl.where(state == i, read, 0.0), 0)
        total += weight * tl.load(at, mask=place < HIDDEN, other=0.0).to(tl.float32)
    if KIND != "":
        total = total.to(streams.dtype.element_ty).to(tl.float32)
        total = normalise(total, place, gain, bias, norm_eps, HIDDEN, KIND, HAS_GAIN, HAS_BIAS)
    into = normed + token * HIDDEN + place
    tl.store(into, total.to(normed.dtype.element_ty), mask=place < HIDDEN)


@triton.jit
def weigh(
    parts,
    base,
    scale,
    size,
    place,  # [N]
    there,
    shares,
    WEIGHTS: tl.constexpr,
    MOST_SHARES: tl.constexpr,
):
    """Return what the weights at `place` are computed from, [N]; 0 where none are `there`."""
    share = tl.arange(0, MOST_SHARES)[:, None]
    at = parts + share * (WEIGHTS + 1) + place[None, :]
    every = tl.load(at, mask=(share < shares) & there[None, :], other=0.0)
    return tl.sum(every, 0) * size * scale + tl.load(base + place, mask=there, other=0.0)


@triton.jit
def balance(
    x,  # float32 [PADDED, PADDED]
    eps,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    ITERATIONS: tl.constexpr,
):
    """Return the softmax of each row with rows and columns that add up to one (Sinkhorn)."""
    inside = tl.arange(0, PADDED) < COUNT
    there = inside[:, None] & inside[None, :]
    odds = tl.exp(x - tl.max(tl.where(there, x, float("-inf")), 1)[:, None])
    odds = tl.where(there, odds, 0.0)
    total = tl.where(inside, tl.sum(odds, 1), 1.0)
    odds = tl.where(there, odds / total[:, None] + eps, 0.0)
    odds = tl.where(there, odds / (tl.sum(odds, 0)[None, :] + eps), 0.0)
    for _ in range(ITERATIONS - 1):
        odds = tl.where(there, odds / (tl.sum(odds, 1)[:, None] + eps), 0.0)
        odds = tl.where(there, odds / (tl.sum(odds, 0)[None, :] + eps), 0.0)
    return odds


@triton.jit(do_not_specialize=["tokens"])
def write_streams(
    written,  # [T, COUNT, HIDDEN]
    parts,  # of what is written, as for `mix_streams`; with WEIGHTS
    streams,  # [T, COUNT, HIDDEN]
    found,  # [T, HIDDEN]: a part's result
    weights,  # with PER_TOKEN, `found` has the parts of experts, for `sum_experts`, as these two
    gate_logits,
    beside,
    added,  # float32 [T, COUNT]
    mixture,  # float32 [T, COUNT, COUNT], read with MIXES
    mix,
    tokens,
    COUNT: tl.constexpr,
    HIDDEN: tl.constexpr,
    MIXES: tl.constexpr,
    WEIGHTS: tl.constexpr,  # of the next part; 0: there is none
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PER_TOKEN: tl.constexpr,  # experts; 0: `found` is no sum of experts
    SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BESIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Mix tokens' states and add a part's result to each; see `HyperConnection.leave`.

    A step writes some numbers of one state. The next one those of the next state, as both read the
    same numbers, and add the same part of a result.
    """
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    dtype = streams.dtype.element_ty
    begin, end = find_share((HIDDEN + DEPTH - 1) // DEPTH * COUNT)
    total, square = tl.zeros([TOKENS, PADDED], tl.float32), tl.zeros([TOKENS], tl.float32)
    result = tl.zeros([TOKENS, DEPTH], tl.float32)
    for step in range(begin, end):
        to, place = step % COUNT, step // COUNT * DEPTH + tl.arange(0, DEPTH)[None, :]
        there = (token < tokens) & (place < HIDDEN)
        if PER_TOKEN:
            if (to == 0) | (step == begin):
                result = sum_experts(
                    found, weights, gate_logits, beside, tl.minimum(token, tokens - 1), place,
                    HIDDEN, PER_TOKEN, SHARED, HAS_GATE, BESIDE,
                )  # fmt: skip
        else:
            result = tl.load(found + token * HIDDEN + place, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(added + token * COUNT + to, mask=token < tokens, other=0.0)
        if MIXES:  # weights are rounded as torch does before its products
            x = weight.to(dtype).to(tl.float32) * result
            for i in tl.static_range(COUNT):
                at = mixture + (token * COUNT + i) * COUNT + to
                share = tl.load(at, mask=token < tokens, other=0.0).to(dtype).to(tl.float32)
                at = streams + (token * COUNT + i) * HIDDEN + place
                x += share * tl.load(at, mask=there, other=0.0).to(tl.float32)
        else:
            at = streams + (token * COUNT + to) * HIDDEN + place
            x = weight * result + tl.load(at, mask=there, other=0.0).to(tl.float32)
        x = x.to(dtype)
        tl.store(written + (token * COUNT + to) * HIDDEN + place, x, mask=there)
        if WEIGHTS:
            x, at = x.to(tl.float32), to * HIDDEN + place
            inside = place < HIDDEN
            total = multiply(total, x, mix, at, inside, COUNT * HIDDEN, WEIGHTS, PADDED, PRECISION)
            square += tl.sum(x * x, 1)
    if WEIGHTS:
        store_parts(parts, total, square, token, tokens, WEIGHTS, PADDED)
