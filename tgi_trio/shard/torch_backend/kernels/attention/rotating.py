"""Queries, keys and values between their projection and attention, in one launch.

A program has some heads of one token: it clips, normalises and rotates queries and keys, the last
two in either order, and writes keys and values to their slots. Sums are float32. Results are
rounded where torch's separate operations would round them. Offsets are of 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.eight_bits import store_number
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


@triton.jit
def rotate_and_write(
    query,  # [T, HEADS, DIM], written if FIRST is 0
    key,  # [slots, KV_HEADS, DIM]: one layer of the cache
    value,  # [slots, KV_HEADS, VALUE]
    qkv,  # [T, ...], with `stride` between tokens: all heads of queries, of keys and of values
    cos,  # [T, ROTARY], as `Rotary.table` makes them
    sin,  # with the sign of the rotation
    slots,  # int64 [T]
    gain,  # [HEADS + KV_HEADS, DIM], with NORM
    bias,
    query_scale,  # [T], with SCALES_QUERIES: factors of rotated queries
    eps,
    clip,
    value_factor,  # of values, normalised ones included
    key_scale,  # of 8-bit K and V
    value_scale,
    stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,  # numbers of a value
    PADDED_DIM: tl.constexpr,  # the next power of two of the larger one
    ROTARY: tl.constexpr,  # leading dimensions that are rotated; 0: none
    INTERLEAVED: tl.constexpr,
    CLIPS: tl.constexpr,
    NORM: tl.constexpr,  # "": no norm; "whole": RMS of all heads of queries, and of all of keys
    NORM_LAST: tl.constexpr,  # heads are normalised behind their rotation, not before
    HAS_BIAS: tl.constexpr,
    SCALES_QUERIES: tl.constexpr,
    KEYS_AS_VALUES: tl.constexpr,  # values are the keys before norm and rotation
    VALUE_NORM: tl.constexpr,  # each value is normalised, without weights
    CODES: tl.constexpr,  # of the cache; see `eight_bits.py`
    FIRST: tl.constexpr,  # first head to compute: HEADS if nothing happens to queries
    BLOCK: tl.constexpr,  # heads of a program
    OVERLAPS: tl.constexpr,
):
    """Clip, normalise and rotate queries and keys; write keys and values to their slots."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    write_some_heads(
        tl.program_id(0), tl.program_id(1), query, key, value, qkv, cos, sin, slots, gain, bias,
        query_scale, eps, clip, value_factor, key_scale, value_scale, stride, HEADS, KV_HEADS, DIM,
        VALUE, PADDED_DIM, ROTARY, INTERLEAVED, CLIPS, NORM, NORM_LAST, HAS_BIAS, SCALES_QUERIES,
        KEYS_AS_VALUES, VALUE_NORM, CODES, FIRST, BLOCK,
    )  # fmt: skip


# fmt: off
@triton.jit
def write_some_heads(
    token,
    part,  # which heads of it; the others as for `rotate_and_write`
    query, key, value, qkv, cos, sin, slots, gain, bias, query_scale, eps, clip, value_factor,
    key_scale, value_scale, stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, CLIPS: tl.constexpr,
    NORM: tl.constexpr, NORM_LAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCALES_QUERIES: tl.constexpr, KEYS_AS_VALUES: tl.constexpr, VALUE_NORM: tl.constexpr,
    CODES: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):
    """Do what a program of `rotate_and_write` does."""
    token = token.to(tl.int64)
    slot = tl.load(slots + token)
    first = FIRST + part * BLOCK
    head = first + tl.arange(0, BLOCK)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    dtype = qkv.dtype.element_ty
    turning = head < HEADS + KV_HEADS  # not values
    there = (head < HEADS + 2 * KV_HEADS) & (dim < tl.where(turning, DIM, VALUE))
    behind = KV_HEADS * DIM if KEYS_AS_VALUES else (head - HEADS - KV_HEADS) * (DIM - VALUE)
    source = qkv + token * stride + head * DIM - tl.where(turning, 0, behind)
    x = load_clipped(source + dim, there, clip, CLIPS)
    plain = x
    if VALUE_NORM:
        plain = x * tl.rsqrt(tl.sum(x * x, 1) / VALUE + eps)[:, None]
        plain = plain.to(dtype).to(tl.float32)
    normed = there & turning
    before: tl.constexpr = "" if NORM_LAST else NORM
    if before == "whole":
        own = qkv + token * stride
        mean, scale = measure_whole(own, first, head, clip, eps, HEADS, KV_HEADS, DIM, BLOCK, CLIPS)
    else:
        mean, scale = measure_heads(x, dim, eps, DIM, before)
    if before != "":
        x = weigh_head(x, dim, head, normed, mean, scale, gain, bias, DIM, NORM, HAS_BIAS, qkv)
    if ROTARY:
        half: tl.constexpr = ROTARY // 2
        other = dim ^ 1 if INTERLEAVED else tl.where(dim < half, dim + half, dim - half)
        inside = dim < ROTARY
        y = load_clipped(source + other, there & inside, clip, CLIPS)
        if before != "":
            seen = normed & inside
            y = weigh_head(y, other, head, seen, mean, scale, gain, bias, DIM, NORM, HAS_BIAS, qkv)
        c = tl.load(cos + token * ROTARY + dim, mask=inside, other=1.0).to(tl.float32)
        s = tl.load(sin + token * ROTARY + dim, mask=inside, other=0.0).to(tl.float32)
        x = x * c + y * s
    if before != NORM:
        x = x.to(dtype).to(tl.float32)
        mean, scale = measure_heads(x, dim, eps, DIM, NORM)
        x = weigh_head(x, dim, head, normed, mean, scale, gain, bias, DIM, NORM, HAS_BIAS, qkv)
    if SCALES_QUERIES:
        factor = tl.where(head < HEADS, tl.load(query_scale + token).to(tl.float32), 1.0)
        x = x.to(dtype).to(tl.float32) * factor
    x = tl.where(turning, x, plain * value_factor)
    if FIRST == 0:
        into = query + (token * HEADS + head) * DIM + dim
        tl.store(into, x.to(query.dtype.element_ty), mask=there & (head < HEADS))
    at = slot * KV_HEADS + head - HEADS
    store_number(key + at * DIM + dim, x, key_scale, qkv, normed & (head >= HEADS), CODES)
    into = value + (at - KV_HEADS) * VALUE + dim
    store_number(into, x, value_scale, qkv, there & (head >= HEADS + KV_HEADS), CODES)
# fmt: on


@triton.jit
def load_clipped(at, there, clip, CLIPS: tl.constexpr):
    """Return float32 numbers, clamped to +-`clip` if CLIPS."""
    x = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if CLIPS:
        x = tl.minimum(tl.maximum(x, -clip), clip)
    return x


@triton.jit
def measure_heads(x, dim, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """Return each head's mean, which is subtracted, and the factor that follows."""
    mean = tl.zeros([x.shape[0], 1], tl.float32)
    scale = tl.full([x.shape[0], 1], 1.0, tl.float32)
    if NORM == "layer":
        mean = (tl.sum(x, 1) / DIM)[:, None]
    if NORM != "":
        centred = tl.where(dim < DIM, x - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 1) / DIM + eps)[:, None]
    return mean, scale


@triton.jit
def measure_whole(
    own,  # a token's numbers
    first,  # of the heads `head` [BLOCK, 1]
    head,
    clip,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CLIPS: tl.constexpr,
):
    """Return the same where all heads of queries are normalised together, and all of keys.

    Each program adds up all numbers of what it has heads of.
    """
    queries, keys = 0.0, 0.0
    if first < HEADS:
        queries = average_squares(own, clip, HEADS * DIM, CLIPS)
    if (first + BLOCK > HEADS) & (first < HEADS + KV_HEADS):
        keys = average_squares(own + HEADS * DIM, clip, KV_HEADS * DIM, CLIPS)
    scale = tl.rsqrt(tl.where(head < HEADS, queries, keys) + eps)
    return tl.zeros([BLOCK, 1], tl.float32), scale


@triton.jit
def average_squares(source, clip, SIZE: tl.constexpr, CLIPS: tl.constexpr):
    """Return the mean of the squares of so many numbers."""
    place = tl.arange(0, 2048)
    total = tl.zeros([2048], tl.float32)
    for low in range(0, SIZE, 2048):
        x = load_clipped(source + low + place, low + place < SIZE, clip, CLIPS)
        total += x * x
    return tl.sum(total, 0) / SIZE


@triton.jit
def weigh_head(
    x,  # float32 [heads, padded DIM]
    dim,
    head,
    inside,
    mean,  # float32 [heads, 1], as is `scale`
    scale,
    gain,
    bias,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    like,  # a pointer to the dtype to which torch would round
):
    """Return x normalised with its head's mean and scale."""
    dtype = like.dtype.element_ty
    x = (x - mean) * scale
    if NORM != "rms_plus_one" and NORM != "whole":  # these are computed in float32 throughout
        x = x.to(dtype).to(tl.float32)
    x = x * tl.load(gain + head * DIM + dim, mask=inside, other=0.0).to(tl.float32)
    x = x.to(dtype).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + head * DIM + dim, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
    return x
