"""What lies between the products of gated hidden states (`layers/gated_streams.py`).

Sums are float32. Results are rounded where torch's separate operations would round them. Offsets
are of 64 bits wherever tokens are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_to_streams(
    normed,  # [T, COUNT, SIZE], written with NORMS
    summed,  # [T, COUNT, SIZE], written with ADDS
    streams,  # [T, COUNT, SIZE]
    said,  # [T, SIZE]: added to every state, times its factor
    factors,  # [T, COUNT] before their activation, with `stride` between tokens
    weight,  # float32 [COUNT, SIZE]
    eps,
    stride,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    COUNT: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Add what a part said to one hidden state of a token, and normalise the sum (RMS)."""
    dtype = streams.dtype.element_ty
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, PADDED)
    inside = place < SIZE
    at = (token * COUNT + stream) * SIZE + place
    x = tl.load(streams + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        factor = tl.load(factors + token * stride + stream).to(tl.float32) / COUNT
        factor = 2.0 * tl.sigmoid(factor.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        more = tl.load(said + token * SIZE + place, mask=inside, other=0.0).to(tl.float32)
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
