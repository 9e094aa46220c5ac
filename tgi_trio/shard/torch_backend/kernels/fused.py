"""Sums and norms between two products of a layer, in one launch; `rotating.py` is before attention.

Sums are float32. Results are rounded where torch's separate operations would round them. Offsets
are of 64 bits wherever tokens are involved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.combining import sum_experts
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


@triton.jit
def normalise(
    x,  # float32 [rows, padded SIZE], 0 beyond SIZE
    place,  # [1, padded SIZE]
    gain,  # [SIZE], read with HAS_GAIN
    bias,
    eps,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return each row of `x` normalised.

    KIND: "rms", "rms_plus_one" (whose gain already has the one added) or "layer".
    """
    inside = place < SIZE
    if KIND == "layer":
        x = tl.where(inside, x - (tl.sum(x, 1) / SIZE)[:, None], 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    if HAS_GAIN:
        x = x * tl.load(gain + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def add_and_normalise(
    normed,  # [T, SIZE]
    wide,  # float32 [T, SIZE]: the same numbers, written with WIDENS
    summed,  # [T, SIZE], written with ADDS
    x,  # [T, SIZE]
    first,  # [T, SIZE]: added with ADDS, after a norm with FIRST_KIND, times `scale`
    weights,  # with PER_TOKEN, `first` has the parts of experts, for `sum_experts`, as these two
    gate_logits,
    beside,
    second,  # [T, SIZE]: added with ADDS_SECOND, times `second_scale`
    first_gain,  # [SIZE], as are the next; read with HAS_FIRST_GAIN
    first_bias,
    gain,
    bias,
    first_eps,
    eps,
    scale,
    second_scale,
    factor,  # [1]: multiplies the sum with MULTIPLIES
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    ADDS: tl.constexpr,
    PER_TOKEN: tl.constexpr,  # experts; 0: `first` is no sum of experts
    SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BESIDE: tl.constexpr,
    ADDS_SECOND: tl.constexpr,
    SCALES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    FIRST_KIND: tl.constexpr,  # "": none
    HAS_FIRST_GAIN: tl.constexpr,
    HAS_FIRST_BIAS: tl.constexpr,
    KIND: tl.constexpr,  # "": no norm, only the sum
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add a layer's output to the hidden state and normalise the sum; one program per token."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    add_and_normalise_token(
        tl.program_id(0), normed, wide, summed, x, first, weights, gate_logits, beside, second,
        first_gain, first_bias, gain, bias, first_eps, eps, scale, second_scale, factor, SIZE,
        PADDED, ADDS, PER_TOKEN, SHARED, HAS_GATE, BESIDE, ADDS_SECOND, SCALES, MULTIPLIES,
        FIRST_KIND, HAS_FIRST_GAIN, HAS_FIRST_BIAS, KIND, HAS_GAIN, HAS_BIAS, WIDENS,
    )  # fmt: skip


# fmt: off
@triton.jit
def add_and_normalise_token(
    token,  # the others as for `add_and_normalise`
    normed, wide, summed, x, first, weights, gate_logits, beside, second, first_gain, first_bias,
    gain, bias, first_eps, eps, scale, second_scale, factor,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr, PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr, HAS_GATE: tl.constexpr, BESIDE: tl.constexpr, ADDS_SECOND: tl.constexpr,
    SCALES: tl.constexpr, MULTIPLIES: tl.constexpr, FIRST_KIND: tl.constexpr,
    HAS_FIRST_GAIN: tl.constexpr, HAS_FIRST_BIAS: tl.constexpr, KIND: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr, WIDENS: tl.constexpr,
):
    """Do what a program of `add_and_normalise` does."""
    dtype = x.dtype.element_ty
    place = tl.arange(0, PADDED)[None, :]
    inside = place < SIZE
    token = token.to(tl.int64)
    at = token * SIZE + place
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        if PER_TOKEN:
            more = sum_experts(
                first, weights, gate_logits, beside, token, place,
                SIZE, PER_TOKEN, SHARED, HAS_GATE, BESIDE,
            )
        else:
            more = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
        value = add_found(
            value, more, place, first_gain, first_bias, first_eps, scale, dtype,
            SIZE, SCALES, FIRST_KIND, HAS_FIRST_GAIN, HAS_FIRST_BIAS,
        )
        if ADDS_SECOND:
            more = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
            value = add_scaled(value, more, second_scale, dtype)
        if MULTIPLIES:
            value = (value * tl.load(factor).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(summed + at, value.to(dtype), mask=inside)
    if KIND != "":
        value = normalise(value, place, gain, bias, eps, SIZE, KIND, HAS_GAIN, HAS_BIAS)
        tl.store(normed + at, value.to(dtype), mask=inside)
        if WIDENS:
            tl.store(wide + at, value.to(dtype).to(tl.float32), mask=inside)
# fmt: on


@triton.jit
def add_found(
    value,  # float32 [rows, padded SIZE]
    more,
    place,  # [1, padded SIZE]
    gain,  # [SIZE], read where HAS_GAIN
    bias,
    eps,
    scale,
    dtype: tl.constexpr,
    SIZE: tl.constexpr,
    SCALES: tl.constexpr,
    KIND: tl.constexpr,  # "": `more` is not normalised
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return value + scale * norm(more), rounded as torch does at each step."""
    if KIND != "":
        more = normalise(more, place, gain, bias, eps, SIZE, KIND, HAS_GAIN, HAS_BIAS)
        more = more.to(dtype).to(tl.float32)
    if SCALES:
        return add_scaled(value, more, scale, dtype)
    return (value + more).to(dtype).to(tl.float32)


@triton.jit
def add_scaled(value, more, scale, dtype: tl.constexpr):
    """Return value + scale * more, rounded as torch does at each step."""
    return (value + (more * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def load_normalised(
    at,
    gain,
    bias,
    eps,
    dim,  # [1, padded SIZE]
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return the SIZE numbers at `at`, normalised, float32 [1, padded SIZE]."""
    x = tl.load(at + dim, mask=dim < SIZE, other=0.0).to(tl.float32)
    return normalise(x, dim, gain, bias, eps, SIZE, KIND, HAS_GAIN, HAS_BIAS)


@triton.jit
def rotate(
    at,  # pointers to the first of ROTARY numbers, [lanes, 1] or a single one
    cos,
    sin,
    token,  # of each pointer
    dim,  # [1, padded ROTARY]
    there,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return numbers rotated by their token's cosines and sines, float32."""
    other = find_partner(dim, ROTARY, INTERLEAVED)
    x = tl.load(at + dim, mask=there, other=0.0).to(tl.float32)
    y = tl.load(at + other, mask=there, other=0.0).to(tl.float32)
    c = tl.load(cos + token * ROTARY + dim, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + token * ROTARY + dim, mask=there, other=0.0).to(tl.float32)
    return x * c + y * s


@triton.jit
def find_partner(dim, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the dimension with which each of ROTARY dimensions rotates."""
    half: tl.constexpr = ROTARY // 2
    return dim ^ 1 if INTERLEAVED else tl.where(dim < half, dim + half, dim - half)
