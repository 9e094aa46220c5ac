"""Paged attention over latents (MLA) in Triton: one key for all heads; its beginning is its value.

Like `attend_tile`, but a key is read once and used twice. Its rotated end is multiplied separately:
padded to a power of two, the whole key would be twice as wide. Queries are rotated when they are
read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.attention.paged_kernel import (
    LOG2E,
    find_keys,
    find_slots,
    find_tile,
    finish_scores,
    store_tile,
    weigh,
)
from tgi_trio.shard.torch_backend.kernels.eight_bits import decode_like
from tgi_trio.shard.torch_backend.kernels.fused import rotate


@triton.jit
def attend_latents(
    out,  # [T, HEADS, RANK], contiguous
    parts,  # float32 [T, HEADS, parts, RANK], as for `attend_tile`
    bests,
    masses,
    query,  # [T, HEADS, RANK], of any strides but the last
    ends,  # [T, HEADS, ROTARY], likewise; rotated here where ROTATES
    cos,  # [T, ROTARY], as for `rotate_and_write`
    sin,
    key,  # [slots, RANK + ROTARY], contiguous: one layer of the cache
    tables,
    width,
    contexts,
    query_starts,
    tile_rows,
    tile_starts,
    scale,  # of scores, times the scale of 8-bit keys
    key_scale,  # of the result; read with CODES only
    query_token_stride,
    query_head_stride,
    end_token_stride,
    end_head_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,  # the next powers of two
    ROTARY: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    DIVIDED: tl.constexpr,
    CODES: tl.constexpr,  # see `eight_bits.py`
):
    table, start, count, context, token, head, position, real = find_tile(
        tables, width, contexts, query_starts, tile_rows, tile_starts, HEADS, LANES
    )
    dim = tl.arange(0, PADDED_RANK)
    source = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride
    q = tl.load(source + dim[None, :], mask=real[:, None] & (dim < RANK)[None, :], other=0.0)
    source = ends + token[:, None] * end_token_stride + head[:, None] * end_head_stride
    q_turned = load_ends(source, cos, sin, token, real, ROTARY, PADDED_ROTARY, ROTATES, INTERLEAVED)
    best = tl.full([LANES], float("-inf"), tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES, PADDED_RANK], tl.float32)
    begin, end = find_keys(start, count, context, position, HEADS, LANES, KEYS, DIVIDED, 0, False)
    for low in range(begin, end, KEYS):
        place = low + tl.arange(0, KEYS)
        k, k_turned = load_keys(
            key, table, place, end, RANK, PADDED_RANK, ROTARY, PADDED_ROTARY, PAGE
        )
        k, k_turned = decode_like(k, q, CODES), decode_like(k_turned, q, CODES)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = tl.dot(q_turned, tl.trans(k_turned), score, input_precision="ieee")
        score = finish_scores(
            score, scale, 0.0, 0.0, place, position, position, end, True, 0, False, False
        )
        best, mass, fade, weight = weigh(score, scale * LOG2E, best, mass)
        gained = tl.dot(weight.to(k.dtype), k, input_precision="ieee")
        total = total * fade[:, None] + gained
    if CODES != "":
        total = total * key_scale
    which, part = token * HEADS + head, tl.program_id(2)
    store_tile(out, parts, bests, masses, which, best, mass, total, real, dim, part, RANK, DIVIDED)


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
def load_keys(
    key,
    table,
    place,  # [KEYS]
    end,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Return latents [KEYS, padded RANK] and rotated ends [KEYS, padded ROTARY]."""
    there = place < end
    dim = tl.arange(0, PADDED_RANK)
    turned = tl.arange(0, PADDED_ROTARY)
    at = key + find_slots(table, place, end, PAGE, True) * (RANK + ROTARY)
    latent = tl.load(at + dim[None, :], mask=there[:, None] & (dim < RANK)[None, :], other=0)
    inside = there[:, None] & (turned < ROTARY)[None, :]
    return latent, tl.load(at + RANK + turned[None, :], mask=inside, other=0)
