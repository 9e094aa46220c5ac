"""Products of groups of rows, each group with its own matrix (grouped GEMM): a layer's experts.

Only the device knows how many rows a group has. So as many programs are launched as there could be
tiles; each finds its group from the groups' counts, and surplus programs end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import activate, limit_up


@triton.jit(do_not_specialize=["tokens"])
def multiply_groups(
    out,  # [pairs, N]
    x,  # [tokens, K], or [pairs, K] with PER_ROW 1; without GATHERS [pairs, K], sorted by group
    weight,  # [GROUPS, N, K]; with ACT [GROUPS, 2 N, K]: gates, then ups
    bias,  # [GROUPS, N or 2 N], read with HAS_BIAS only
    pairs,  # int32 [GROUPS, tokens], as written by `route_tokens`
    counts,  # int32 [GROUPS]
    tokens,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,  # the next power of two
    PER_ROW: tl.constexpr,  # groups that each row is in
    GATHERS: tl.constexpr,  # x is by token and out sorted by group; else x sorted and out by pair
    HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr,  # of gates, as for `gate`; "": no gates
    LIMITS: tl.constexpr,
    RAISED: tl.constexpr,
    PAIRED: tl.constexpr,
    BOUNDED: tl.constexpr,  # the first groups, to whose gates the limit applies; 0: to all
    ROWS: tl.constexpr,  # of a tile
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs of one step of the loop
    TOGETHER: tl.constexpr,  # tiles that are computed side by side
):
    tile, part = take_turns(tl.cdiv(N, OUTPUTS), TOGETHER)
    own, begin, first, count = find_group(tile, counts, GROUPS, PADDED_GROUPS, ROWS)
    if own < GROUPS:
        within = first + tl.arange(0, ROWS)
        real = within < count
        pair = tl.load(pairs + own.to(tl.int64) * tokens + within, mask=real, other=0)
        source = (pair // PER_ROW if GATHERS else begin + within).to(tl.int64)
        target = (begin + within if GATHERS else pair).to(tl.int64)
        column = part * OUTPUTS + tl.arange(0, OUTPUTS)
        there = column < N
        each: tl.constexpr = 2 * N if ACT != "" else N
        # Results beyond the last output are not stored.
        output = tl.minimum(column, N - 1) * (2 if PAIRED else 1)
        up = output + (1 if PAIRED else N)
        rows = x + source[:, None] * K
        base = weight + own.to(tl.int64) * each * K
        gates, ups = base + output[:, None].to(tl.int64) * K, base + up[:, None].to(tl.int64) * K
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        second = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for low in range(0, K, DEPTH):
            depth = (low + tl.arange(0, DEPTH))[None, :]
            inside = depth < K
            a = tl.load(rows + depth, mask=real[:, None] & inside, other=0.0)
            w = load_inside(gates + depth, inside, K % DEPTH == 0)
            total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
            if ACT != "":
                w = load_inside(ups + depth, inside, K % DEPTH == 0)
                second = tl.dot(a, tl.trans(w), second, input_precision="ieee")
        if HAS_BIAS:
            at = bias + own * each
            total += tl.load(at + output, mask=there, other=0.0).to(tl.float32)[None, :]
            if ACT != "":
                second += tl.load(at + up, mask=there, other=0.0).to(tl.float32)[None, :]
        if ACT != "":
            if BOUNDED:
                limit = tl.where(own < BOUNDED, limit, float("inf"))
            total = open_gates(total, second, limit, out, ACT, LIMITS, RAISED)
        at = target[:, None] * N + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


@triton.jit
def take_turns(parts, TOGETHER: tl.constexpr):
    """Return a program's tile, and which part of the tile's outputs it has.

    Programs go through TOGETHER tiles side by side, part by part: tiles of an expert read its
    matrix at the same time, and their rows stay in the device's cache until all parts are done.
    """
    program, tiles = tl.program_id(0), tl.num_programs(0) // parts
    first = program // (TOGETHER * parts) * TOGETHER
    count = tl.minimum(tiles - first, TOGETHER)
    within = program % (TOGETHER * parts)
    return first + within % count, within // count


@triton.jit
def load_inside(at, inside, ALL: tl.constexpr):
    """Return what pointers point to, zero where not `inside`; ALL: all are inside."""
    if ALL:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def open_gates(
    gates, up, limit, like, ACT: tl.constexpr, LIMITS: tl.constexpr, RAISED: tl.constexpr
):
    """Return act(gates) * up, in float32, with torch's roundings to the dtype of `like`."""
    dtype = like.dtype.element_ty
    gates, up = gates.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if LIMITS:
        gates, up = limit_up(gates, up, limit, like, RAISED)
    return activate(gates, ACT).to(dtype).to(tl.float32) * up


@triton.jit
def find_group(tile, counts, GROUPS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's group, the group's first row overall, the tile's first row in it, its rows.

    Groups are contiguous. The group is GROUPS for a surplus tile.
    """
    group = tl.arange(0, PADDED)
    every = tl.load(counts + group, mask=group < GROUPS, other=0)
    tiles = tl.cdiv(every, ROWS)
    behind = (tl.cumsum(tiles, 0) <= tile) & (group < GROUPS)
    own = tl.sum(behind.to(tl.int32), 0)
    first = (tile - tl.sum(tl.where(behind, tiles, 0), 0)) * ROWS
    count = tl.sum(tl.where(group == own, every, 0), 0)
    return own, tl.sum(tl.where(behind, every, 0), 0), first, count
