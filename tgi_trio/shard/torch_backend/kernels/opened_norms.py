"""Sums, norms and the gates of low rank behind these (`layers/norm_gate.py`), in one launch.

A program has all of a token's numbers, or some tokens one after the other, which then share what is
read of the gates' matrices. Sums are float32. Results are rounded where torch's separate operations
would round them. Offsets are of 64 bits wherever tokens are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.fused import add_and_normalise_token
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def add_and_open(
    opened,  # [T, SIZE]: the norm of the sum, times its gates
    # As for `add_and_normalise`:
    normed, wide, summed, x, first, weights, gate_logits, beside, second, first_gain, first_bias,
    gain, bias, first_eps, eps, scale, second_scale, factor,
    down,  # [RANK, SIZE], contiguous
    up,  # [SIZE, RANK], contiguous
    tokens,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr, HAS_GATE: tl.constexpr, BESIDE: tl.constexpr, ADDS_SECOND: tl.constexpr,
    SCALES: tl.constexpr, MULTIPLIES: tl.constexpr, FIRST_KIND: tl.constexpr,
    HAS_FIRST_GAIN: tl.constexpr, HAS_FIRST_BIAS: tl.constexpr, KIND: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, WIDENS: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program; a power of two, as is
    BLOCK: tl.constexpr,  # the numbers of a token that are multiplied at a time
    AHEAD: tl.constexpr,  # blocks that are loaded before they are
    OVERLAPS: tl.constexpr,
):
    """Add a layer's output, normalise the sum, and multiply it by sigmoid(up(silu(down(norm))))."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    begin = tl.program_id(0) * TOKENS
    for token in range(begin, tl.minimum(begin + TOKENS, tokens)):
        add_and_normalise_token(
            begin * 0 + token, normed, wide, summed, x, first, weights, gate_logits, beside, second,
            first_gain, first_bias, gain, bias, first_eps, eps, scale, second_scale, factor, SIZE,
            PADDED, ADDS, PER_TOKEN, SHARED, HAS_GATE, BESIDE, ADDS_SECOND, SCALES, MULTIPLIES,
            FIRST_KIND, HAS_FIRST_GAIN, HAS_FIRST_BIAS, KIND, HAS_GAIN, HAS_BIAS, WIDENS,
        )
    tl.debug_barrier()  # norms are written before they are read
    token = (begin + tl.arange(0, TOKENS))[:, None]
    real, at = token < tokens, token.to(tl.int64) * SIZE
    narrow = measure_gates(normed + at, down, real, SIZE, RANK, PADDED_RANK, TOKENS, BLOCK, AHEAD)
    rank = tl.arange(0, PADDED_RANK)[:, None]
    for low in tl.range(0, SIZE, BLOCK, num_stages=AHEAD):
        place = low + tl.arange(0, BLOCK)[None, :]
        there = (place < SIZE) & (rank < RANK)
        w = tl.load(up + place.to(tl.int64) * RANK + rank, there, other=0.0).to(tl.float32)
        gate = tl.sum(narrow[:, :, None] * w[None, :, :], 1).to(opened.dtype.element_ty)
        there = real & (place < SIZE)
        value = tl.load(normed + at + place, there, other=0.0).to(tl.float32)
        value *= tl.sigmoid(gate.to(tl.float32))
        tl.store(opened + at + place, value.to(opened.dtype.element_ty), there)


@triton.jit
def measure_gates(
    normed,  # pointers to the norms of tokens, [TOKENS, 1]
    down, real,
    SIZE: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):
    """Return silu(down(norm)), rounded twice, float32 [TOKENS, PADDED_RANK]."""
    dtype = down.dtype.element_ty
    total = tl.zeros([TOKENS, PADDED_RANK, BLOCK], tl.float32)
    rank = tl.arange(0, PADDED_RANK)[:, None]
    for low in tl.range(0, SIZE, BLOCK, num_stages=AHEAD):
        place = low + tl.arange(0, BLOCK)[None, :]
        there = (place < SIZE) & (rank < RANK)
        w = tl.load(down + rank * SIZE + place, there, other=0.0).to(tl.float32)
        value = tl.load(normed + place, real & (place < SIZE), other=0.0).to(tl.float32)
        total += value[:, None, :] * w[None, :, :]
    narrow = tl.sum(total, 2).to(dtype).to(tl.float32)
    return (narrow * tl.sigmoid(narrow)).to(dtype).to(tl.float32)
# fmt: on
