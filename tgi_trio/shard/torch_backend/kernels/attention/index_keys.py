"""Keys and queries of an index, and of attention, from what a layer projects to where it is read.

The key of a block of tokens (Qwen 4) is made in the step that computes its last token, by the
launch that writes the step's tokens: what others write meanwhile is read where they read it.
Results are rounded where torch's separate operations would round them, except within a rotation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.eight_bits import (
    decode_like,
    encode,
    store_number,
)
from tgi_trio.shard.torch_backend.kernels.attention.rotating import write_some_heads
from tgi_trio.shard.torch_backend.kernels.attention.selecting import find_seen
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# fmt: off
@triton.jit
def write_heads_and_index(
    query, key, value, qkv, cos, sin, slots, gain, bias, query_scale,  # as for `rotate_and_write`
    eps, clip, value_factor, key_scale, value_scale, stride,
    asked,  # [T, INDEX_HEADS, INDEX_DIM], written
    index_key,  # [slots, INDEX_DIM]: one layer of the cache, with the scale of keys
    source,  # [T, (INDEX_HEADS + 1) * INDEX_DIM]: queries of the index, then its key
    query_gain, key_gain,  # [INDEX_DIM]
    every_cos, every_sin,  # [positions, ROTARY]; from here to `rows` read with SIZE
    turns,  # int32 [slots, 3]: rotary positions of three parts; with TURNS
    axes,  # int64 [ROTARY]: the part by which a number turns; with TURNS
    tables, width, contexts, query_starts, rows,  # as for `write_indexed_latents`
    query_eps, index_eps,
    source_stride,  # between tokens
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, CLIPS: tl.constexpr,
    NORM: tl.constexpr, NORM_LAST: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCALES_QUERIES: tl.constexpr, KEYS_AS_VALUES: tl.constexpr, VALUE_NORM: tl.constexpr,
    CODES: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of a token, that have heads of attention: the first ones
    INDEX_HEADS: tl.constexpr, INDEX_DIM: tl.constexpr, INDEX_PADDED_DIM: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,  # heads of a program
    SIZE: tl.constexpr,  # tokens of a block that has a key; 0: each token has one
    BESIDE: tl.constexpr,  # of a block, that are read at a time, a power of two
    TURNS: tl.constexpr,  # otherwise a block turns by its place in the sequence
    PAGE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Do what `rotate_and_write` does, and the same for an index, which turns as heads do."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    part = tl.program_id(1)
    if part < PROGRAMS:
        write_some_heads(
            tl.program_id(0), part, query, key, value, qkv, cos, sin, slots, gain, bias,
            query_scale, eps, clip, value_factor, key_scale, value_scale, stride, HEADS, KV_HEADS,
            DIM, VALUE, PADDED_DIM, ROTARY, INTERLEAVED, CLIPS, NORM, NORM_LAST, HAS_BIAS,
            SCALES_QUERIES, KEYS_AS_VALUES, VALUE_NORM, CODES, FIRST, BLOCK,
        )
    else:
        write_index(
            part - PROGRAMS, asked, index_key, source, cos, sin, slots, query_gain, key_gain,
            every_cos, every_sin, turns, axes, tables, width, contexts, query_starts, rows,
            query_eps, index_eps, key_scale, source_stride, INDEX_HEADS, INDEX_DIM,
            INDEX_PADDED_DIM, ROTARY, INTERLEAVED, SIZE, BESIDE, TURNS, PAGE, CODES, INDEX_BLOCK,
        )


@triton.jit
def write_index(
    part,  # 0: the key; then some heads each
    query,  # [T, HEADS, DIM], written
    key, source, cos, sin, slots, query_gain, key_gain, every_cos, every_sin, turns, axes,
    tables, width, contexts, query_starts, rows, query_eps, key_eps, key_scale, stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, SIZE: tl.constexpr, BESIDE: tl.constexpr, TURNS: tl.constexpr,
    PAGE: tl.constexpr, CODES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Normalise (RMS) and rotate a token's queries or its key, and write the key to its slot.

    With SIZE keys are written as they are projected. If a block ends with the token, its key is
    normalised and rotated instead, and takes the place of the token's, which nobody else reads.
    """
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    if part == 0:
        at = source + token * stride + HEADS * DIM
        if SIZE:
            x = tl.load(at + dim, mask=dim < DIM, other=0.0).to(tl.float32)
            row = tl.load(rows + token).to(tl.int64)
            seen = find_seen(contexts, query_starts, row, token)
            if (seen > 0) & (seen % SIZE == 0):
                x = make_block_key(
                    key, source + HEADS * DIM, every_cos, every_sin, turns, axes, slots,
                    tables + row * tl.load(width), token, seen, key_gain, key_eps, key_scale,
                    stride, DIM, PADDED_DIM, ROTARY, INTERLEAVED, SIZE, BESIDE, TURNS, PAGE, CODES,
                )
        else:
            x = turn_heads(
                at, cos, sin, token, dim, dim < DIM, key_gain, key_eps, source, DIM, ROTARY,
                INTERLEAVED,
            )
        into = key + tl.load(slots + token) * DIM + dim
        store_number(into, x, key_scale, source, dim < DIM, CODES)
    else:
        head = (part - 1) * BLOCK + tl.arange(0, BLOCK)[:, None]
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
def make_block_key(
    key,  # as for `write_index`, as is what is not explained
    first,  # to the key of the step's first token, with `stride` between tokens
    every_cos, every_sin, turns, axes, slots,
    table,  # the row's block numbers
    token,  # the block's last one
    seen,  # tokens before it, and itself
    gain, eps, key_scale, stride,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    SIZE: tl.constexpr, BESIDE: tl.constexpr, TURNS: tl.constexpr, PAGE: tl.constexpr,
    CODES: tl.constexpr,
):
    """Return the key of the block that ends before position `seen`, float32 [1, PADDED_DIM].

    That is the norm (RMS) of the mean of its tokens' keys, rotated as its first one is. Tokens of
    the step are before `token` in it, each in the slot of its place in the block.
    """
    dim = tl.arange(0, PADDED_DIM)[None, :]
    other = find_partner(dim, ROTARY, INTERLEAVED)
    x, y = tl.zeros([1, PADDED_DIM], tl.float32), tl.zeros([1, PADDED_DIM], tl.float32)
    for low in range(0, SIZE, BESIDE):
        inside = low + tl.arange(0, BESIDE)
        here, place, beside = inside < SIZE, seen - SIZE + inside, token - SIZE + 1 + inside
        page = tl.load(table + place // PAGE, mask=here, other=0).to(tl.int64)
        slot = page * PAGE + place % PAGE
        new = tl.load(slots + beside, mask=here & (beside >= 0), other=-1) == slot
        new = here & (new | (beside == token))
        kept, fresh = key + (slot * DIM)[:, None], first + (beside * stride)[:, None]
        there = here[:, None] & (dim < DIM)
        x += sum_keys(kept + dim, fresh + dim, there, new[:, None], key_scale, CODES)
        y += sum_keys(kept + other, fresh + other, there, new[:, None], key_scale, CODES)
    dtype = first.dtype.element_ty
    x, y = (x / SIZE).to(dtype).to(tl.float32), (y / SIZE).to(dtype).to(tl.float32)
    begin = (seen - SIZE).to(tl.int64)
    if TURNS:
        slot = tl.load(table + begin // PAGE).to(tl.int64) * PAGE + begin % PAGE
        axis = tl.load(axes + dim, mask=dim < ROTARY, other=0)
        begin = tl.load(turns + slot * 3 + axis, mask=dim < ROTARY, other=0).to(tl.int64)
    return turn(
        x, y, every_cos, every_sin, begin, dim, gain, eps, first, DIM, ROTARY, INTERLEAVED
    )


@triton.jit
def sum_keys(kept, fresh, there, new, scale, CODES: tl.constexpr):
    """Return the sum over tokens of their keys [tokens, PADDED_DIM], float32 [1, PADDED_DIM].

    `new` ones have not been kept yet, and are rounded as if they had.
    """
    stored = tl.load(kept, mask=there & ~new, other=0)
    made = tl.load(fresh, mask=there & new, other=0.0).to(tl.float32)
    if CODES == "":
        own = stored.to(tl.float32)
    else:
        none = tl.zeros([1], tl.float32)
        dtype = fresh.dtype.element_ty
        own = (decode_like(stored, none, CODES) * scale).to(dtype).to(tl.float32)
        made = decode_like(encode(made, scale, CODES), none, CODES) * scale
        made = made.to(dtype).to(tl.float32)
    return tl.sum(tl.where(new, made, own), 0)[None, :]
# fmt: on
