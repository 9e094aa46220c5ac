"""Attention to the keys of a window and to entries in Triton; keys are values (DeepSeek V4).

A program has some heads of one token, which share all keys. What the token sees is one list: the
tokens of its window, then entries, all of them or those that an index has chosen. Both lie in the
rows of the cache, entries in those of their runs' last tokens. Queries are normalised and rotated
as they are read. Values are rotated as keys are, so results are rotated back, and parts of results
as well, whose sum they are. Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.attention.paged.paged_kernel import (
    LOG2E,
    add_sinks,
    store_tile,
    weigh,
)
from tgi_trio.shard.torch_backend.attention.paged.spans_kernel import (
    begin_softmax,
    find_spans,
    merge,
    store_bounds,
    store_span,
)
from tgi_trio.shard.torch_backend.kernels.attention.interleaved_rotation import (
    load_turns,
    turn_neighbours,
)
from tgi_trio.shard.torch_backend.kernels.attention.selecting import find_seen
from tgi_trio.shard.torch_backend.kernels.fused import normalise
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# fmt: off
@triton.jit(do_not_specialize=["first"])
def attend_entries(
    out,  # [T, HEADS, DIM], contiguous
    parts,  # float32 [T, HEADS, parts, DIM], as for `attend_tile`
    bests,
    masses,
    query,  # [T, HEADS, DIM], with QUERY numbers between tokens
    cos,  # [T, ROTARY], as for `rotate_and_write`
    sin,
    keys,  # [slots, STRIDE]: one layer of the cache
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1]
    contexts,  # int32 [R]
    query_starts,  # int32 [R + 1]
    rows,  # int32 [T]: the row of each token
    units,  # int32 [tokens, MOST]: the chosen entries, ascending; read with MOST only
    found,  # int32 [tokens]: how many
    sinks,  # float32 [HEADS], read with SINKS only
    first,  # the token with which `units` begin, and the grid
    scale, eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr,
    QUERY: tl.constexpr,
    STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    RATE: tl.constexpr,  # tokens of a run; 0: there are no entries
    ENTRY: tl.constexpr,  # the place of an entry in a row of the cache
    MOST: tl.constexpr,  # entries that are chosen; 0: all are seen
    SINKS: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,  # heads of a program, a power of two
    KEYS: tl.constexpr,  # of one step of the loop, a power of two
    DIVIDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    own, token, head, table, seen = find_tile(
        tables, width, contexts, query_starts, rows, first, HEADS, LANES
    )
    near, part = tl.minimum(seen, WINDOW), tl.program_id(2)
    count = count_places(found + own, near, seen, RATE, MOST)
    begin, end = 0, count
    if DIVIDED:
        each = tl.cdiv(tl.cdiv(count, tl.num_programs(2)), KEYS) * KEYS
        begin = part * each
        end = tl.minimum(begin + each, count)
    dim, real, which = tl.arange(0, PADDED_DIM), head < HEADS, token * HEADS + head
    q = load_queries(query, cos, sin, token, head, real, dim, eps, DIM, ROTARY, QUERY)
    best, mass = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES, PADDED_DIM], tl.float32)
    best, mass, total = walk_places(
        best, mass, total, q, keys, table, units + own * MOST, begin, end, near, seen,
        scale, DIM, PADDED_DIM, STRIDE, RATE, ENTRY, MOST, PAGE, KEYS,
    )
    if SINKS:
        best, mass, fade = add_sinks(tl.load(sinks + head, mask=real, other=0.0), best, mass, part)
        total = total * fade[:, None]
    c, s = load_turns(cos, sin, token, dim[None, :], DIM, ROTARY)
    total = turn_neighbours(total, c, -s)
    store_tile(out, parts, bests, masses, which, best, mass, total, real, dim, part, DIM, DIVIDED)


@triton.jit(do_not_specialize=["count", "first"])
def attend_entry_spans(
    out,  # as for `attend_entries`, as is what is not explained
    parts, bests, masses, spans, count,  # as for `attend_spans`
    query, cos, sin, keys, tables, width, contexts, query_starts, rows, units, found, sinks, first,
    scale, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROTARY: tl.constexpr,
    QUERY: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr, RATE: tl.constexpr,
    ENTRY: tl.constexpr, MOST: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr,
    LANES: tl.constexpr, KEYS: tl.constexpr, DIVIDED: tl.constexpr,
    SPAN: tl.constexpr,  # places of a span, a multiple of KEYS
    OVERLAPS: tl.constexpr,
):
    """Attend where batch invariance is kept, as `spans_kernel.py` says: to spans of the list."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    own, token, head, table, seen = find_tile(
        tables, width, contexts, query_starts, rows, first, HEADS, LANES
    )
    near = tl.minimum(seen, WINDOW)
    end = count_places(found + own, near, seen, RATE, MOST)
    dim, real, which = tl.arange(0, PADDED_DIM), head < HEADS, token * HEADS + head
    q = load_queries(query, cos, sin, token, head, real, dim, eps, DIM, ROTARY, QUERY)
    best, mass, total = begin_softmax(sinks + head, real, LANES, PADDED_DIM, SINKS)
    first_span, until, step = find_spans(0, end, SPAN, DIVIDED)
    for i in range(first_span, until, step):
        b, m, t = begin_softmax(sinks, real, LANES, PADDED_DIM, False)
        b, m, t = walk_places(
            b, m, t, q, keys, table, units + own * MOST, i * SPAN,
            tl.minimum(end, (i + 1) * SPAN), near, seen, scale, DIM, PADDED_DIM, STRIDE, RATE,
            ENTRY, MOST, PAGE, KEYS,
        )
        c, s = load_turns(cos, sin, token, dim[None, :], DIM, ROTARY)
        t = turn_neighbours(t, c, -s)
        if DIVIDED:
            store_span(parts, bests, masses, which * count + i, b, m, t, real, dim, DIM)
        else:
            best, mass, total = merge(best, mass, total, b, m, t)
    if DIVIDED:
        store_bounds(spans, which, 0, end, real, SPAN)
    else:
        store_tile(out, parts, bests, masses, which, best, mass, total, real, dim, 0, DIM, False)


@triton.jit
def find_tile(
    tables, width, contexts, query_starts, rows, first, HEADS: tl.constexpr, LANES: tl.constexpr
):
    """Return what a program computes: a token of the grid, of the step, and its heads [LANES].

    Then the token's block numbers, and how many tokens it sees.
    """
    tiles: tl.constexpr = (HEADS + LANES - 1) // LANES
    own = tl.program_id(0) // tiles
    token = first + own
    row = tl.load(rows + token).to(tl.int64)
    table = tables + row * tl.load(width)
    seen = find_seen(contexts, query_starts, row, token)
    head = tl.program_id(0) % tiles * LANES + tl.arange(0, LANES)
    return own.to(tl.int64), token.to(tl.int64), head, table, seen


@triton.jit
def count_places(found, near, seen, RATE: tl.constexpr, MOST: tl.constexpr):
    """Return how many places a token sees: `near` tokens, and all entries or those chosen."""
    count = near
    if MOST:
        count += tl.load(found)
    elif RATE:
        count += seen // RATE
    return count


@triton.jit
def walk_places(
    best,  # float32 [LANES]: so far, as are the next
    mass,
    total,  # float32 [LANES, PADDED_DIM]
    q,  # [LANES, PADDED_DIM]
    keys, table,
    units,  # of the token
    begin, end,  # of what it sees
    near, seen, scale,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, STRIDE: tl.constexpr, RATE: tl.constexpr,
    ENTRY: tl.constexpr, MOST: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):
    """Return best scores, masses and totals with those of the places from `begin` to `end`."""
    dim = tl.arange(0, PADDED_DIM)
    for low in range(begin, end, KEYS):
        number = low + tl.arange(0, KEYS)
        listed = number < end
        place, offset = seen - near + number, 0
        if RATE:
            unit = number - near
            if MOST:
                unit = tl.load(units + unit, mask=listed & (unit >= 0), other=0)
            place = tl.where(number < near, place, (unit + 1) * RATE - 1)
            offset = tl.where(number < near, 0, ENTRY)
        block = tl.load(table + place // PAGE, mask=listed, other=0).to(tl.int64)
        at = (block * PAGE + place % PAGE) * STRIDE + offset
        inside = listed[:, None] & (dim < DIM)[None, :]
        k = tl.load(keys + at[:, None] + dim[None, :], mask=inside, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = tl.where(listed[None, :], score, float("-inf"))
        best, mass, fade, weight = weigh(score, scale * LOG2E, best, mass)
        gained = tl.dot(weight.to(k.dtype), k, input_precision="ieee")
        total = total * fade[:, None] + gained
    return best, mass, total


@triton.jit
def load_queries(
    query, cos, sin, token, head, real, dim, eps,
    DIM: tl.constexpr, ROTARY: tl.constexpr, QUERY: tl.constexpr,
):
    """Return the queries of some heads of a token, [LANES, padded DIM], normalised and rotated."""
    there, dim = real[:, None] & (dim < DIM)[None, :], dim[None, :]
    q = tl.load(query + token * QUERY + head[:, None] * DIM + dim, mask=there, other=0.0)
    x = normalise(q.to(tl.float32), dim, query, query, eps, DIM, "rms", False, False)
    c, s = load_turns(cos, sin, token, dim, DIM, ROTARY)
    return turn_neighbours(x.to(q.dtype).to(tl.float32), c, s).to(q.dtype)
# fmt: on
