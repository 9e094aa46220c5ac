"""What lies between the products of gated hidden states (`layers/streams/gated_streams.py`).

Sums are float32. Results are rounded where torch's separate operations would round them. Offsets
are of 64 bits wherever tokens are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.combining import sum_experts


@triton.jit
def add_to_streams(
    normed,  # [T, COUNT, SIZE], written with NORMS
    summed,  # [T, COUNT, SIZE], written with ADDS
    streams,  # [T, COUNT, SIZE]
    said,  # [T, SIZE]: added to every state, times its factor
    weights,  # with PER_TOKEN, `said` has the parts of experts, for `sum_experts`, as these two
    gate_logits,
    beside,
    factors,  # [T, COUNT] before their activation, with `stride` between tokens
    weight,  # float32 [COUNT, SIZE]
    eps,
    stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    COUNT: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    EACH: tl.constexpr,  # hidden states of a program
    PER_TOKEN: tl.constexpr,  # experts; 0: `said` is no sum of experts
    SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Add what a part said to some hidden states of a token, and normalise the sums (RMS)."""
    dtype = streams.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    inside = place < SIZE
    if PER_TOKEN:
        more = sum_experts(
            said,
            weights,
            gate_logits,
            beside,
            token,
            place,
            SIZE,
            PER_TOKEN,
            SHARED,
            HAS_GATE,
            BESIDE,
        )
    elif ADDS:
        more = tl.load(said + token * SIZE + place, mask=inside, other=0.0).to(tl.float32)
    for ahead in range(EACH):
        stream = tl.program_id(1) * EACH + ahead
        at = (token * COUNT + stream) * SIZE + place
        x = tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
        if ADDS:
            factor = tl.load(factors + token * stride + stream).to(tl.float32) / COUNT
            factor = 2.0 * tl.sigmoid(factor.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            x = (x + (more * factor).to(dtype).to(tl.float32)).to(dtype)
            tl.store(summed + at, x, mask=inside)
            x = x.to(tl.float32)
        if NORMS:
            x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
            x = x * tl.load(weight + stream * SIZE + place, mask=inside, other=0.0)
            tl.store(normed + at, x.to(dtype), mask=inside)


@triton.jit
def activate_narrow(
    out,  # [T, RANK]
    inner,  # [T, RANK + more], with `stride` between tokens
    stride,
    RANK: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    COUNT: tl.constexpr,
):
    """Compute the input of a token's gates: SiLU of its narrow projection divided by COUNT."""
    dtype = out.dtype.element_ty
    token, place = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    x = tl.load(inner + token * stride + place, mask=place < RANK, other=0.0).to(tl.float32)
    x = (x / COUNT).to(dtype).to(tl.float32)
    tl.store(out + token * RANK + place, (x * tl.sigmoid(x)).to(dtype), mask=place < RANK)


@triton.jit
def mix_streams(
    mixed,  # [T, SIZE]
    gates,  # [T, COUNT, SIZE], before their activation
    normed,  # [T, COUNT, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # numbers of a program
    COUNT: tl.constexpr,
):
    """Compute the mean over hidden states of sigmoid(gate) * state."""
    dtype = mixed.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(COUNT):
        at = (token * COUNT + stream) * SIZE + place
        gate = tl.sigmoid(tl.load(gates + at, mask=inside, other=0.0).to(tl.float32))
        state = tl.load(normed + at, mask=inside, other=0.0).to(tl.float32)
        total += (gate.to(dtype).to(tl.float32) * state).to(dtype).to(tl.float32)
    tl.store(mixed + token * SIZE + place, (total / COUNT).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def open_narrow(
    out,  # [T, SIZE]
    narrow,  # [T, RANK], with STRIDE between tokens
    weight,  # [COUNT, SIZE, RANK], contiguous: of gates
    values,  # [T, COUNT, SIZE], contiguous
    tokens,
    STRIDE: tl.constexpr,  # known to the compiler, which loads as many numbers at once as it allows
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    COUNT: tl.constexpr,
    ROUNDS: tl.constexpr,  # opened gates are rounded to the dtype before they multiply
    TOKENS: tl.constexpr,  # of a program; all four are powers of two
    BLOCK: tl.constexpr,  # numbers of a program
    STREAMS: tl.constexpr,  # COUNT and more
    DEPTH: tl.constexpr,  # numbers of RANK that are multiplied at a time
):
    """Do what `activate_narrow`, the product with `weight` and `mix_streams` do.

    All states of a number are in one program, which holds no gate of another program.
    """
    dtype = out.dtype.element_ty
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    real, at = (token < tokens)[:, None], token.to(tl.int64)[:, None]
    lane = tl.arange(0, STREAMS * BLOCK)
    stream, place = lane // BLOCK, tl.program_id(0) * BLOCK + lane % BLOCK
    inside = (stream < COUNT) & (place < SIZE)
    gate = tl.zeros([TOKENS, STREAMS * BLOCK], tl.float32)
    row = weight + (stream.to(tl.int64) * SIZE + place)[None, :] * RANK
    for begin in range(0, RANK, DEPTH):
        number = begin + tl.arange(0, DEPTH)
        there = number < RANK
        x = tl.load(narrow + at * STRIDE + number[None, :], real & there[None, :], other=0.0)
        x = (x.to(tl.float32) / COUNT).to(dtype).to(tl.float32)
        x = (x * tl.sigmoid(x)).to(dtype)
        w = tl.load(row + number[:, None], inside[None, :] & there[:, None], other=0.0)
        gate = tl.dot(x, w, gate, input_precision="ieee")
    gate = tl.sigmoid(gate.to(dtype).to(tl.float32))
    if ROUNDS:
        gate = gate.to(dtype).to(tl.float32)
    own = at * (COUNT * SIZE) + (stream * SIZE + place)[None, :]
    value = tl.load(values + own, mask=real & inside[None, :], other=0.0).to(tl.float32)
    total = (gate * value).to(dtype).to(tl.float32)
    if STREAMS > 1:
        total = tl.sum(tl.reshape(total, (TOKENS, STREAMS, BLOCK)), 1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + at * SIZE + number, (total / COUNT).to(dtype), mask=real & (number < SIZE))
