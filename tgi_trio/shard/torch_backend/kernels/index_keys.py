"""Keys and queries of an index, from what a layer projects to where they are read.

Results are rounded where torch's separate operations would round them, except within a rotation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.eight_bits import decode_like, store_number
from tgi_trio.shard.torch_backend.kernels.selecting import find_seen


# fmt: off
@triton.jit
def write_index_heads(
    query,  # [T, HEADS, DIM], written
    key,  # [slots, DIM]: one layer of the cache
    source,  # [T, (HEADS + 1) * DIM], with `stride` between tokens: queries, then the key
    cos,  # [T, ROTARY], as `Rotary.table` makes them
    sin,  # with the sign of the rotation
    slots,  # int64 [T]
    query_gain,  # [DIM]
    key_gain,
    query_eps,
    key_eps,
    key_scale,  # of 8-bit keys
    stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY: tl.constexpr,  # leading dimensions that are rotated; 0: none
    INTERLEAVED: tl.constexpr,
    PLAIN_KEY: tl.constexpr,  # keys are written as they are projected
    CODES: tl.constexpr,  # of the cache
    BLOCK: tl.constexpr,  # heads of a program
):
    """Normalise (RMS) and rotate a token's queries and its key, and write the key to its slot."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    if tl.program_id(1) == 0:
        at = source + token * stride + HEADS * DIM
        if PLAIN_KEY:
            x = tl.load(at + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        else:
            x = turn_heads(
                at, cos, sin, token, dim, dim < DIM, key_gain, key_eps, source, DIM, ROTARY,
                INTERLEAVED,
            )
        into = key + tl.load(slots + token) * DIM + dim
        store_number(into, x, key_scale, source, dim < DIM, CODES)
    else:
        head = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)[:, None]
        there = (head < HEADS) & (dim < DIM)
        turned = turn_heads(
            source + token * stride + head * DIM, cos, sin, token, dim, there, query_gain,
            query_eps, source, DIM, ROTARY, INTERLEAVED,
        )
        place = (token * HEADS + head) * DIM + dim
        tl.store(query + place, turned.to(query.dtype.element_ty), mask=there)


@triton.jit
def turn_heads(
    at,  # pointers to the first of a head's numbers, [heads, 1] or a single one
    cos, sin, place,  # which row of cosines and sines
    dim,  # [1, PADDED_DIM]
    there,
    gain, eps,
    like,  # a pointer to the dtype to which torch would round
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return heads normalised and rotated, float32."""
    x = tl.load(at + dim, mask=there, other=0.0).to(tl.float32)
    y = tl.load(at + find_partner(dim, ROTARY, INTERLEAVED), mask=there, other=0.0).to(tl.float32)
    return turn(x, y, cos, sin, place, dim, gain, eps, like, DIM, ROTARY, INTERLEAVED)


@triton.jit
def find_partner(dim, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return with which number each one is rotated; itself if with none."""
    half: tl.constexpr = ROTARY // 2
    other = dim ^ 1 if INTERLEAVED else tl.where(dim < half, dim + half, dim - half)
    return tl.where(dim < ROTARY, other, dim)


@triton.jit
def turn(
    x,  # float32 [heads, PADDED_DIM], 0 beyond DIM
    y,  # the numbers with which those of `x` are rotated
    cos, sin, place, dim, gain, eps, like,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return `x` normalised and rotated, float32."""
    dtype = like.dtype.element_ty
    factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    x = x * factor * tl.load(gain + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    x = x.to(dtype).to(tl.float32)
    if ROTARY:
        other, inside = find_partner(dim, ROTARY, INTERLEAVED), dim < ROTARY
        y = y * factor * tl.load(gain + other, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + place * ROTARY + dim, mask=inside, other=1.0).to(tl.float32)
        s = tl.load(sin + place * ROTARY + dim, mask=inside, other=0.0).to(tl.float32)
        x = x * c + y.to(dtype).to(tl.float32) * s
    return x


@triton.jit
def join_blocks(
    key,  # [slots, DIM]: one layer of the cache, with the keys of tokens
    every_cos,  # [positions, ROTARY]
    every_sin,
    turns,  # int32 [slots, 3]: rotary positions of three parts; with TURNS
    axes,  # int64 [ROTARY]: the part by which a number turns; with TURNS
    slots,  # int64 [T]
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    gain,  # [DIM]
    eps,
    key_scale,  # of 8-bit keys
    like,  # a pointer to the dtype of the model
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SIZE: tl.constexpr,  # tokens of a block
    BESIDE: tl.constexpr,  # that are read at a time, a power of two
    TURNS: tl.constexpr,  # otherwise a token turns by its place in the sequence
    PAGE: tl.constexpr,
    CODES: tl.constexpr,  # of the cache
):
    """Write the key of a block in place of that of its last token, if a program's token is it.

    That is the norm (RMS) of the mean of its tokens' keys, rotated as its first one is. A step's
    own keys must have been written.
    """
    token = tl.program_id(0)
    row = tl.load(rows + token).to(tl.int64)
    seen = find_seen(contexts, query_starts, row, token)
    if (seen > 0) & (seen % SIZE == 0):
        dim = tl.arange(0, PADDED_DIM)[None, :]
        other = find_partner(dim, ROTARY, INTERLEAVED)
        table = tables + row * tl.load(width)
        x, y = tl.zeros([1, PADDED_DIM], tl.float32), tl.zeros([1, PADDED_DIM], tl.float32)
        for low in range(0, SIZE, BESIDE):
            inside = low + tl.arange(0, BESIDE)
            place = seen - SIZE + inside
            page = tl.load(table + place // PAGE, mask=inside < SIZE, other=0)
            at = key + ((page.to(tl.int64) * PAGE + place % PAGE) * DIM)[:, None]
            there = (inside < SIZE)[:, None] & (dim < DIM)
            x += sum_keys(at + dim, there, key_scale, like, CODES)
            y += sum_keys(at + other, there, key_scale, like, CODES)
        dtype = like.dtype.element_ty
        x, y = (x / SIZE).to(dtype).to(tl.float32), (y / SIZE).to(dtype).to(tl.float32)
        first = (seen - SIZE).to(tl.int64)
        if TURNS:
            slot = tl.load(table + first // PAGE).to(tl.int64) * PAGE + first % PAGE
            axis = tl.load(axes + dim, mask=dim < ROTARY, other=0)
            first = tl.load(turns + slot * 3 + axis, mask=dim < ROTARY, other=0).to(tl.int64)
        x = turn(
            x, y, every_cos, every_sin, first, dim, gain, eps, like, DIM, ROTARY, INTERLEAVED
        )
        tl.debug_barrier()  # the last token's key is read before it is overwritten
        # To the slot of this step, which is a spare one where a prefix is only computed again.
        into = key + tl.load(slots + token) * DIM + dim
        store_number(into, x, key_scale, like, dim < DIM, CODES)


@triton.jit
def sum_keys(at, there, scale, like, CODES: tl.constexpr):
    """Return the sum over tokens of their keys at [tokens, PADDED_DIM], float32 [1, PADDED_DIM]."""
    stored = tl.load(at, mask=there, other=0)
    if CODES == "":
        own = stored.to(tl.float32)
    else:
        own = decode_like(stored, tl.zeros([1], tl.float32), CODES) * scale
        own = own.to(like.dtype.element_ty).to(tl.float32)
    return tl.sum(own, 0)[None, :]
# fmt: on
