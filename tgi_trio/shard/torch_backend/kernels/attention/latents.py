"""Writing latents to the cache, normalised and with the rotated ends of their keys.

Roundings are those of `fused.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.eight_bits import store_number
from tgi_trio.shard.torch_backend.kernels.fused import load_normalised, rotate


@triton.jit
def write_latents(
    key,  # [slots, WIDTH]: one layer of the cache
    query,  # [T, QUERY]: compressed queries, normalised; written by each token's second program
    source,  # [T, ...], with `stride` between tokens: QUERY numbers, then latents, then keys' ends
    cos,  # [T, ROTARY], as for `rotate_and_write`
    sin,
    slots,  # int64 [T]
    gain,  # [RANK], with HAS_GAIN
    bias,
    query_gain,  # [QUERY]
    query_bias,
    eps,
    query_eps,
    key_scale,  # of 8-bit keys
    stride,
    QUERY: tl.constexpr,
    PADDED_QUERY: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROTARY: tl.constexpr,  # 0: keys have no ends
    PADDED_ROTARY: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row of the cache: at least RANK + ROTARY
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,  # of both norms
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODES: tl.constexpr,  # of the cache
):
    """Write normalised latents and rotated keys to the cache; normalise compressed queries."""
    token = tl.program_id(0).to(tl.int64)
    at = source + token * stride
    if tl.program_id(1) == 0:
        into = key + tl.load(slots + token) * WIDTH
        write_key(
            into, at + QUERY, cos, sin, token, gain, bias, eps, key_scale, RANK, PADDED_RANK,
            ROTARY, PADDED_ROTARY, INTERLEAVED, KIND, HAS_GAIN, HAS_BIAS, CODES,
        )  # fmt: skip
    else:
        write_normalised(
            query + token * QUERY, at, query_gain, query_bias, query_eps, QUERY, PADDED_QUERY,
            KIND, HAS_GAIN, HAS_BIAS,
        )  # fmt: skip


@triton.jit
def write_key(
    into,  # where a token's key begins
    at,  # its latent, then its end
    cos,
    sin,
    token,
    gain,
    bias,
    eps,
    key_scale,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Write one token's normalised latent, and the rotated end of its key, to the cache."""
    dim = tl.arange(0, PADDED_RANK)[None, :]
    x = load_normalised(at, gain, bias, eps, dim, RANK, KIND, HAS_GAIN, HAS_BIAS)
    store_number(into + dim, x, key_scale, at, dim < RANK, CODES)
    if ROTARY:
        turned = tl.arange(0, PADDED_ROTARY)[None, :]
        there = turned < ROTARY
        y = rotate(at + RANK, cos, sin, token, turned, there, ROTARY, INTERLEAVED)
        store_number(into + RANK + turned, y, key_scale, at, there, CODES)


@triton.jit
def write_normalised(
    into,
    at,
    gain,
    bias,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Write the SIZE numbers at `at`, normalised."""
    place = tl.arange(0, PADDED)[None, :]
    x = load_normalised(at, gain, bias, eps, place, SIZE, KIND, HAS_GAIN, HAS_BIAS)
    tl.store(into + place, x.to(into.dtype.element_ty), mask=place < SIZE)
