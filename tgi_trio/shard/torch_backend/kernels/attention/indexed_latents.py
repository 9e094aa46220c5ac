"""The keys of an index beside latents, and the keys of its runs of tokens.

An index key lies behind a token's latent in the cache; with runs (GLM 5.3, 2026), so does what
weighs it in the mean of its run. Such a mean is the key of a whole run, and takes the place of its
last token's key: whenever that token is computed, so that no mean is ever taken for a key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.eight_bits import (
    decode_like,
    encode,
    store_number,
)
from tgi_trio.shard.torch_backend.kernels.attention.latents import write_key, write_normalised
from tgi_trio.shard.torch_backend.kernels.attention.selecting import find_seen
from tgi_trio.shard.torch_backend.kernels.fused import find_partner


# fmt: off
@triton.jit
def write_indexed_latents(
    key,  # [slots, WIDTH]: one layer of the cache
    query,  # [T, QUERY]: compressed queries, normalised; with DOUBLES, and behind them as they are
    asking,  # [T, HIDDEN]: the norm of `hidden`, of which an index's queries are made
    hidden,  # [T, HIDDEN], contiguous: the layer's input; with HIDDEN
    # [T, ...], with `stride` between tokens: QUERY numbers, latents, keys' ends, index keys, the
    # weights of the index's HEADS and, with RUN, what weighs the index key
    source,
    cos,  # [T, ROTARY], as for `rotate_and_write`
    sin,
    index_cos,  # [T, INDEX_ROTARY]
    index_sin,
    slots,  # int64 [T]
    run_bias,  # float32 [RUN, INDEX], added to what weighs keys by place in a run; with RUN_BIAS
    tables,  # int32: rows of `width` block numbers; these five are read with RUN only
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    gain,  # [RANK], with HAS_GAIN
    bias,
    asking_gain,  # [HIDDEN]
    asking_bias,
    query_gain,  # [QUERY]
    query_bias,
    index_gain,  # [INDEX]
    index_bias,
    eps,
    query_eps,
    index_eps,
    asking_eps,
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
    RUN: tl.constexpr, PADDED_RUN: tl.constexpr,  # tokens of a run with one key; 0: there are none
    RUN_BIAS: tl.constexpr,
    PAGE: tl.constexpr,
    COMPRESSES: tl.constexpr,  # there are compressed queries; else nothing happens to queries
    DOUBLES: tl.constexpr,
    HIDDEN: tl.constexpr, PADDED_HIDDEN: tl.constexpr,  # 0: queries of the index are made of those
    ASKING_KIND: tl.constexpr,  # of the norm of `hidden`
    ASKING_GAIN: tl.constexpr, ASKING_BIAS: tl.constexpr,
    CODES: tl.constexpr,  # of the cache
):
    """Do what `write_latents` does, and write index keys: one program of a token for each.

    Another normalises what the index's queries are made of, if nothing else has.
    """
    token = tl.program_id(0).to(tl.int64)
    at = source + token * stride
    into = key + tl.load(slots + token) * WIDTH
    if tl.program_id(1) == 0:
        write_key(
            into, at + QUERY, cos, sin, token, gain, bias, eps, key_scale, RANK, PADDED_RANK,
            ROTARY, PADDED_ROTARY, INTERLEAVED, KIND, HAS_GAIN, HAS_BIAS, CODES,
        )
    elif tl.program_id(1) == 1:
        first = source + QUERY + RANK + ROTARY  # of the step's first token
        into += RANK + ROTARY
        dim = tl.arange(0, PADDED_INDEX)[None, :]
        x = make_index_key(
            first + token * stride, index_gain, index_bias, index_cos, index_sin, token, index_eps,
            dim, dim < INDEX, INDEX, INDEX_ROTARY, BEGIN, INDEX_INTERLEAVED,
        )
        if RUN:
            gates = first + INDEX + HEADS
            gate = tl.load(gates + token * stride + dim, mask=dim < INDEX, other=0.0)
            gate = gate.to(tl.float32)
            store_number(into + INDEX + dim, gate, key_scale, source, dim < INDEX, CODES)
            row = tl.load(rows + token).to(tl.int64)
            seen = find_seen(contexts, query_starts, row, token)
            if (seen > 0) & (seen % RUN == 0):
                x = average_run(
                    first, gates, key + RANK + ROTARY, run_bias, slots, index_gain, index_bias,
                    index_cos, index_sin, token, seen, tables + row * tl.load(width), index_eps,
                    key_scale, stride, WIDTH, INDEX, PADDED_INDEX, INDEX_ROTARY, BEGIN,
                    INDEX_INTERLEAVED, RUN, PADDED_RUN, RUN_BIAS, PAGE, CODES,
                )
        store_number(into + dim, x, key_scale, source, dim < INDEX, CODES)
    else:
        if HIDDEN:  # noqa: SIM102  (constants: what is not there is not compiled)
            if tl.program_id(1) == tl.num_programs(1) - 1:
                write_normalised(
                    asking + token * HIDDEN, hidden + token * HIDDEN, asking_gain, asking_bias,
                    asking_eps, HIDDEN, PADDED_HIDDEN, ASKING_KIND, ASKING_GAIN, ASKING_BIAS,
                )
        if COMPRESSES:  # noqa: SIM102
            if tl.program_id(1) == 2:
                both = query + token * QUERY * (2 if DOUBLES else 1)
                write_normalised(
                    both, at, query_gain, query_bias, query_eps, QUERY, PADDED_QUERY, KIND,
                    HAS_GAIN, HAS_BIAS,
                )
                if DOUBLES:
                    place = tl.arange(0, PADDED_QUERY)
                    plain = tl.load(at + place, mask=place < QUERY, other=0.0)
                    tl.store(both + QUERY + place, plain, mask=place < QUERY)


@triton.jit
def average_run(
    first,  # where the index key of the step's first token lies, with `stride` between tokens
    gates,  # likewise, what weighs it
    keys,  # [slots, 2 INDEX], with WIDTH between slots: as for `write_indexed_latents`
    run_bias, slots, gain, bias, cos, sin,
    token, seen,  # the last token of a run, and how many tokens its sequence has with it
    table,  # the row's block numbers
    eps, key_scale, stride,
    WIDTH: tl.constexpr, INDEX: tl.constexpr, PADDED_INDEX: tl.constexpr, ROTARY: tl.constexpr,
    BEGIN: tl.constexpr, INTERLEAVED: tl.constexpr, RUN: tl.constexpr, PADDED_RUN: tl.constexpr,
    RUN_BIAS: tl.constexpr, PAGE: tl.constexpr, CODES: tl.constexpr,
):
    """Return the weighted mean of a run's keys, float32 [1, PADDED_INDEX].

    Tokens of the step are before `token` in it, each in the slot of its place in the run: their
    keys are made anew, as other programs write them meanwhile. All others are in the cache.
    """
    ahead, dim = tl.arange(0, PADDED_RUN), tl.arange(0, PADDED_INDEX)[None, :]
    here, place, beside = ahead < RUN, seen - RUN + ahead, token - RUN + 1 + ahead
    block = tl.load(table + place // PAGE, mask=here, other=0)
    slot = block.to(tl.int64) * PAGE + place % PAGE
    new = tl.load(slots + beside, mask=here & (beside >= 0), other=-1) == slot
    new = here & (new | (ahead == RUN - 1))
    inside = dim < INDEX
    at = keys + slot[:, None] * WIDTH + dim
    there = (here & ~new)[:, None] & inside
    key, gate = (
        load_decoded(at, there, key_scale, CODES),
        load_decoded(at + INDEX, there, key_scale, CODES),
    )
    there, from_first = new[:, None] & inside, beside[:, None] * stride
    made = make_index_key(
        first + from_first, gain, bias, cos, sin, beside[:, None], eps, dim, there, INDEX, ROTARY,
        BEGIN, INTERLEAVED,
    )
    key = tl.where(there, keep_number(made, key_scale, first, CODES), key)
    made = tl.load(gates + from_first + dim, mask=there, other=0.0).to(tl.float32)
    gate = tl.where(there, keep_number(made, key_scale, first, CODES), gate)
    if RUN_BIAS:
        there = here[:, None] & inside
        gate += tl.load(run_bias + ahead[:, None] * INDEX + dim, mask=there, other=0.0)
    gate = tl.where(here[:, None], gate, float("-inf"))
    odds = tl.exp(gate - tl.max(gate, 0)[None, :])
    return (tl.sum(odds * key, 0) / tl.sum(odds, 0))[None, :]
# fmt: on


# fmt: off
@triton.jit
def write_index_keys(
    key,  # a part of one layer of the cache, with `key_stride` between slots
    asking,  # as for `write_indexed_latents`, as are the next
    hidden,
    source,  # [T, ...], with `stride` between tokens: index keys come first
    cos,  # [T, ROTARY]
    sin,
    slots,  # int64 [T]
    gain,  # [DIM]
    bias,
    asking_gain,
    asking_bias,
    eps,
    asking_eps,
    key_scale,  # of 8-bit keys
    key_stride,
    stride,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BEGIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HIDDEN: tl.constexpr, PADDED_HIDDEN: tl.constexpr,
    ASKING_KIND: tl.constexpr,
    ASKING_GAIN: tl.constexpr, ASKING_BIAS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Write index keys behind the latents of another layer: one program of a token.

    Another normalises what the index's queries are made of, if nothing else has.
    """
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        dim = tl.arange(0, PADDED_DIM)[None, :]
        x = make_index_key(
            source + token * stride, gain, bias, cos, sin, token, eps, dim, dim < DIM, DIM, ROTARY,
            BEGIN, INTERLEAVED,
        )
        into = key + tl.load(slots + token) * key_stride
        store_number(into + dim, x, key_scale, source, dim < DIM, CODES)
    elif HIDDEN:
        write_normalised(
            asking + token * HIDDEN, hidden + token * HIDDEN, asking_gain, asking_bias, asking_eps,
            HIDDEN, PADDED_HIDDEN, ASKING_KIND, ASKING_GAIN, ASKING_BIAS,
        )
# fmt: on


@triton.jit
def make_index_key(
    at,  # pointers to the first number of each key, [keys, 1] or a single one
    gain,
    bias,
    cos,
    sin,
    token,  # of each key
    eps,
    dim,  # [1, padded DIM]
    inside,  # [keys, padded DIM]: of which numbers there are
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    BEGIN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Return index keys, float32: a LayerNorm, then some numbers rotated."""
    x = tl.load(at + dim, mask=inside, other=0.0).to(tl.float32)
    mean = (tl.sum(x, 1) / DIM)[:, None]
    centred = tl.where(inside, x - mean, 0.0)
    factor = tl.rsqrt(tl.sum(centred * centred, 1) / DIM + eps)[:, None]
    x = finish_norm(x, dim, dim < DIM, mean, factor, gain, bias, at)
    if ROTARY:
        turned = dim - BEGIN
        there = (turned >= 0) & (turned < ROTARY)
        other = BEGIN + find_partner(turned, ROTARY, INTERLEAVED)
        y = tl.load(at + other, mask=inside & there, other=0.0).to(tl.float32)
        y = finish_norm(y, other, there, mean, factor, gain, bias, at)
        x = turn(x, y, cos, sin, token, turned, inside & there, ROTARY)
    return x


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
def keep_number(x, scale, like, CODES: tl.constexpr):
    """Return float32 numbers as `store_number` keeps them, and `load_decoded` reads them."""
    x = x.to(like.dtype.element_ty).to(tl.float32)
    if CODES == "":
        return x
    else:
        return decode_like(encode(x, scale, CODES), tl.zeros([1], tl.float32), CODES) * scale


@triton.jit
def load_decoded(at, there, scale, CODES: tl.constexpr):
    """Return numbers of the cache, float32."""
    like = tl.zeros([1], tl.float32)
    x = decode_like(tl.load(at, mask=there, other=0), like, CODES).to(tl.float32)
    return x * scale if CODES != "" else x
