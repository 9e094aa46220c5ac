"""Paged attention in Triton: prefill chunks, decodes and guesses alike, a context divided or whole.

A program computes one tile: some consecutive (query, head) pairs of one row and one KV head, so
that a key is read once for all of them. It walks the row's keys through its block table and keeps
a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022), so no score is ever stored. Where
tiles are few, each is divided over several programs along the keys, and `merge_parts` puts their
parts together (Dao et al., "Flash-Decoding", 2023). Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    out,  # [T, heads, DIM], contiguous
    parts,  # float32 [T, heads, PARTS, DIM]: sums of what a part has seen, with PARTS > 1 only
    bests,  # float32 [T, heads, PARTS]: largest score of a part
    masses,  # float32 [T, heads, PARTS]: sum of exp(score - best)
    query,  # [T, heads, DIM], of any strides but the last
    key,  # [slots, kv_heads, DIM], contiguous: one layer of the cache
    value,
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1], on the device: a recording outlives a step's width
    contexts,  # int32 [R] keys a row sees
    query_starts,  # int32 [R + 1]
    tile_rows,  # int32 [tiles] the row of each tile
    tile_starts,  # int32 [tiles] its first (query, head) pair, counted from the row's first
    slopes,  # float32 [heads], read with ALIBI only
    scale,
    soft_cap,
    query_token_stride,
    query_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # the next power of two
    PAGE: tl.constexpr,  # tokens of a KV block
    LANES: tl.constexpr,  # pairs of a tile, a power of two
    KEYS: tl.constexpr,  # keys looked at together, a power of two
    PARTS: tl.constexpr,  # programs that share a tile's keys
    WINDOW: tl.constexpr,  # 0: a query sees all keys before it
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(tile_rows + tile)
    start = tl.load(tile_starts + tile)
    first_token = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first_token
    context = tl.load(contexts + row)
    table = tables + row.to(tl.int64) * tl.load(width)

    pair = start + tl.arange(0, LANES)
    ahead = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    real = ahead < count
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
    first = context - count + start // GROUP
    end = tl.minimum(context, context - count + (start + LANES - 1) // GROUP + 1)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, first - WINDOW + 1) // KEYS * KEYS
    if PARTS > 1:
        each = tl.cdiv(tl.cdiv(end - begin, PARTS), KEYS) * KEYS
        begin += part * each
        end = tl.minimum(begin + each, end)
    for low in range(begin, end, KEYS):
        place = low + tl.arange(0, KEYS)
        there = place < end
        block = tl.load(table + place // PAGE, mask=there, other=0)
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
        gained = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * fade[:, None] + gained
        mass = mass * fade + tl.sum(weight, 1)
        best = higher
    which = token * KV_HEADS * GROUP + head
    stored = real[:, None] & inside[None, :]
    if PARTS > 1:
        which = which * PARTS + part
        tl.store(bests + which, best, mask=real)
        tl.store(masses + which, mass, mask=real)
        tl.store(parts + which[:, None] * DIM + dim[None, :], total, mask=stored)
    else:
        result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        at = which[:, None] * DIM + dim[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=stored)


@triton.jit
def merge_parts(
    out,  # [T, heads, DIM], contiguous
    parts,  # as for `attend_tile`
    bests,
    masses,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Weigh a query head's parts by their masses; one program each."""
    which = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    dim = tl.arange(0, PADDED_DIM)
    inside = dim < DIM
    best = tl.load(bests + which * PARTS + part)
    level = tl.max(best, 0)
    level = tl.where(level == float("-inf"), 0.0, level)
    weight = tl.exp(best - level)  # 0 where a part saw nothing
    mass = tl.sum(tl.load(masses + which * PARTS + part) * weight, 0)
    at = (which * PARTS + part[:, None]) * DIM + dim[None, :]
    sums = tl.load(parts + at, mask=inside[None, :], other=0.0)
    result = tl.sum(sums * weight[:, None], 0) / tl.where(mass == 0.0, 1.0, mass)
    tl.store(out + which * DIM + dim, result.to(out.dtype.element_ty), mask=inside)
