"""One key per token (DeepSeek V4): what is written to the cache.

The last numbers of a key, a query or a result are rotated, neighbours together. Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.fused import load_normalised
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# fmt: off
@triton.jit
def write_shared_keys(
    keys,  # [slots, DIM + KEPT]: one layer of the cache
    compressed,  # [T, QUERY], written: compressed queries, normalised
    weights,  # float32 [T, HEADS], written: of an index's heads
    source,  # [T, QUERY + DIM + KEPT + HEADS], with `stride` between tokens
    cos,  # [T, ROTARY], as for `rotate_and_write`
    sin,
    slots,  # int64 [T]
    query_gain,  # [QUERY]
    gain,  # [DIM]
    query_eps, eps, stride,
    QUERY: tl.constexpr, PADDED_QUERY: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr,
    KEPT: tl.constexpr,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,  # 0: there is no index
    KIND: tl.constexpr,  # of both norms
    BLOCK: tl.constexpr,  # numbers of KEPT that a program writes
    OVERLAPS: tl.constexpr,
):
    """Write a token's key, normalised and rotated, and behind it what entries are made of.

    Of a token's programs the first has what queries are made of, the second the key.
    """
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = source + token * stride
    into = keys + tl.load(slots + token) * (DIM + KEPT)
    dtype = keys.dtype.element_ty
    if part == 0:
        place = tl.arange(0, PADDED_QUERY)[None, :]
        x = load_normalised(at, query_gain, query_gain, query_eps, place, QUERY, KIND, True, False)
        tl.store(compressed + token * QUERY + place, x.to(dtype), mask=place < QUERY)
        if HEADS:
            head = tl.arange(0, PADDED_HEADS)
            own = tl.load(at + QUERY + DIM + KEPT + head, mask=head < HEADS, other=0.0)
            tl.store(weights + token * HEADS + head, own.to(tl.float32), mask=head < HEADS)
    elif part == 1:
        dim = tl.arange(0, PADDED_DIM)[None, :]
        key = load_normalised(at + QUERY, gain, gain, eps, dim, DIM, KIND, True, False)
        c, s = load_turns(cos, sin, token, dim, DIM, ROTARY)
        key = turn_neighbours(key.to(dtype).to(tl.float32), c, s)
        tl.store(into + dim, key.to(dtype), mask=dim < DIM)
    else:
        number = (part - 2) * BLOCK + tl.arange(0, BLOCK)
        kept = tl.load(at + QUERY + DIM + number, mask=number < KEPT, other=0.0)
        tl.store(into + DIM + number, kept, mask=number < KEPT)
# fmt: on


@triton.jit
def load_turns(cos, sin, token, dim, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Return a token's cosines and sines for all numbers of a head; 1 and 0 before the last."""
    turned = dim - (DIM - ROTARY)
    there = (turned >= 0) & (dim < DIM)
    at = token * ROTARY + turned
    c = tl.load(cos + at, mask=there, other=1.0).to(tl.float32)
    return c, tl.load(sin + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def turn_neighbours(x, c, s):
    """Return `x` [rows, numbers] rotated: neighbours together, by cosines and signed sines."""
    first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    other = tl.reshape(tl.join(second, first), (x.shape[0], x.shape[1]))
    return x * c + other * s
