"""Paged attention whose sums do not depend on what else a step computes (batch invariance).

Like `attend_tile` and `attend_latents`, but the keys of a row are divided into *spans*, parts whose
positions are fixed, whatever the step. Each span is walked with a running softmax of its own, and
spans are merged in their order: by the program that walks all of a tile's or, where programs share
a tile (split-KV), by `merge_spans`. Decodes and prompts have the same tile, so that the same
instruction multiplies them, and all keys are walked by a single loop, with masks. A key that a
query does not see, and a span of such keys, change nothing; so neither does what else is in a
query's tile. Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.attention.paged.latent_kernel import load_ends, walk_latents
from tgi_trio.shard.torch_backend.attention.paged.paged_kernel import (
    LOG2E,
    find_keys,
    find_tile,
    store_tile,
    walk,
)
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# fmt: off
@triton.jit(do_not_specialize=["count"])
def attend_spans(
    out,  # as for `attend_tile`, as is what is not explained
    parts,  # float32 [T, heads, count, VALUE], with DIVIDED only
    bests,  # float32 [T, heads, count]
    masses,
    spans,  # int32 [T, heads, 2]: a tile's first span and the end, with DIVIDED only
    count,  # spans for which there is room
    query, key, value, tables, width, contexts, query_starts, tile_rows, tile_starts, slopes, sinks,
    lasts, scale, value_scale, soft_cap, query_token_stride, query_head_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    VALUE: tl.constexpr, PADDED_VALUE: tl.constexpr, PAGE: tl.constexpr, LANES: tl.constexpr,
    KEYS: tl.constexpr,
    DIVIDED: tl.constexpr,  # programs share a tile's spans: as many as the grid's third dimension
    SPAN: tl.constexpr,  # keys of a span, a multiple of KEYS
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, AHEAD: tl.constexpr, CODES: tl.constexpr, OVERLAPS: tl.constexpr,
):
    """Attend, for some consecutive (query, head) pairs of one row and one KV head."""
    let_next_begin(OVERLAPS)
    kv_head = tl.program_id(1)
    table, start, queries, context, token, head, position, real = find_tile(
        tables, width, contexts, query_starts, tile_rows, tile_starts, GROUP, LANES
    )
    head += kv_head * GROUP
    wait_for_earlier(OVERLAPS)
    last = position
    if AHEAD:
        last = tl.load(lasts + token, mask=real, other=0)
    begin, end = find_keys(
        start, queries, context, last, GROUP, LANES, KEYS, False, WINDOW, AHEAD, CHUNK
    )
    dim, column = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_VALUE)
    where = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + where, mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
    slope = tl.zeros([LANES], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=real, other=0.0)
    which = token * KV_HEADS * GROUP + head
    best, mass, total = begin_softmax(sinks + head, real, LANES, PADDED_VALUE, SINKS)
    first, until, step = find_spans(begin, end, SPAN, DIVIDED)
    for i in range(first, until, step):
        low, high = tl.maximum(begin, i * SPAN), tl.minimum(end, (i + 1) * SPAN)
        b, m, t = begin_softmax(sinks, real, LANES, PADDED_VALUE, False)
        b, m, t = walk(
            b, m, t, q, key, value, table, kv_head, low, high, end, scale, soft_cap, slope,
            position, last, KV_HEADS, DIM, PADDED_DIM, VALUE, PADDED_VALUE, PAGE, KEYS, True,
            WINDOW, CHUNK, SOFT_CAP, ALIBI, CODES,
        )
        if CODES != "":
            t = t * value_scale
        if DIVIDED:
            store_span(parts, bests, masses, which * count + i, b, m, t, real, column, VALUE)
        else:
            best, mass, total = merge(best, mass, total, b, m, t)
    if DIVIDED:
        store_bounds(spans, which, begin, end, real, SPAN)
    else:
        store_tile(
            out, parts, bests, masses, which, best, mass, total, real, column, 0, VALUE, False
        )


@triton.jit(do_not_specialize=["count"])
def attend_latent_spans(
    out,  # as for `attend_latents`, as is what is not explained
    parts, bests, masses, spans, count,  # as for `attend_spans`
    query, ends, cos, sin, key, tables, width, contexts, query_starts, tile_rows, tile_starts,
    sinks, scale, key_scale,
    query_token_stride, query_head_stride, end_token_stride, end_head_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    ROTARY: tl.constexpr, PADDED_ROTARY: tl.constexpr,
    WIDTH: tl.constexpr, ROTATES: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE: tl.constexpr,
    LANES: tl.constexpr, KEYS: tl.constexpr, DIVIDED: tl.constexpr, SPAN: tl.constexpr,
    SINKS: tl.constexpr, CODES: tl.constexpr,
):
    """Attend to latents, for some consecutive (query, head) pairs of one row."""
    table, start, queries, context, token, head, position, real = find_tile(
        tables, width, contexts, query_starts, tile_rows, tile_starts, HEADS, LANES
    )
    dim = tl.arange(0, PADDED_RANK)
    source = query + token[:, None] * query_token_stride + head[:, None] * query_head_stride
    q = tl.load(source + dim[None, :], mask=real[:, None] & (dim < RANK)[None, :], other=0.0)
    q_turned = q
    if ROTARY:
        source = ends + token[:, None] * end_token_stride + head[:, None] * end_head_stride
        q_turned = load_ends(
            source, cos, sin, token, real, ROTARY, PADDED_ROTARY, ROTATES, INTERLEAVED
        )
    begin, end = find_keys(start, queries, context, position, HEADS, LANES, KEYS, False, 0, False)
    which = token * HEADS + head
    best, mass, total = begin_softmax(sinks + head, real, LANES, PADDED_RANK, SINKS)
    first, until, step = find_spans(begin, end, SPAN, DIVIDED)
    for i in range(first, until, step):
        high = tl.minimum(end, (i + 1) * SPAN)
        b, m, t = begin_softmax(sinks, real, LANES, PADDED_RANK, False)
        b, m, t = walk_latents(
            b, m, t, q, q_turned, key, table, i * SPAN, high, end, scale, position, RANK,
            PADDED_RANK, ROTARY, PADDED_ROTARY, WIDTH, PAGE, KEYS, CODES,
        )
        if CODES != "":
            t = t * key_scale
        if DIVIDED:
            store_span(parts, bests, masses, which * count + i, b, m, t, real, dim, RANK)
        else:
            best, mass, total = merge(best, mass, total, b, m, t)
    if DIVIDED:
        store_bounds(spans, which, begin, end, real, SPAN)
    else:
        store_tile(out, parts, bests, masses, which, best, mass, total, real, dim, 0, RANK, False)
# fmt: on


@triton.jit(do_not_specialize=["count"])
def merge_spans(
    out,  # [T, heads, DIM], contiguous
    parts,  # as are the next: see `attend_spans`
    bests,
    masses,
    spans,
    count,
    sinks,  # float32 [HEADS], read with SINKS only
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge a query head's spans in their order; one program for each head."""
    which = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    dim = tl.arange(0, PADDED_DIM)
    inside = (dim < DIM)[None, :]
    there = which >= 0
    best, mass, total = begin_softmax(sinks + which % HEADS, there, 1, PADDED_DIM, SINKS)
    first, until = tl.load(spans + 2 * which), tl.load(spans + 2 * which + 1)
    for i in range(tl.min(first, 0), tl.minimum(tl.max(until, 0), count)):
        at = which * count + i
        own = tl.load(parts + at[:, None] * DIM + dim[None, :], mask=inside, other=0.0)
        best, mass, total = merge(best, mass, total, tl.load(bests + at), tl.load(masses + at), own)
    result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    at = which[:, None] * DIM + dim[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def begin_softmax(
    sinks,  # pointers [LANES], read with SINKS only
    real,
    LANES: tl.constexpr,
    PADDED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Return best scores, masses and totals before any key: of nothing, or of sinks alone.

    A sink is a score that takes part in the softmax but has no value.
    """
    best, mass = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    if SINKS:
        best, mass = tl.load(sinks, mask=real, other=0.0) * LOG2E, mass + 1.0
    return best, mass, tl.zeros([LANES, PADDED], tl.float32)


@triton.jit
def find_spans(begin, end, SPAN: tl.constexpr, DIVIDED: tl.constexpr):
    """Return the spans of the keys from `begin` to `end` that a program walks: first, end, step."""
    first, until, step = begin // SPAN, tl.cdiv(end, SPAN), 1
    if DIVIDED:
        first += tl.program_id(2)
        step = tl.num_programs(2)
    return first, until, step


@triton.jit
def merge(best, mass, total, span_best, span_mass, span_total):
    """Return best scores [N], masses [N] and totals [N, M] with those of the next span.

    A span that saw nothing changes nothing. Which product a sum is one operation with is said, as
    compilers may choose differently from kernel to kernel.
    """
    higher = tl.maximum(best, span_best)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    fade, weight = tl.exp2(best - level), tl.exp2(span_best - level)
    faded = tl.broadcast_to(fade[:, None], total.shape)
    total = tl.fma(total, faded, span_total * weight[:, None])
    return higher, tl.fma(mass, fade, span_mass * weight), total


@triton.jit
def store_span(parts, bests, masses, at, best, mass, total, real, dim, DIM: tl.constexpr):
    """Store what a span says of a tile; `at`: int64 [LANES], where."""
    tl.store(bests + at, best, mask=real)
    tl.store(masses + at, mass, mask=real)
    there = real[:, None] & (dim < DIM)[None, :]
    tl.store(parts + at[:, None] * DIM + dim[None, :], total, mask=there)


@triton.jit
def store_bounds(spans, which, begin, end, real, SPAN: tl.constexpr):
    """Store the first span of a tile and the end. All programs of a tile store the same."""
    none = tl.zeros_like(which).to(tl.int32)
    tl.store(spans + 2 * which, none + begin // SPAN, mask=real)
    tl.store(spans + 2 * which + 1, none + tl.cdiv(end, SPAN), mask=real)
