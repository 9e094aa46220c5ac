"""Scores of an index over blocks of tokens (MiniMax-M3, 2026), for each KV head its own.

A block is as good for a KV head as its best token, of those that the asking token sees: the largest
q . k for the one index key that a token has in the paged cache. The last blocks are better than any
other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.eight_bits import decode_like
from tgi_trio.shard.torch_backend.kernels.attention.selecting import find_seen


# fmt: off
@triton.jit(do_not_specialize=["first", "count", "stride"])
def score_blocks(
    scores,  # float32 [count * HEADS, stride], written where a token sees more blocks than MOST
    visible,  # int32 [count * HEADS], written: the blocks that a token sees, if only in part
    queries,  # [T, HEADS, DIM], of any strides but the last
    keys,  # [slots, DIM], contiguous: one layer of the cache, numbers or CODES
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    first,  # the token with which scores begin
    count,
    stride, query_token_stride, query_head_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # powers of two, at least 16 where tokens are one
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SIZE: tl.constexpr,  # tokens of a block
    MOST: tl.constexpr,  # blocks that are chosen: so many need no scores
    LOCAL: tl.constexpr,  # of which so many are the last ones
    TOKENS: tl.constexpr,  # of a program, a power of two
    KEYS: tl.constexpr,  # of one step of the loop, a power of two
    PAGE: tl.constexpr,
    CODES: tl.constexpr,  # see `eight_bits.py`
):
    """Score some blocks for TOKENS tokens; programs share the blocks of a tile of tokens.

    A tile's tokens may be of several rows, whose keys are read one row after the other.
    """
    STEPS: tl.constexpr = (SIZE + KEYS - 1) // KEYS  # of the loop for a block
    part, parts = tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, TOKENS * PADDED_HEADS)
    ahead, head = tl.program_id(0) * TOKENS + lane // PADDED_HEADS, lane % PADDED_HEADS
    real, token = (ahead < count) & (head < HEADS), (first + ahead).to(tl.int64)
    row = tl.load(rows + token, mask=real, other=-1)
    known = tl.maximum(row, 0).to(tl.int64)
    seen = tl.where(real, find_seen(contexts, query_starts, known, first + ahead), 0)
    blocks = tl.cdiv(seen, SIZE)
    which = ahead.to(tl.int64) * HEADS + head
    tl.store(visible + which, blocks, mask=real & (part == 0))
    wanted = real & (blocks > MOST)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    at = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim
    q = tl.load(queries + at, mask=wanted[:, None] & (dim < DIM), other=0.0)
    for one in range(tl.min(tl.where(real, row, 0x7FFFFFFF), 0), tl.max(row, 0) + 1):
        table = tables + tl.full([], one, tl.int64) * tl.load(width)
        mine = wanted & (row == one)
        reach = tl.max(tl.where(mine, seen, 0), 0)
        each = tl.cdiv(tl.cdiv(reach, SIZE), parts)
        best = tl.full([TOKENS * PADDED_HEADS], float("-inf"), tl.float32)
        begin = part * each
        for step in range(begin * STEPS, tl.minimum(begin + each, tl.cdiv(reach, SIZE)) * STEPS):
            block, inside = step // STEPS, step % STEPS * KEYS + tl.arange(0, KEYS)
            place = block * SIZE + inside
            there = (inside < SIZE) & (place < reach)
            page = tl.load(table + place // PAGE, mask=there, other=0)
            slot = (page.to(tl.int64) * PAGE + place % PAGE)[:, None]
            read = there[:, None] & (dim < DIM)
            k = decode_like(tl.load(keys + slot * DIM + dim, mask=read, other=0), q, CODES)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            shown = there[None, :] & (place[None, :] < seen[:, None])
            score = tl.max(tl.where(shown, score, float("-inf")), 1)
            best = tl.where(step % STEPS == 0, score, tl.maximum(best, score))
            stored = mine & (block < blocks) & (step % STEPS == STEPS - 1)
            found = tl.where(block >= blocks - LOCAL, float("inf"), best)
            tl.store(scores + which * stride + block, found, mask=stored)
# fmt: on
