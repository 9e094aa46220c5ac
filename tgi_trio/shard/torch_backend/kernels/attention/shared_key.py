"""One key per token, and entries of runs (DeepSeek V4): what is written to the cache.

The last numbers of a key, a query or a result are rotated, neighbours together. Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.entries import make_entry
from tgi_trio.shard.torch_backend.kernels.attention.interleaved_rotation import (
    load_turns,
    turn_neighbours,
)
from tgi_trio.shard.torch_backend.kernels.attention.selecting import find_seen
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
    tables,  # int32: rows of `width` block numbers; from here to `index_gain` read with ENTRIES
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    frequencies,  # float32 [ROTARY / 2]
    bias,  # float32 [RATE, DIM]; of OVERLAPPING runs [RATE, 2 DIM]
    entry_gain,  # [DIM]
    index_bias,  # of entries by which an index chooses
    index_gain,
    query_gain,  # [QUERY]
    gain,  # [DIM]
    query_eps, eps, entry_eps, index_eps,
    turn_scale,  # of cosines and sines of entries
    stride,
    QUERY: tl.constexpr, PADDED_QUERY: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr,
    KEPT: tl.constexpr,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,  # 0: there is no index
    KIND: tl.constexpr,  # of both norms
    BLOCK: tl.constexpr,  # numbers of KEPT that a program writes
    ENTRIES: tl.constexpr,  # that are made of a run: 2 with an index
    RATE: tl.constexpr,  # tokens of a run
    OVERLAPPING: tl.constexpr,  # an entry is made of the preceding run's tokens, too
    AVERAGED: tl.constexpr,  # tokens of a step of the loop
    # KEPT begins with as many numbers as `bias` has columns, then their weights; those of an index
    # begin behind that.
    INDEX_DIM: tl.constexpr, INDEX_PADDED_DIM: tl.constexpr, INDEX_BEGIN: tl.constexpr,
    INDEX_AVERAGED: tl.constexpr,
    PAGE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Write a token's key, normalised and rotated, and behind it what entries are made of.

    Of a token's programs the first has what queries are made of, the second the key. The last ones
    make an entry each, if a run ends with the token.
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
        ends, seen = False, 0
        table = tables
        if ENTRIES:
            row = tl.load(rows + token).to(tl.int64)
            seen = find_seen(contexts, query_starts, row, token)
            ends = (seen > 0) & (seen % RATE == 0)
            table += row * tl.load(width)
        copies: tl.constexpr = (KEPT + BLOCK - 1) // BLOCK
        first, kept = source + QUERY + DIM, keys + DIM
        if part < 2 + copies:
            number = (part - 2) * BLOCK + tl.arange(0, BLOCK)
            there = number < KEPT
            if ENTRIES:  # whose places other programs write to
                wide: tl.constexpr = 2 if OVERLAPPING else 1
                there = there & ~(ends & lies_in(number, (wide - 1) * DIM, DIM))
                if ENTRIES > 1:
                    made: tl.constexpr = INDEX_BEGIN + (wide - 1) * INDEX_DIM
                    there = there & ~(ends & lies_in(number, made, INDEX_DIM))
            x = tl.load(first + token * stride + number, mask=there, other=0.0)
            tl.store(into + DIM + number, x, mask=there)
        elif ENTRIES:
            if ends & (part == 2 + copies):
                make_entry(
                    kept, first, slots, table, token, seen, frequencies, bias, entry_gain,
                    turn_scale, entry_eps, stride, DIM + KEPT, DIM, PADDED_DIM, AVERAGED, RATE,
                    OVERLAPPING, ROTARY, KIND, PAGE,
                )
            if ENTRIES > 1:  # noqa: SIM102  (a constant: else there is nothing to compile)
                if ends & (part == 3 + copies):
                    make_entry(
                        kept + INDEX_BEGIN, first + INDEX_BEGIN, slots, table, token, seen,
                        frequencies, index_bias, index_gain, turn_scale, index_eps, stride,
                        DIM + KEPT, INDEX_DIM, INDEX_PADDED_DIM, INDEX_AVERAGED, RATE, OVERLAPPING,
                        ROTARY, KIND, PAGE,
                    )
# fmt: on


@triton.jit
def lies_in(number, begin, size):
    """Return whether numbers are among the `size` that begin with `begin`."""
    return (number >= begin) & (number < begin + size)
