"""The product that yields queries, keys and values of few rows, with rotation and cache write.

It is the product of `few_rows.py` with `rotate_and_write` as its epilogue: queries and keys are
rotated as they are computed, and keys and values are written to their slots. A program has both
numbers of the pairs that rotate together, so it needs no results of others. It computes some pairs
of one head and ends: the matrix of a small model hardly has more of them than a device runs at
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.linears.few_rows import read_rows
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# fmt: off
@triton.jit
def multiply_heads(
    query,  # [ROWS, HEADS, DIM]
    key,  # [slots, KV_HEADS, DIM]: one layer of the cache
    value,
    slots,  # int64 [ROWS]
    cos,  # [ROWS, ROTARY], as `Rotary.table` makes them
    sin,  # with the sign of the rotation
    x,  # [ROWS, INPUTS]
    weight,  # [(HEADS + 2 KV_HEADS) DIM, INPUTS]
    bias,  # of each output; read with HAS_BIAS only
    summed, first, second, first_gain, first_bias, gain, norm_bias, first_eps, eps,
    scale, second_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,  # leading dimensions that are rotated; 0: none
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,  # of a program, a power of two that divides DIM / 2
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
    # As for `multiply_few`, like the arguments from `summed` to `second_scale`.
    ROWS: tl.constexpr, INPUTS: tl.constexpr, PADDED: tl.constexpr,
    ADDS: tl.constexpr, ADDS_SECOND: tl.constexpr, SCALES: tl.constexpr,
    FIRST_KIND: tl.constexpr, HAS_FIRST_GAIN: tl.constexpr, HAS_FIRST_BIAS: tl.constexpr,
    KIND: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
):
    """Multiply rows by a matrix, rotate queries and keys, write keys and values to their slots."""
    let_next_begin(OVERLAPS)
    low = tl.program_id(0) * PAIRS
    head = low // (DIM // 2)
    dim, other = find_pairs(low % (DIM // 2) + tl.arange(0, PAIRS), ROTARY, INTERLEAVED)
    place = tl.arange(0, PADDED)[None, None, :]
    at = weight + head.to(tl.int64) * DIM * INPUTS + place
    w = tl.load(at + dim[None, :, None] * INPUTS, mask=place < INPUTS, other=0.0)
    v = tl.load(at + other[None, :, None] * INPUTS, mask=place < INPUTS, other=0.0)
    wait_for_earlier(OVERLAPS)
    row = tl.arange(0, ROWS)[:, None]
    slot = tl.load(slots + row)
    turns = (dim < ROTARY)[None, :] & (head < HEADS + KV_HEADS)  # values are not rotated
    c, s = load_turn(cos, sin, row, dim, turns, ROTARY)
    other_c, other_s = load_turn(cos, sin, row, other, turns, ROTARY)
    a = read_rows(
        x, summed, first, second, first_gain, first_bias, gain, norm_bias, first_eps, eps, scale,
        second_scale, ROWS, INPUTS, PADDED, ADDS, ADDS_SECOND, SCALES, FIRST_KIND, HAS_FIRST_GAIN,
        HAS_FIRST_BIAS, KIND, HAS_GAIN, HAS_NORM_BIAS,
    )[:, None, :].to(tl.float32)
    p, q = tl.sum(w.to(tl.float32) * a, 2), tl.sum(v.to(tl.float32) * a, 2)
    if HAS_BIAS:
        p += tl.load(bias + head * DIM + dim).to(tl.float32)[None, :]
        q += tl.load(bias + head * DIM + other).to(tl.float32)[None, :]
    dtype = query.dtype.element_ty
    p, q = p.to(dtype).to(tl.float32), q.to(dtype).to(tl.float32)
    if ROTARY:
        turned = p * c + q * s
        q = tl.where(turns, q * other_c + p * other_s, q)
        p = tl.where(turns, turned, p)
    if head < HEADS:
        out = query + (row * HEADS + head) * DIM
    elif head < HEADS + KV_HEADS:
        out = key + (slot * KV_HEADS + head - HEADS) * DIM
    else:
        out = value + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM
    tl.store(out + dim[None, :], p.to(dtype))
    tl.store(out + other[None, :], q.to(dtype))
# fmt: on


@triton.jit
def find_pairs(pair, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return both dimensions of pairs [PAIRS] of a head.

    Where halves rotate, a pair has one dimension of each half; otherwise it has two neighbours.
    """
    half: tl.constexpr = ROTARY // 2
    apart = pair < (0 if INTERLEAVED else half)
    return tl.where(apart, pair, 2 * pair), tl.where(apart, pair + half, 2 * pair + 1)


@triton.jit
def load_turn(cos, sin, row, dim, turns, ROTARY: tl.constexpr):
    """Return cosines and sines [ROWS, PAIRS] of dimensions, float32; 1 and 0 unless it `turns`."""
    at = row * ROTARY + dim[None, :]
    c = tl.load(cos + at, mask=turns, other=1.0).to(tl.float32)
    return c, tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)
