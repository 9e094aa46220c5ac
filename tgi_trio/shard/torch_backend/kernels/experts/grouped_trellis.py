"""Products of groups of rows, each with an EXL3 matrix of its own, as they are stored.

Groups are found as in `grouped.py`, and numbers as in `trellis.py`. The matrices of all groups lie
one below the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.experts.grouped import find_group, open_gates
from tgi_trio.shard.torch_backend.kernels.linears.trellis import (
    BEHIND,
    place_inputs,
    read_tile,
    read_turned,
    turn,
    turn_scaled,
)


@triton.jit(do_not_specialize=["tokens"])
def turn_groups(
    turned,  # [SORTS, pairs, padded], sorted by group: inputs of 16 in the order of rings
    x,  # [tokens, inputs]; without GATHERS [pairs, inputs], sorted by group
    input_scales,  # float16 [GROUPS * SORTS, padded]
    pairs,  # int32 [GROUPS, tokens], as written by `route_tokens`
    counts,  # int32 [GROUPS]
    tokens,
    inputs,
    padded,
    apart,  # numbers of `turned` in a sort
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,  # the next power of two
    PER_ROW: tl.constexpr,  # groups that each row is in
    GATHERS: tl.constexpr,  # as for `multiply_groups`
    SORTS: tl.constexpr,  # ways to scale inputs, of a group
    ROWS: tl.constexpr,
):
    """Write the rows of each group times each of its sorts of scales, turned."""
    own, begin, first, count = find_group(tl.program_id(0), counts, GROUPS, PADDED_GROUPS, ROWS)
    if own < GROUPS:
        within = first + tl.arange(0, ROWS)
        real = within < count
        pair = tl.load(pairs + own.to(tl.int64) * tokens + within, mask=real, other=0)
        row = tl.where(real, pair // PER_ROW if GATHERS else begin + within, 0).to(tl.int64)
        sort = tl.program_id(2)
        i = tl.arange(0, 128)[None, :]
        k = tl.program_id(1) * 128 + i
        scales = input_scales + (own * SORTS + sort).to(tl.int64) * padded
        a = read_turned(x + row[:, None] * inputs, scales, k, inputs)
        at = sort.to(tl.int64) * apart + (begin + within).to(tl.int64)[:, None] * padded
        at += place_inputs(k, i)
        tl.store(turned + at, a.to(turned.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["tokens", "one"])
def multiply_turned_groups(
    out,  # [pairs, N]; with TURNS as `turn_groups` writes it: of 128s, in the order of rings
    turned,  # as `turn_groups` writes it
    rings,  # tensors of all groups' matrices, as are all up to `output_scales`
    sorts,
    output_scales,
    bias,  # of all outputs, read with HAS_BIAS only
    next_scales,  # float16 [GROUPS, N, up to a multiple of 128], read with TURNS
    pairs,  # int32 [GROUPS, tokens]
    counts,  # int32 [GROUPS]
    tokens,
    limit,
    padded,
    apart,  # numbers of `turned` in a sort
    one,  # the bits of 1.0
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PER_ROW: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr,  # with gates ups lie below gates, both up to a multiple of 128
    LIMITS: tl.constexpr,
    RAISED: tl.constexpr,
    TURNS: tl.constexpr,  # results are inputs of the next product: they are scaled and turned
    HALF_BITS: tl.constexpr,
    BOOK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs of one step of the loop, at most 128
):
    """Multiply rows of each group with its matrix; gates and ups of a block are one program's."""
    own, begin, first, count = find_group(tl.program_id(0), counts, GROUPS, PADDED_GROUPS, ROWS)
    if own < GROUPS:
        within = first + tl.arange(0, ROWS)
        real = within < count
        source = turned + tl.where(real, begin + within, 0).to(tl.int64) * padded
        blocks: tl.constexpr = (N + 127) // 128
        part = tl.program_id(1)
        each: tl.constexpr = 2 * blocks if ACT != "" else blocks
        block = own.to(tl.int64) * each + part
        total = multiply_block(
            source, rings, sorts, output_scales, block, padded, apart, one, HALF_BITS, BOOK, DEPTH
        )
        column = (part * 128 + tl.arange(0, 128))[None, :]
        there = column < N
        at = bias + own * (2 * N if ACT != "" else N) + column
        if HAS_BIAS:
            total += tl.load(at, mask=there, other=0.0).to(tl.float32)
        if ACT != "":
            up = multiply_block(
                source, rings, sorts, output_scales, block + blocks, padded, apart, one, HALF_BITS,
                BOOK, DEPTH,
            )  # fmt: skip
            if HAS_BIAS:
                up += tl.load(at + N, mask=there, other=0.0).to(tl.float32)
            total = open_gates(total, up, limit, out, ACT, LIMITS, RAISED)
        target = begin + within
        if not GATHERS:
            target = tl.load(pairs + own.to(tl.int64) * tokens + within, mask=real, other=0)
        if TURNS:
            total = tl.where(there, total, 0.0).to(out.dtype.element_ty).to(tl.float32)
            total = turn_scaled(total, next_scales + own.to(tl.int64) * blocks * 128, column)
            place = place_inputs(column, column % 128)
            into = out + target.to(tl.int64)[:, None] * (blocks * 128) + place
            tl.store(into, total.to(out.dtype.element_ty), mask=real[:, None])
        else:
            into = out + target.to(tl.int64)[:, None] * N + column
            tl.store(into, total.to(out.dtype.element_ty), mask=there & real[:, None])


@triton.jit
def multiply_block(
    source,  # pointers to rows of the first sort [ROWS]
    rings,
    sorts,
    output_scales,
    block,  # int64
    padded,
    apart,
    one,
    HALF_BITS: tl.constexpr,
    BOOK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the product of rows with a block, turned and scaled, float32 [ROWS, 128]."""
    source += tl.load(sorts + block).to(tl.int64) * apart
    beside: tl.constexpr = DEPTH // 16
    tile = tl.arange(0, beside)[None, :, None] * 8 + tl.arange(0, 8)[:, None, None]
    own_rings = rings + block * (padded // 128) * (256 * HALF_BITS)
    total = tl.zeros([128, source.shape[0]], tl.float32)
    for first in range(0, padded, DEPTH):
        a = tl.load(source[None, :] + (first + tl.arange(0, DEPTH))[:, None])
        some = own_rings + first * (2 * HALF_BITS)
        number = read_tile(some, tile * (4 * HALF_BITS), HALF_BITS, BOOK).to(a.dtype)
        # The factor 1.0: see `add_units` in codes.py.
        total += tl.dot(number, a, input_precision="ieee") * one.to(tl.float32, bitcast=True)
    scale = tl.load(output_scales + block * 128 + tl.arange(0, 128)).to(tl.float32) * BEHIND
    return turn(tl.trans(total)) * scale[None, :]
