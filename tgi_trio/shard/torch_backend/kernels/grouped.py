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
    TOGETHER: tl.constexpr,  # tiles that take turns
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
        # Outputs beyond the last are computed for nobody.
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
            total = open_gates(total, second, limit, out, ACT, LIMITS)
        at = target[:, None] * N + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


@triton.jit
def take_turns(parts, TOGETHER: tl.constexpr):
    """Return a program's tile and which of the tile's parts it has.

    Some tiles are computed side by side, part by part: an expert's tiles read its matrix at the
    same time, and their rows are in the device's cache until all parts are done.
    """
    program, tiles = tl.program_id(0), tl.num_programs(0) // parts
    first = program // (TOGETHER * parts) * TOGETHER
    count = tl.minimum(tiles - first, TOGETHER)
    within = program % (TOGETHER * parts)
    return first + within % count, within // count


@triton.jit
def load_inside(at, inside, ALL: tl.constexpr):
    """Return what lies at pointers, zeros where they are not `inside`, as ALL of them may be."""
    if ALL:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def open_gates(gates, up, limit, like, ACT: tl.constexpr, LIMITS: tl.constexpr):
    """Return act(gates) * up, float32 each, rounded to what `like` points to as torch's are."""
    dtype = like.dtype.element_ty
    gates, up = gates.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if LIMITS:
        gates, up = limit_up(gates, up, limit, like)
    return activate(gates, ACT).to(dtype).to(tl.float32) * up


@triton.jit
def find_group(tile, counts, GROUPS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's group, where it begins in order, the tile's first row in it, its rows.

    Groups lie one behind the other; GROUPS for a tile that there is not.
    """
    group = tl.arange(0, PADDED)
    every = tl.load(counts + group, mask=group < GROUPS, other=0)
    tiles = tl.cdiv(every, ROWS)
    behind = (tl.cumsum(tiles, 0) <= tile) & (group < GROUPS)
    own = tl.sum(behind.to(tl.int32), 0)
    first = (tile - tl.sum(tl.where(behind, tiles, 0), 0)) * ROWS
    count = tl.sum(tl.where(group == own, every, 0), 0)
    return own, tl.sum(tl.where(behind, every, 0), 0), first, count
