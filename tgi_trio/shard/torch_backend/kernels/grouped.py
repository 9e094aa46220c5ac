"""A product per group of rows, each with a matrix of its own: the experts of a mixture.

How many rows a group has, only the device knows. So there are as many programs as there could be
tiles, each finds its group from the cumulative counts, and those left over end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pairs"])
def multiply_groups(
    out,  # [pairs, N]
    x,  # [rows, K]
    weight,  # [GROUPS, N, K]
    bias,  # [GROUPS, N], read with HAS_BIAS only
    order,  # int64 [pairs]: (row, place) pairs by group; pair // PER_ROW is the row
    ends,  # int64 [GROUPS]: where a group's pairs end in `order`
    tile_ends,  # int64 [GROUPS]: and its tiles, among all tiles
    pairs,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,  # the next power of two
    PER_ROW: tl.constexpr,  # groups that each row is in
    GATHERS: tl.constexpr,  # x has the rows and out is in order; else x is, and out by pair
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # numbers of a row multiplied together
):
    tile = tl.program_id(0)
    group = tl.arange(0, PADDED_GROUPS)
    bounds = tl.load(tile_ends + group, mask=group < GROUPS, other=2**40)
    own = tl.sum((bounds <= tile).to(tl.int32), 0)
    if own < GROUPS:
        before = tl.maximum(own - 1, 0)
        first_tile = tl.where(own > 0, tl.load(tile_ends + before), 0)
        begin = tl.where(own > 0, tl.load(ends + before), 0)
        end = tl.load(ends + own)
        place = begin + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        real = place < end
        pair = tl.load(order + place, mask=real, other=0)
        source = pair // PER_ROW if GATHERS else place
        target = place if GATHERS else pair
        column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        there = column < N
        base = weight + own.to(tl.int64) * N * K
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for low in range(0, K, DEPTH):
            depth = low + tl.arange(0, DEPTH)
            inside = depth < K
            a = tl.load(
                x + source[:, None] * K + depth[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            w = tl.load(
                base + column[:, None].to(tl.int64) * K + depth[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            )
            total += tl.dot(a, tl.trans(w), input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + own * N + column, mask=there, other=0.0).to(tl.float32)[None, :]
        at = target[:, None].to(tl.int64) * N + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])
