"""A product per group of rows, each with a matrix of its own: the experts of a mixture.

How many rows a group has, only the device knows. So there are as many programs as there could be
tiles, each finds its group from the groups' counts, and those left over end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.fused import activate, limit_up


@triton.jit(do_not_specialize=["tokens"])
def multiply_groups(
    out,  # [pairs, N]
    x,  # [tokens, K], or in order [pairs, K]
    weight,  # [GROUPS, N, K]; with ACT [GROUPS, 2 N, K]: gates, then what they are for
    bias,  # [GROUPS, as many], read with HAS_BIAS only
    pairs,  # int32 [GROUPS, tokens]: as `route_tokens` leaves them
    counts,  # int32 [GROUPS]
    tokens,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,  # the next power of two
    PER_ROW: tl.constexpr,  # groups that each row is in
    GATHERS: tl.constexpr,  # x has the rows and out is in order; else x is, and out by pair
    HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr,  # of gates, as `gate` has it; "": there are none
    LIMITS: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # numbers of a row multiplied together
):
    own, begin, first, count = find_group(counts, GROUPS, PADDED_GROUPS, ROWS)
    if own < GROUPS:
        within = first + tl.arange(0, ROWS)
        real = within < count
        pair = tl.load(pairs + own.to(tl.int64) * tokens + within, mask=real, other=0)
        source = (pair // PER_ROW if GATHERS else begin + within).to(tl.int64)
        target = (begin + within if GATHERS else pair).to(tl.int64)
        column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        there = column < N
        each: tl.constexpr = 2 * N if ACT != "" else N
        output = column * (2 if PAIRED else 1)
        up = output + (1 if PAIRED else N)
        base = weight + own.to(tl.int64) * each * K
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        second = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for low in range(0, K, DEPTH):
            depth = low + tl.arange(0, DEPTH)
            inside = depth < K
            a = tl.load(
                x + source[:, None] * K + depth[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            wanted = there[:, None] & inside[None, :]
            at = output[:, None].to(tl.int64) * K + depth[None, :]
            w = tl.load(base + at, mask=wanted, other=0.0)
            total += tl.dot(a, tl.trans(w), input_precision="ieee")
            if ACT != "":
                at = up[:, None].to(tl.int64) * K + depth[None, :]
                w = tl.load(base + at, mask=wanted, other=0.0)
                second += tl.dot(a, tl.trans(w), input_precision="ieee")
        if HAS_BIAS:
            at = bias + own * each
            total += tl.load(at + output, mask=there, other=0.0).to(tl.float32)[None, :]
            if ACT != "":
                second += tl.load(at + up, mask=there, other=0.0).to(tl.float32)[None, :]
        if ACT != "":
            total = open_gates(total, second, limit, out, ACT, LIMITS)
        at = target[:, None] * N + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


@triton.jit
def open_gates(gates, up, limit, like, ACT: tl.constexpr, LIMITS: tl.constexpr):
    """Return act(gates) * up, float32 each, rounded to what `like` points to as torch's are."""
    dtype = like.dtype.element_ty
    gates, up = gates.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if LIMITS:
        gates, up = limit_up(gates, up, limit, like)
    return activate(gates, ACT).to(dtype).to(tl.float32) * up


@triton.jit
def find_group(counts, GROUPS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return a program's group, where it begins in order, the tile's first row in it, its rows.

    Groups lie one behind the other; GROUPS for a program that has no tile.
    """
    tile = tl.program_id(0)
    group = tl.arange(0, PADDED)
    every = tl.load(counts + group, mask=group < GROUPS, other=0)
    tiles = tl.cdiv(every, ROWS)
    behind = (tl.cumsum(tiles, 0) <= tile) & (group < GROUPS)
    own = tl.sum(behind.to(tl.int32), 0)
    first = (tile - tl.sum(tl.where(behind, tiles, 0), 0)) * ROWS
    count = tl.sum(tl.where(group == own, every, 0), 0)
    return own, tl.sum(tl.where(behind, every, 0), 0), first, count
