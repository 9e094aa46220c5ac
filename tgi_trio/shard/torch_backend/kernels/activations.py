"""Activations and what opens gates and values, each in one launch.

Computed in float32. Results are rounded where torch's separate operations would round them. Offsets
are of 64 bits wherever tokens are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Return an activation of float32 numbers, named as in `layers/gating.py`."""
    if ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "quick_gelu":
        return x * tl.sigmoid(1.702 * x)
    elif ACT == "relu":
        return tl.maximum(x, 0.0)
    elif ACT == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        tl.static_assert(ACT == "sigmoid")
        return tl.sigmoid(x)


@triton.jit
def gate(
    out,  # [T, SIZE]
    inner,  # [T, 2 SIZE]: gates, then ups; PAIRED: alternating
    limit,
    scale,  # of gates, before the limit
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
    LIMITS: tl.constexpr,
    RAISED: tl.constexpr,
    PAIRED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute act(gate) * up; LIMITS, RAISED: see `layers/gating.py`."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    source = inner + token * 2 * SIZE
    opened = open_pairs(source, place, inside, SIZE, limit, scale, out, ACT, LIMITS, RAISED, PAIRED)
    tl.store(out + token * SIZE + place, opened.to(dtype), mask=inside)


@triton.jit
def open_pairs(
    inner,  # a pointer to a token's gates, or pointers [tokens, 1]
    place,  # which of `size` gates
    inside,
    size,
    limit,
    scale,
    like,  # a pointer to the dtype to which torch would round
    ACT: tl.constexpr,
    LIMITS: tl.constexpr,
    RAISED: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Return act(gate) * up of gates with their ups, float32, yet to be rounded."""
    dtype = like.dtype.element_ty
    source = inner + place * (2 if PAIRED else 1)
    gates = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    gates = (gates * scale).to(dtype).to(tl.float32)
    up = tl.load(source + (1 if PAIRED else size), mask=inside, other=0.0).to(tl.float32)
    if LIMITS:
        gates, up = limit_up(gates, up, limit, like, RAISED)
    return activate(gates, ACT).to(dtype).to(tl.float32) * up


@triton.jit(do_not_specialize=["count"])
def activate_alone(
    out,  # [count], as is `x`
    x,
    positive,  # [1], as are the next: the parameters of xIELU, read with ACT "xielu"
    negative,
    beta,
    eps,
    count,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute act(x)."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ACT == "xielu":
        value = open_xielu(value, positive, negative, beta, eps)
    else:
        value = activate(value, ACT)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def open_xielu(x, positive, negative, beta, eps):
    """Return xIELU of float32 numbers; the parameters are those of `layers/activation.py`."""
    least = tl.minimum(x, tl.load(eps).to(tl.float32))
    # exp(u) - 1 - u: near 0 by its series, as the difference would have few digits.
    series = 1.0 / 24.0 + least * (1.0 / 120.0 + least * (1.0 / 720.0 + least / 5040.0))
    series = least * least * (0.5 + least * (1.0 / 6.0 + least * series))
    beyond = tl.where(least > -0.25, series, tl.exp(least) - 1.0 - least)
    below = (beyond + (least - x)) * tl.load(negative).to(tl.float32)
    above = tl.load(positive).to(tl.float32) * x * x
    return tl.where(x > 0, above, below) + tl.load(beta).to(tl.float32) * x


@triton.jit
def open_own(
    out,  # [T, SIZE], as are the next two
    gates,
    own,  # with `stride` between tokens
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute act(gates) * own."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    opened = tl.load(gates + token * SIZE + place, mask=inside, other=0.0).to(tl.float32)
    opened = activate(opened, ACT).to(dtype).to(tl.float32)
    value = tl.load(own + token * stride + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + place, (opened * value).to(dtype), mask=inside)


@triton.jit
def open_values(
    out,  # [T, SIZE]
    values,  # [T, SIZE], with a stride between tokens, as have the next
    gates,  # [T, SIZE / EACH]
    value_stride,
    gate_stride,
    SIZE: tl.constexpr,
    EACH: tl.constexpr,  # neighbouring values that a gate opens
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,  # opened gates, to the dtype
    OVERLAPS: tl.constexpr,
):
    """Compute values * sigmoid(gates)."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    dtype = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    opened = tl.load(gates + token * gate_stride + place // EACH, mask=inside, other=0.0)
    opened = tl.sigmoid(opened.to(tl.float32))
    if ROUNDS:
        opened = opened.to(dtype).to(tl.float32)
    value = tl.load(values + token * value_stride + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + place, (value * opened).to(dtype), mask=inside)


@triton.jit
def open_heads(
    values,  # float32, of heads
    gates,  # pointers to the first gate of each token
    head,
    dim,  # which of a head's numbers
    there,
    like,  # a pointer to the dtype to which torch would round
    DIM: tl.constexpr,  # numbers of a head
    EACH: tl.constexpr,  # neighbouring ones that a gate opens: 1, or all of a head's
):
    """Return values * sigmoid(gates), all rounded as `open_values` does."""
    dtype = like.dtype.element_ty
    opened = tl.load(gates + (head * DIM + dim) // EACH, mask=there, other=0.0).to(tl.float32)
    opened = tl.sigmoid(opened).to(dtype).to(tl.float32)
    return values.to(dtype).to(tl.float32) * opened


@triton.jit
def open_stored(
    out,
    gates,
    which,
    head,
    real,
    LANES: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    EACH: tl.constexpr,
):
    """Multiply the results of a tile by their gates, where they lie: registers have no room."""
    some: tl.constexpr = min(PADDED_DIM, max(16, 2048 // LANES))  # numbers of a head at a time
    tl.debug_barrier()  # results are written before they are read
    for low in range(0, DIM, some):
        dim = low + tl.arange(0, some)[None, :]
        there, at = real[:, None] & (dim < DIM), out + which[:, None] * DIM + dim
        result = tl.load(at, mask=there, other=0.0).to(tl.float32)
        result = open_heads(result, gates[:, None], head[:, None], dim, there, out, DIM, EACH)
        tl.store(at, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def limit_up(gates, up, limit, like, RAISED: tl.constexpr):
    """Return gates and ups clamped to a limit, the latter plus 1 if RAISED.

    `like`: a pointer to the dtype to which torch would round.
    """
    up = tl.minimum(tl.maximum(up, -limit), limit)
    if RAISED:
        up += 1.0
    return tl.minimum(gates, limit), up.to(like.dtype.element_ty).to(tl.float32)
