"""Paged attention in Triton: one kernel for prefill chunks, decodes and guesses alike.

A program computes one tile: some consecutive queries of one row, for all query heads of one KV
head, so that a key is read once for the whole group. It walks the row's keys through its block
table and keeps a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022), so no score is
ever stored. Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    out,  # [T, heads, DIM], contiguous
    query,  # [T, heads, DIM], of any strides but the last
    key,  # [slots, kv_heads, DIM], contiguous: one layer of the cache
    value,
    tables,  # int32 [R, width]
    contexts,  # int32 [R] keys a row sees
    query_starts,  # int32 [R + 1]
    tile_rows,  # int32 [tiles] the row of each tile
    tile_starts,  # int32 [tiles] its first query, counted from the row's first
    slopes,  # float32 [heads], read with ALIBI only
    scale,
    soft_cap,
    query_token_stride,
    query_head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # the next power of two
    PAGE: tl.constexpr,  # tokens of a KV block
    LANES: tl.constexpr,  # query heads of a tile, a power of two: LANES // GROUP queries
    KEYS: tl.constexpr,  # keys looked at together, a power of two
    WINDOW: tl.constexpr,  # 0: a query sees all keys before it
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(tile_rows + tile)
    start = tl.load(tile_starts + tile)
    first_token = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first_token
    context = tl.load(contexts + row)

    queries: tl.constexpr = LANES // GROUP
    lane = tl.arange(0, LANES)
    ahead = start + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    real = (lane < queries * GROUP) & (ahead < count)
    position = context - count + ahead
    dim = tl.arange(0, PADDED_DIM)
    inside = dim < DIM
    token = (first_token + ahead).to(tl.int64)
    where = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + where, mask=real[:, None] & inside[None, :], other=0.0)
    if ALIBI:
        slope = tl.load(slopes + head, mask=real, other=0.0)

    best = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES, PADDED_DIM], tl.float32)
    first_position = context - count + start
    end = tl.minimum(context, first_position + queries)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, first_position - WINDOW + 1) // KEYS * KEYS
    for low in range(begin, end, KEYS):
        place = low + tl.arange(0, KEYS)
        there = place < end
        block = tl.load(tables + row * table_stride + place // PAGE, mask=there, other=0)
        slot = block.to(tl.int64) * PAGE + place % PAGE
        at = (slot[:, None] * KV_HEADS + kv_head) * DIM + dim[None, :]
        wanted = there[:, None] & inside[None, :]
        k = tl.load(key + at, mask=wanted, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFT_CAP:
            score = soft_cap * (2.0 * tl.sigmoid(2.0 * score / soft_cap) - 1.0)  # tanh
        if ALIBI:
            score += slope[:, None] * place[None, :]
        seen = there[None, :] & (place[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        weight = tl.exp(score - level[:, None])
        fade = tl.exp(best - level)
        v = tl.load(value + at, mask=wanted, other=0.0)
        part = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * fade[:, None] + part
        mass = mass * fade + tl.sum(weight, 1)
        best = higher
    result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    at = (token[:, None] * KV_HEADS * GROUP + head[:, None]) * DIM + dim[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
