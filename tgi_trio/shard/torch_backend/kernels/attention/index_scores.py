"""Scores of an index (DeepSeek V3.2, 2025, section 2.1): sums of weighted, positive products.

A unit is as good for a token as the sum over the index's heads of `weight * relu(q . k)`, for the
one key that a unit has in the paged cache: that of its last token. Queries are scaled and rotated
as they are read, rounded where torch's separate operations would round them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.eight_bits import decode_like
from tgi_trio.shard.torch_backend.kernels.attention.selecting import find_seen


# fmt: off
@triton.jit(do_not_specialize=["first", "count", "stride"])
def score_units(
    scores,  # float32 [count, stride], written where a token sees more units than MOST
    visible,  # int32 [count], written: the units that a token sees
    queries,  # [T, HEADS, DIM], of any strides but the last
    weights,  # [T, HEADS], with `weight_stride` between tokens; read with WEIGHTED only
    cos,  # [T, ROTARY], as for `rotate_and_write`; read with ROTARY only, as is `sin`
    sin,
    factor,  # [HEADS]; these three are read with SCALES only
    bias,  # [HEADS]
    logs,  # [T]: of positions
    keys,  # [slots, DIM], of any stride but the last: numbers or CODES
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    first,  # the token with which scores begin
    count,
    stride, query_token_stride, query_head_stride, weight_stride, key_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # powers of two, at least 16 where tokens are one
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    UNIT: tl.constexpr,  # tokens of a unit
    MOST: tl.constexpr,  # units that are chosen: so many need no scores
    WEIGHTED: tl.constexpr,
    SCALES: tl.constexpr,  # queries are multiplied by their head's factor * log + bias first
    ROTARY: tl.constexpr,  # numbers of a query that are rotated here; 0: none
    BEGIN: tl.constexpr,  # the first of them
    IN_HALVES: tl.constexpr,  # whether halves turn together, otherwise neighbours
    PADDED_HALF: tl.constexpr,  # of ROTARY numbers; with IN_HALVES, as are
    REST: tl.constexpr,  # the first number that is not rotated
    PADDED_REST: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program, a power of two
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    CODES: tl.constexpr,  # see `eight_bits.py`
):
    """Score some units for TOKENS tokens; programs share the units of a tile of tokens.

    A tile's tokens may be of several rows, whose keys are read one row after the other.
    """
    score_some(
        tl.program_id(0), tl.program_id(1), tl.num_programs(1), scores, visible, queries, weights,
        cos, sin, factor, bias, logs, keys, tables, width, contexts, query_starts, rows, first,
        count, stride, query_token_stride, query_head_stride, weight_stride, key_stride, HEADS,
        PADDED_HEADS, DIM, PADDED_DIM, UNIT, MOST, WEIGHTED, SCALES, ROTARY, BEGIN, IN_HALVES,
        PADDED_HALF, REST, PADDED_REST, TOKENS, KEYS, PAGE, CODES,
    )


@triton.jit
def score_some(
    tile,  # of tokens
    part,  # which of the `parts` programs that share it; the others as for `score_units`
    parts,
    scores, visible, queries, weights, cos, sin, factor, bias, logs, keys, tables, width, contexts,
    query_starts, rows, first, count, stride, query_token_stride, query_head_stride, weight_stride,
    key_stride,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    UNIT: tl.constexpr, MOST: tl.constexpr, WEIGHTED: tl.constexpr, SCALES: tl.constexpr,
    ROTARY: tl.constexpr, BEGIN: tl.constexpr, IN_HALVES: tl.constexpr, PADDED_HALF: tl.constexpr,
    REST: tl.constexpr, PADDED_REST: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, CODES: tl.constexpr,
):
    """Do what a program of `score_units` does."""
    lane = tl.arange(0, TOKENS * PADDED_HEADS)
    ahead, head = tile * TOKENS + lane // PADDED_HEADS, lane % PADDED_HEADS
    real, token = (ahead < count) & (head < HEADS), (first + ahead).to(tl.int64)
    at = queries + token[:, None] * query_token_stride + head[:, None] * query_head_stride
    scale = tl.full([TOKENS * PADDED_HEADS, 1], 1.0, tl.float32)
    if SCALES:
        scale = find_scale(factor, bias, logs, token, head, real, queries)
    if IN_HALVES:  # so that no number is held twice: registers would spill
        half, begin = tl.arange(0, PADDED_HALF)[None, :], at + BEGIN
        q, other = turn_halves(begin, half, scale, cos, sin, token, real, SCALES, ROTARY)
        if DIM > ROTARY:
            rest = tl.arange(0, PADDED_REST)[None, :]
            plain = load_queries(at + REST, rest, scale, real, SCALES, DIM - ROTARY)
    else:
        dim = tl.arange(0, PADDED_DIM)[None, :]
        q = load_queries(at, dim, scale, real, SCALES, DIM)
        if ROTARY:
            if SCALES:
                tl.debug_barrier()  # products are rounded before the next numbers are loaded
            q = turn_neighbours(q, cos, sin, token, dim - BEGIN, real, ROTARY)
    weight = real.to(tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + token * weight_stride + head, mask=real, other=0.0)
        weight = weight.to(tl.float32)
    own = tile * TOKENS + tl.arange(0, TOKENS)
    asking = first + own
    own_row = tl.load(rows + asking, mask=own < count, other=-1)
    known = tl.maximum(own_row, 0).to(tl.int64)
    seen = find_seen(contexts, query_starts, known, asking) // UNIT
    tl.store(visible + own, seen, mask=(own < count) & (part == 0))
    wanted = (own < count) & (seen > MOST)
    begin = tl.min(tl.where(own < count, own_row, 0x7FFFFFFF), 0)
    for row in range(begin, tl.max(own_row, 0) + 1):
        table = tables + tl.full([], row, tl.int64) * tl.load(width)
        mine = wanted & (own_row == row)
        most = tl.max(tl.where(mine, seen, 0), 0)
        for low in range(part * KEYS, most, parts * KEYS):
            unit = low + tl.arange(0, KEYS)
            place = unit * UNIT + UNIT - 1
            block = tl.load(table + place // PAGE, mask=unit < most, other=0)
            slot = (block.to(tl.int64) * PAGE + place % PAGE)[:, None]
            key, inside = keys + slot * key_stride, (unit < most)[:, None]
            if IN_HALVES:
                part_of = key + BEGIN
                product = multiply(q, part_of, half, inside, None, ROTARY // 2, CODES)
                part_of += ROTARY // 2
                product = multiply(other, part_of, half, inside, product, ROTARY // 2, CODES)
                if DIM > ROTARY:
                    part_of = key + REST
                    product = multiply(plain, part_of, rest, inside, product, DIM - ROTARY, CODES)
            else:
                product = multiply(q, key, dim, inside, None, DIM, CODES)
            score = tl.maximum(product, 0.0) * weight[:, None]
            score = tl.sum(tl.reshape(score, (TOKENS, PADDED_HEADS, KEYS)), 1)
            into = scores + own[:, None].to(tl.int64) * stride + unit[None, :]
            tl.store(into, score, mask=mine[:, None] & (unit[None, :] < seen[:, None]))
# fmt: on


@triton.jit
def multiply(q, at, number, known, total, SIZE: tl.constexpr, CODES: tl.constexpr):
    """Return the products of queries and of the SIZE numbers at `at` of keys, added to `total`."""
    there = known & (number < SIZE)
    k = decode_like(tl.load(at + number, mask=there, other=0), q, CODES)
    return tl.dot(q, tl.trans(k), total, input_precision="ieee")


@triton.jit
def load_queries(at, number, scale, real, SCALES: tl.constexpr, SIZE: tl.constexpr):
    """Return the SIZE numbers at `at` of queries, scaled."""
    q = tl.load(at + number, mask=real[:, None] & (number < SIZE), other=0.0)
    return (q.to(tl.float32) * scale).to(q.dtype) if SCALES else q


@triton.jit
def turn_halves(at, half, scale, cos, sin, token, real, SCALES: tl.constexpr, ROTARY: tl.constexpr):
    """Return the halves of the ROTARY numbers at `at` of queries, scaled and rotated."""
    size: tl.constexpr = ROTARY // 2
    first = load_queries(at, half, scale, real, SCALES, size)
    second = load_queries(at + size, half, scale, real, SCALES, size)
    table, there = token[:, None] * ROTARY + half, real[:, None] & (half < size)
    c = tl.load(cos + table, mask=there, other=1.0).to(tl.float32)
    s = tl.load(sin + table + size, mask=there, other=0.0).to(tl.float32)
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * c - y * s).to(first.dtype), (y * c + x * s).to(first.dtype)


@triton.jit
def turn_neighbours(q, cos, sin, token, turned, real, ROTARY: tl.constexpr):
    """Return queries of which the numbers that are `turned`, from 0 on, are rotated in pairs."""
    first, second = tl.split(tl.reshape(q, (q.shape[0], q.shape[1] // 2, 2)))
    partner = tl.reshape(tl.join(second, first), (q.shape[0], q.shape[1]))
    there = real[:, None] & (turned >= 0) & (turned < ROTARY)
    table = token[:, None] * ROTARY + turned
    c = tl.load(cos + table, mask=there, other=1.0).to(tl.float32)
    s = tl.load(sin + table, mask=there, other=0.0).to(tl.float32)
    return (q.to(tl.float32) * c + partner.to(tl.float32) * s).to(q.dtype)


@triton.jit
def find_scale(factor, bias, logs, token, head, real, like):
    """Return what queries are multiplied by, float32 [lanes, 1], rounded to the dtype at `like`."""
    log = tl.load(logs + token, mask=real, other=0.0).to(tl.float32)
    scale = tl.load(factor + head, mask=real, other=0.0).to(tl.float32) * log
    scale += tl.load(bias + head, mask=real, other=0.0).to(tl.float32)
    return scale.to(like.dtype.element_ty).to(tl.float32)[:, None]
