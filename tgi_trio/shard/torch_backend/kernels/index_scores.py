"""Scores of an index (DeepSeek V3.2, 2025, section 2.1): sums of weighted, positive products.

A unit is as good for a token as the sum over the index's heads of `weight * relu(q . k)`, for the
one key that a unit has in the paged cache: that of its last token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.eight_bits import decode_like
from tgi_trio.shard.torch_backend.kernels.selecting import find_seen


# fmt: off
@triton.jit(do_not_specialize=["first", "count", "stride"])
def score_units(
    scores,  # float32 [count, stride], written where a token sees more units than MOST
    visible,  # int32 [count], written: the units that a token sees
    queries,  # [T, HEADS, DIM], of any strides but the last
    weights,  # float32 [T, HEADS], contiguous; read with WEIGHTED only
    keys,  # [slots, DIM], of any stride but the last: numbers or CODES
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    first,  # the token with which scores begin
    count,
    stride, query_token_stride, query_head_stride, key_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # powers of two, at least 16 where tokens are one
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    UNIT: tl.constexpr,  # tokens of a unit
    MOST: tl.constexpr,  # units that are chosen: so many need no scores
    WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program, a power of two
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    CODES: tl.constexpr,  # see `eight_bits.py`
):
    """Score some units for TOKENS tokens; programs share the units of a tile of tokens.

    A tile's tokens may be of several rows, whose keys are read one row after the other.
    """
    part, parts = tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, TOKENS * PADDED_HEADS)
    ahead, head = tl.program_id(0) * TOKENS + lane // PADDED_HEADS, lane % PADDED_HEADS
    real, token = (ahead < count) & (head < HEADS), (first + ahead).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    at = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim
    q = tl.load(queries + at, mask=real[:, None] & (dim < DIM), other=0.0)
    weight = real.to(tl.float32)
    if WEIGHTED:
        weight = tl.load(weights + token * HEADS + head, mask=real, other=0.0)
    own = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
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
            there = (unit < most)[:, None] & (dim < DIM)
            k = decode_like(tl.load(keys + slot * key_stride + dim, mask=there, other=0), q, CODES)
            product = tl.dot(q, tl.trans(k), input_precision="ieee")
            score = tl.maximum(product, 0.0) * weight[:, None]
            score = tl.sum(tl.reshape(score, (TOKENS, PADDED_HEADS, KEYS)), 1)
            into = scores + own[:, None].to(tl.int64) * stride + unit[None, :]
            tl.store(into, score, mask=mine[:, None] & (unit[None, :] < seen[:, None]))
# fmt: on
