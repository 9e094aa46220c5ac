"""Entries: keys of whole runs of tokens, made where their last token's numbers lie (DeepSeek V4).

A number of an entry is the mean of a run's tokens, weighted by a softmax of its own over them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.fused import normalise
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier
from tgi_trio.shard.torch_backend.kernels.selecting import find_seen
from tgi_trio.shard.torch_backend.kernels.shared_key import turn_neighbours


# fmt: off
@triton.jit
def make_entries(
    keys,  # [slots, STRIDE]: one layer of the cache
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    frequencies,  # float32 [ROTARY / 2]
    bias,  # float32 [RATE, DIM]; of OVERLAPPING runs [RATE, 2 DIM]
    gain,  # [DIM]
    index_bias,  # of entries by which an index chooses
    index_gain,
    turn_scale,  # of cosines and sines
    eps, index_eps,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    # The place of what is kept of a token: as many numbers as `bias` has columns, then their
    # weights.
    BEGIN: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a step of the loop
    INDEX_DIM: tl.constexpr, INDEX_PADDED_DIM: tl.constexpr, INDEX_BEGIN: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    RATE: tl.constexpr,  # tokens of a run
    OVERLAPPING: tl.constexpr,  # an entry is made of the preceding run's tokens, too
    ROTARY: tl.constexpr,
    KIND: tl.constexpr,  # of the norms
    PAGE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Make the entries of a token with which a run ends: one in each of its programs."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    token = tl.program_id(0)
    row = tl.load(rows + token).to(tl.int64)
    seen = find_seen(contexts, query_starts, row, token)
    if (seen > 0) & (seen % RATE == 0):
        table = tables + row * tl.load(width)
        if tl.program_id(1) == 0:
            make_entry(
                keys + BEGIN, table, seen, frequencies, bias, gain, turn_scale, eps,
                STRIDE, DIM, PADDED_DIM, BLOCK, RATE, OVERLAPPING, ROTARY, KIND, PAGE,
            )
        else:
            make_entry(
                keys + INDEX_BEGIN, table, seen, frequencies, index_bias, index_gain, turn_scale,
                index_eps, STRIDE, INDEX_DIM, INDEX_PADDED_DIM, INDEX_BLOCK, RATE, OVERLAPPING,
                ROTARY, KIND, PAGE,
            )


@triton.jit
def make_entry(
    kept,  # pointer to what is kept of the cache's first token
    table, seen, frequencies, bias, gain, turn_scale, eps,
    STRIDE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
    RATE: tl.constexpr, OVERLAPPING: tl.constexpr, ROTARY: tl.constexpr, KIND: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Make the entry of the run that ends before position `seen`.

    Of the preceding run the first DIM numbers are averaged, of the run itself the last DIM, and
    nobody else reads these: the entry takes their place.
    """
    wide: tl.constexpr = 2 * DIM if OVERLAPPING else DIM
    tokens: tl.constexpr = 2 * RATE if OVERLAPPING else RATE
    dim = tl.arange(0, PADDED_DIM)[None, :]
    best = tl.full([PADDED_DIM], float("-inf"), tl.float32)
    mass, total = tl.zeros([PADDED_DIM], tl.float32), tl.zeros([PADDED_DIM], tl.float32)
    for low in range(0, tokens, BLOCK):
        which = low + tl.arange(0, BLOCK)[:, None]
        place = seen - tokens + which
        there = (which < tokens) & (place >= 0)
        block = tl.load(table + place // PAGE, mask=there, other=0).to(tl.int64)
        column = tl.where(which < tokens - RATE, 0, wide - DIM) + dim
        at = kept + (block * PAGE + place % PAGE) * STRIDE + column
        inside = there & (dim < DIM)
        number = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(at + wide, mask=inside, other=0.0).to(tl.float32)
        weight += tl.load(bias + which % RATE * wide + column, mask=inside, other=0.0)
        weight = tl.where(there, weight, float("-inf"))
        higher = tl.maximum(best, tl.max(weight, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # no token yet
        fade, odds = tl.exp(best - level), tl.exp(weight - level[None, :])
        mass = mass * fade + tl.sum(odds, 0)
        total = total * fade + tl.sum(odds * number, 0)
        best = higher
    dtype = kept.dtype.element_ty
    x = (total / mass).to(dtype).to(tl.float32)[None, :]
    x = tl.where(dim < DIM, x, 0.0)
    x = normalise(x, dim, gain, gain, eps, DIM, KIND, True, False).to(dtype).to(tl.float32)
    turned = dim - (DIM - ROTARY)
    there = (turned >= 0) & (dim < DIM)
    angle = (seen - RATE).to(tl.float32)
    angle *= tl.load(frequencies + turned // 2, mask=there, other=0.0)
    c = tl.where(there, tl.cos(angle) * turn_scale, 1.0).to(dtype).to(tl.float32)
    s = tl.where(there, tl.sin(angle) * turn_scale, 0.0).to(dtype).to(tl.float32)
    x = turn_neighbours(x, c, tl.where(dim % 2 == 0, -s, s))
    last = tl.load(table + (seen - 1) // PAGE).to(tl.int64) * PAGE + (seen - 1) % PAGE
    tl.debug_barrier()  # all threads have read what is overwritten
    tl.store(kept + last * STRIDE + wide - DIM + dim, x.to(dtype), mask=dim < DIM)
# fmt: on
