"""The keys of an index beside latents, and the keys of its runs of tokens.

An index key lies behind a token's latent in the cache; with runs (GLM 5.3, 2026), so does what
weighs it in the mean of its run. Such a mean is the key of a whole run, and takes the place of its
last token's key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.eight_bits import decode_like, store_number
from tgi_trio.shard.torch_backend.kernels.fused import find_partner
from tgi_trio.shard.torch_backend.kernels.latents import write_key, write_normalised
from tgi_trio.shard.torch_backend.kernels.selecting import find_seen


# fmt: off
@triton.jit
def write_indexed_latents(
    key,  # [slots, WIDTH]: one layer of the cache
    query,  # [T, QUERY]: compressed queries, normalised
    # [T, ...], with `stride` between tokens: QUERY numbers, latents, keys' ends, index keys, the
    # weights of the index's HEADS and, if POOLS, what weighs the index key
    source,
    cos,  # [T, ROTARY], as for `rotate_and_write`
    sin,
    index_cos,  # [T, INDEX_ROTARY]
    index_sin,
    slots,  # int64 [T]
    gain,  # [RANK], with HAS_GAIN
    bias,
    query_gain,  # [QUERY]
    query_bias,
    index_gain,  # [INDEX]
    index_bias,
    eps,
    query_eps,
    index_eps,
    key_scale,  # of 8-bit keys
    stride,
    QUERY: tl.constexpr, PADDED_QUERY: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    ROTARY: tl.constexpr, PADDED_ROTARY: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,  # of the norms of latents and queries
    HAS_GAIN: tl.constexpr, HAS_BIAS: tl.constexpr,
    INDEX: tl.constexpr, PADDED_INDEX: tl.constexpr,  # numbers of an index key
    HEADS: tl.constexpr,  # of the index
    INDEX_ROTARY: tl.constexpr,
    BEGIN: tl.constexpr,  # of the INDEX_ROTARY numbers that are rotated
    INDEX_INTERLEAVED: tl.constexpr,
    POOLS: tl.constexpr,
    COMPRESSES: tl.constexpr,  # there are compressed queries; else nothing happens to queries
    CODES: tl.constexpr,  # of the cache
):
    """Do what `write_latents` does, and write index keys: one program of a token for each."""
    token = tl.program_id(0).to(tl.int64)
    at = source + token * stride
    into = key + tl.load(slots + token) * WIDTH
    if tl.program_id(1) == 0:
        write_key(
            into, at + QUERY, cos, sin, token, gain, bias, eps, key_scale, RANK, PADDED_RANK,
            ROTARY, PADDED_ROTARY, INTERLEAVED, KIND, HAS_GAIN, HAS_BIAS, CODES,
        )
    elif tl.program_id(1) == 1:
        at, into = at + QUERY + RANK + ROTARY, into + RANK + ROTARY
        write_index_key(
            into, at, index_gain, index_bias, index_cos, index_sin, token, index_eps, key_scale,
            INDEX, PADDED_INDEX, INDEX_ROTARY, BEGIN, INDEX_INTERLEAVED, CODES,
        )
        if POOLS:
            dim = tl.arange(0, PADDED_INDEX)[None, :]
            x = tl.load(at + INDEX + HEADS + dim, mask=dim < INDEX, other=0.0).to(tl.float32)
            store_number(into + INDEX + dim, x, key_scale, source, dim < INDEX, CODES)
    elif COMPRESSES:
        write_normalised(
            query + token * QUERY, at, query_gain, query_bias, query_eps, QUERY, PADDED_QUERY,
            KIND, HAS_GAIN, HAS_BIAS,
        )
# fmt: on


@triton.jit
def write_index_keys(
    key,  # a part of one layer of the cache, with `key_stride` between slots
    source,  # [T, ...], with `stride` between tokens: index keys come first
    cos,  # [T, ROTARY]
    sin,
    slots,  # int64 [T]
    gain,  # [DIM]
    bias,
    eps,
    key_scale,  # of 8-bit keys
    key_stride,
    stride,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BEGIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CODES: tl.constexpr,
):
    """Write index keys behind the latents of another layer: one program of a token."""
    token = tl.program_id(0).to(tl.int64)
    into = key + tl.load(slots + token) * key_stride
    write_index_key(
        into, source + token * stride, gain, bias, cos, sin, token, eps, key_scale,
        DIM, PADDED_DIM, ROTARY, BEGIN, INTERLEAVED, CODES,
    )  # fmt: skip


@triton.jit
def write_index_key(
    into,
    at,
    gain,
    bias,
    cos,
    sin,
    token,
    eps,
    key_scale,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BEGIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CODES: tl.constexpr,
):
    """Write the DIM numbers at `at`: a LayerNorm, then some of them rotated."""
    dim = tl.arange(0, PADDED_DIM)[None, :]
    inside = dim < DIM
    x = tl.load(at + dim, mask=inside, other=0.0).to(tl.float32)
    mean = (tl.sum(x, 1) / DIM)[:, None]
    centred = tl.where(inside, x - mean, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 1) / DIM + eps)[:, None]
    x = finish_norm(x, dim, inside, mean, factor, gain, bias, at)
    if ROTARY:
        turned = dim - BEGIN
        there = (turned >= 0) & (turned < ROTARY)
        other = BEGIN + find_partner(turned, ROTARY, INTERLEAVED)
        y = tl.load(at + other, mask=there, other=0.0).to(tl.float32)
        y = finish_norm(y, other, there, mean, factor, gain, bias, at)
        x = turn(x, y, cos, sin, token, turned, there, ROTARY)
    store_number(into + dim, x, key_scale, at, inside, CODES)


@triton.jit
def finish_norm(x, dim, inside, mean, factor, gain, bias, like):
    """Return numbers normalised, weighted and rounded, float32; `like` points to their dtype."""
    x = (x - mean) * factor * tl.load(gain + dim, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + dim, mask=inside, other=0.0).to(tl.float32)
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def turn(x, partner, cos, sin, token, turned, there, ROTARY: tl.constexpr):
    """Return numbers of which those that are `there` are rotated with their partners."""
    c = tl.load(cos + token * ROTARY + turned, mask=there, other=1.0).to(tl.float32)
    s = tl.load(sin + token * ROTARY + turned, mask=there, other=0.0).to(tl.float32)
    return x * c + partner * s


@triton.jit
def average_runs(
    keys,  # [slots, 2 DIM], with `stride` between slots: index keys, then what weighs them
    bias,  # float32 [RUN, DIM], added to the latter by place in the run; read with HAS_BIAS
    like,  # a pointer to the dtype of what is written
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    scale,  # of 8-bit keys
    stride,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    RUN: tl.constexpr,  # tokens of a run
    PADDED_RUN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PAGE: tl.constexpr,
    CODES: tl.constexpr,
):
    """For a token that ends a run: write the mean of the run's keys in the place of its own.

    A mean is written once for each time that its last token is computed, which writes that token's
    key first; so no mean is ever taken for a key.
    """
    token = tl.program_id(0)
    row = tl.load(rows + token).to(tl.int64)
    seen = find_seen(contexts, query_starts, row, token)
    if (seen > 0) & (seen % RUN == 0):
        ahead = tl.arange(0, PADDED_RUN)
        place, here = seen - RUN + ahead, ahead < RUN
        table = tables + row * tl.load(width)
        block = tl.load(table + place // PAGE, mask=here, other=0)
        slot = block.to(tl.int64) * PAGE + place % PAGE
        dim = tl.arange(0, PADDED_DIM)[None, :]
        at = keys + slot[:, None] * stride + dim
        there = here[:, None] & (dim < DIM)
        key = load_decoded(at, there, scale, CODES)
        gate = load_decoded(at + DIM, there, scale, CODES)
        if HAS_BIAS:
            gate += tl.load(bias + ahead[:, None] * DIM + dim, mask=there, other=0.0)
        gate = tl.where(here[:, None], gate, float("-inf"))
        odds = tl.exp(gate - tl.max(gate, 0)[None, :])
        mean = (tl.sum(odds * key, 0) / tl.sum(odds, 0))[None, :]
        last = tl.load(table + (seen - 1) // PAGE).to(tl.int64) * PAGE + (seen - 1) % PAGE
        tl.debug_barrier()  # all threads have read what is overwritten
        store_number(keys + last * stride + dim, mean, scale, like, dim < DIM, CODES)


@triton.jit
def load_decoded(at, there, scale, CODES: tl.constexpr):
    """Return numbers of the cache, float32."""
    like = tl.zeros([1], tl.float32)
    x = decode_like(tl.load(at, mask=there, other=0), like, CODES).to(tl.float32)
    return x * scale if CODES != "" else x
