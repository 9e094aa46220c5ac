"""Paged attention over latents (MLA) in Triton: one key for all heads; its beginning is its value.

Like `attend_tile`, but a key is read once and used twice. Its rotated end is multiplied separately:
padded to a power of two, the whole key would be twice as wide. Queries are rotated when they are
read. Behind a key, its row of the cache may have numbers that are for an index alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.attention.paged.paged_kernel import (
    LOG2E,
    add_sinks,
    find_keys,
    find_slots,
    find_tile,
    finish_scores,
    store_tile,
    weigh,
)
from tgi_trio.shard.torch_backend.kernels.attention.eight_bits import decode_like
from tgi_trio.shard.torch_backend.kernels.attention.index_scores import find_scale
from tgi_trio.shard.torch_backend.kernels.fused import rotate


# fmt: off
@triton.jit
def attend_latents(
    out,  # [T, HEADS, RANK], contiguous
    parts,  # float32 [T, HEADS, parts, RANK], as for `attend_tile`
    bests,
    masses,
    query,  # [T, HEADS, RANK], of any strides but the last
    ends,  # [T, HEADS, ROTARY], likewise; rotated here where ROTATES; unread if ROTARY is 0
    cos,  # [T, ROTARY], as for `rotate_and_write`
    sin,
    key,  # [slots, WIDTH], contiguous: one layer of the cache
    tables, width, contexts, query_starts, tile_rows, tile_starts,
    sinks,  # float32 [HEADS], read with SINKS only
    factor, bias, logs,  # as for `score_units`; read with SCALES only
    scale,  # of scores, times the scale of 8-bit keys
    key_scale,  # of the result; read with CODES only
    query_token_stride, query_head_stride, end_token_stride, end_head_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr,  # the next power of two
    ROTARY: tl.constexpr, PADDED_ROTARY: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row of the cache: latent, rotated end, and what an index adds
    ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    DIVIDED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALES: tl.constexpr,  # queries are multiplied by their head's factor * log + bias first
    CODES: tl.constexpr,  # see `eight_bits.py`
):
    table, start, count, context, token, head, position, real = find_tile(
        tables, width, contexts, query_starts, tile_rows, tile_starts, HEADS, LANES
    )
    dim = tl.arange(0, PADDED_RANK)
    source = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride
    q = tl.load(source + dim[None, :], mask=real[:, None] & (dim < RANK)[None, :], other=0.0)
    q_turned = q
    if ROTARY:
        source = ends + token[:, None] * end_token_stride + head[:, None] * end_head_stride
        q_turned = load_ends(
            source, cos, sin, token, real, ROTARY, PADDED_ROTARY, ROTATES, INTERLEAVED
        )
    if SCALES:
        own = find_scale(factor, bias, logs, token, head, real, query)
        q = (q.to(tl.float32) * own).to(query.dtype.element_ty)
        q_turned = (q_turned.to(tl.float32) * own).to(query.dtype.element_ty)
    best = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES, PADDED_RANK], tl.float32)
    begin, end = find_keys(start, count, context, position, HEADS, LANES, KEYS, DIVIDED, 0, False)
    best, mass, total = walk_latents(
        best, mass, total, q, q_turned, key, table, begin, end, end, scale, position, RANK,
        PADDED_RANK, ROTARY, PADDED_ROTARY, WIDTH, PAGE, KEYS, CODES,
    )
    part = tl.program_id(2)
    if SINKS:
        best, mass, fade = add_sinks(tl.load(sinks + head, mask=real, other=0.0), best, mass, part)
        total = total * fade[:, None]
    if CODES != "":
        total = total * key_scale
    which = token * HEADS + head
    store_tile(out, parts, bests, masses, which, best, mass, total, real, dim, part, RANK, DIVIDED)


@triton.jit
def walk_latents(
    best, mass, total,  # as for `walk`
    q,
    q_turned,  # read with ROTARY only
    key, table,
    begin,  # the keys to walk: the first one, and the end
    until,
    end,  # of the row's keys
    scale, position,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    ROTARY: tl.constexpr, PADDED_ROTARY: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, CODES: tl.constexpr,
):
    """Return a running softmax after some more keys: best scores, masses, totals."""
    for low in range(begin, until, KEYS):
        place = low + tl.arange(0, KEYS)
        at = key + find_slots(table, place, end, PAGE, True) * WIDTH
        there = place < end
        k = decode_like(load_part(at, there, RANK, PADDED_RANK), q, CODES)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if ROTARY:
            k_turned = decode_like(load_part(at + RANK, there, ROTARY, PADDED_ROTARY), q, CODES)
            score = tl.dot(q_turned, tl.trans(k_turned), score, input_precision="ieee")
        score = finish_scores(
            score, scale, 0.0, 0.0, place, position, position, end, True, 0, False, False
        )
        best, mass, fade, weight = weigh(score, scale * LOG2E, best, mass)
        gained = tl.dot(weight.to(k.dtype), k, input_precision="ieee")
        total = total * fade[:, None] + gained
    return best, mass, total
# fmt: on


@triton.jit
def load_ends(
    source,  # pointers [LANES, 1] to the first number of each
    cos,
    sin,
    token,
    real,
    ROTARY: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return the ends of queries [LANES, padded ROTARY], rotated."""
    dim = tl.arange(0, PADDED_ROTARY)[None, :]
    there = real[:, None] & (dim < ROTARY)
    if ROTATES:
        turned = rotate(source, cos, sin, token[:, None], dim, there, ROTARY, INTERLEAVED)
        return turned.to(source.dtype.element_ty)
    else:
        return tl.load(source + dim, mask=there, other=0.0)


@triton.jit
def load_part(
    at,  # pointers [KEYS, 1] to the first number of each
    there,  # [KEYS]
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return a part of keys, [KEYS, padded SIZE]; zero where there is none."""
    dim = tl.arange(0, PADDED)[None, :]
    return tl.load(at + dim, mask=there[:, None] & (dim < SIZE), other=0)
