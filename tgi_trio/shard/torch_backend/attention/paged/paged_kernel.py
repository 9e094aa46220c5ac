"""Paged attention in Triton for prefill chunks, decodes and drafts, with or without split-KV.

A program computes one tile: some consecutive (query, head) pairs of one row and one KV head, so
that a key is read once for all of them. It walks the row's keys through its block table with a
running softmax (Milakov and Gimelshein 2018; Dao et al. 2022), so scores are never stored. If there
are few tiles, several programs share each of them along the keys (split-KV; Dao et al.,
"Flash-Decoding", 2023), and `merging_kernel.py` merges their parts. Imported only where Triton is
installed.

Scores are in base 2, for which devices have an instruction. The factor log2(e) is folded into
constants that scores are multiplied by anyway, in one operation with the subtraction. Most keys of
a prompt are visible to all queries of a tile; a loop without masking walks those, since each
operation on every score takes as long as the products. Offsets into the cache are of 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import open_stored
from tgi_trio.shard.torch_backend.kernels.attention.eight_bits import decode_like
from tgi_trio.shard.torch_backend.kernels.overlapping import fetch, let_next_begin, wait_for_earlier

LOG2E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit
def attend_tile(
    out,  # [T, heads, VALUE], contiguous
    parts,  # float32 [T, heads, parts, VALUE]: weighted sums of values, with DIVIDED only
    bests,  # float32 [T, heads, parts]: largest score of a part
    masses,  # float32 [T, heads, parts]: sum of 2 ** (score - best)
    query,  # [T, heads, DIM], of any strides but the last
    key,  # [slots, kv_heads, DIM], contiguous: one layer of the cache, numbers or CODES
    value,  # [slots, kv_heads, VALUE]
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1], on the device, since it changes between replays of a CUDA graph
    contexts,  # int32 [R] keys of each row
    query_starts,  # int32 [R + 1]
    tile_rows,  # int32 [tiles] the row of each tile
    tile_starts,  # int32 [tiles] its first (query, head) pair, counted from the row's first
    slopes,  # float32 [heads], read with ALIBI only
    sinks,  # float32 [heads], read with SINKS only
    lasts,  # int32 [T] the last position that each query sees, read with AHEAD only
    gates,  # [T, heads * VALUE / EACH], read with EACH only: their sigmoids multiply results
    scale,  # of scores, times the scale of 8-bit keys
    value_scale,  # read with CODES only
    soft_cap, query_token_stride, query_head_stride, gate_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    DIM: tl.constexpr,  # numbers of a query and of a key
    PADDED_DIM: tl.constexpr,  # the next power of two
    VALUE: tl.constexpr,  # numbers of a value
    PADDED_VALUE: tl.constexpr,
    PAGE: tl.constexpr,  # tokens of a KV block
    LANES: tl.constexpr,  # pairs of a tile, a power of two
    KEYS: tl.constexpr,  # keys of one step of the loop, a power of two
    DIVIDED: tl.constexpr,  # programs share a tile's keys: as many as the grid's third dimension
    WINDOW: tl.constexpr,  # 0: a query sees all earlier keys
    CHUNK: tl.constexpr,  # positions of a chunk, of which a query sees its own; 0: no chunks
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    AHEAD: tl.constexpr,  # queries may see tokens after their own
    EACH: tl.constexpr,  # neighbouring numbers that a gate opens; 0: there are none, or DIVIDED
    CODES: tl.constexpr,  # see `eight_bits.py`
    OVERLAPS: tl.constexpr,
):
    """Attend. The inputs of a step are read while earlier kernels still compute (see `fetch`)."""
    let_next_begin(OVERLAPS)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    table, start, count, context, token, head, position, real = find_tile(
        tables, width, contexts, query_starts, tile_rows, tile_starts, GROUP, LANES
    )
    head += kv_head * GROUP
    last = position
    if AHEAD:
        last = tl.load(lasts + token, mask=real, other=0)
    begin, end = find_keys(
        start, count, context, last, GROUP, LANES, KEYS, DIVIDED, WINDOW, AHEAD, CHUNK
    )
    # All of a decode's keys but the newest have already been written.
    if OVERLAPS and DIVIDED and LANES <= 16:
        fetch_keys(
            key, value, table, kv_head, begin, end, KV_HEADS, DIM, PADDED_DIM, VALUE, PADDED_VALUE,
            PAGE, KEYS,
        )
    wait_for_earlier(OVERLAPS)
    dim = tl.arange(0, PADDED_DIM)
    where = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + where, mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
    slope = tl.zeros([LANES], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=real, other=0.0)
    best, mass = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES, PADDED_VALUE], tl.float32)
    if LANES > 16:
        low, high = find_whole(start, count, context, begin, end, GROUP, LANES, KEYS, WINDOW, CHUNK)
        if WINDOW or CHUNK:
            best, mass, total = walk(
                best, mass, total, q, key, value, table, kv_head, begin, low, end, scale, soft_cap,
                slope, position, last, KV_HEADS, DIM, PADDED_DIM, VALUE, PADDED_VALUE, PAGE, KEYS,
                True, WINDOW, CHUNK, SOFT_CAP, ALIBI, CODES,
            )
        best, mass, total = walk(
            best, mass, total, q, key, value, table, kv_head, low, high, end, scale, soft_cap,
            slope, position, last, KV_HEADS, DIM, PADDED_DIM, VALUE, PADDED_VALUE, PAGE, KEYS,
            False, WINDOW, CHUNK, SOFT_CAP, ALIBI, CODES,
        )
        begin = high
    best, mass, total = walk(
        best, mass, total, q, key, value, table, kv_head, begin, end, end, scale, soft_cap,
        slope, position, last, KV_HEADS, DIM, PADDED_DIM, VALUE, PADDED_VALUE, PAGE, KEYS, True,
        WINDOW, CHUNK, SOFT_CAP, ALIBI, CODES,
    )
    if SINKS:
        best, mass, fade = add_sinks(tl.load(sinks + head, mask=real, other=0.0), best, mass, part)
        total = total * fade[:, None]
    if CODES != "":
        total = total * value_scale
    which = token * KV_HEADS * GROUP + head
    place = tl.arange(0, PADDED_VALUE)
    store_tile(
        out, parts, bests, masses, which, best, mass, total, real, place, part, VALUE, DIVIDED
    )
    if EACH:
        own = gates + token * gate_stride
        open_stored(out, own, which, head, real, LANES, VALUE, PADDED_VALUE, EACH)


@triton.jit
def fetch_keys(
    key, value, table, kv_head, begin, end,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
):
    """Prefetch into the level 2 cache the first keys and values that a program reads."""
    if begin < end:
        numbers: tl.constexpr = 64 * 8 // key.dtype.element_ty.primitive_bitwidth  # of 64 bytes
        slot = find_slots(table, begin + tl.arange(0, KEYS), end, PAGE, True) * KV_HEADS + kv_head
        place = tl.arange(0, (PADDED_DIM + numbers - 1) // numbers)[None, :] * numbers
        fetch(key + slot * DIM + tl.minimum(place, DIM - 1))
        place = tl.arange(0, (PADDED_VALUE + numbers - 1) // numbers)[None, :] * numbers
        fetch(value + slot * VALUE + tl.minimum(place, VALUE - 1))


@triton.jit
def walk(
    best,  # float32 [LANES], as for `weigh`
    mass,
    total,  # float32 [LANES, PADDED_VALUE]: values weighted by the scores of their keys
    q,
    key, value, table, kv_head,
    begin,  # the keys to walk: the first one, and the end
    until,
    end,  # of the row's keys
    scale, soft_cap, slope, position, last,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # some keys are hidden from a query, or beyond the end
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    CODES: tl.constexpr,
):
    """Return a running softmax after some more keys: best scores, masses, totals."""
    dim, column = tl.arange(0, PADDED_DIM)[None, :], tl.arange(0, PADDED_VALUE)[None, :]
    factor = 1.0 if SOFT_CAP or ALIBI else scale * LOG2E
    for low in range(begin, until, KEYS):
        place = low + tl.arange(0, KEYS)
        slot = find_slots(table, place, end, PAGE, MASKED) * KV_HEADS + kv_head
        at = slot * DIM + dim
        k = decode_like(load_there(key + at, place, end, dim, DIM, PADDED_DIM, MASKED), q, CODES)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = finish_scores(
            score, scale, soft_cap, slope, place, position, last, end, MASKED, WINDOW, SOFT_CAP,
            ALIBI, CHUNK,
        )
        best, mass, fade, weight = weigh(score, factor, best, mass)
        at = slot * VALUE + column
        v = load_there(value + at, place, end, column, VALUE, PADDED_VALUE, MASKED)
        v = decode_like(v, q, CODES)
        total = total * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return best, mass, total
# fmt: on


@triton.jit
def load_there(
    at,  # [KEYS, PADDED_DIM] pointers
    place,
    end,
    dim,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return keys or values, zero beyond a head's numbers and, if MASKED, for keys from `end`."""
    if MASKED:
        return tl.load(at, mask=(place < end)[:, None] & (dim < DIM), other=0)
    elif DIM < PADDED_DIM:
        return tl.load(at, mask=dim < DIM, other=0)
    else:
        return tl.load(at)


@triton.jit
def find_tile(
    tables,
    width,
    contexts,
    query_starts,
    tile_rows,
    tile_starts,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return what a program needs to know about its row and the pairs of its tile.

    Of the row: its block table, the tile's first pair, the numbers of queries and of keys. Of the
    pairs, [LANES] each: token (int64), head within the group, position, and whether it exists.
    """
    tile = tl.program_id(0)
    row, start = tl.load(tile_rows + tile), tl.load(tile_starts + tile)
    first = tl.load(query_starts + row)
    count, context = tl.load(query_starts + row + 1) - first, tl.load(contexts + row)
    pair = start + tl.arange(0, LANES)
    ahead = pair // GROUP
    table = tables + row.to(tl.int64) * tl.load(width)
    token, position = (first + ahead).to(tl.int64), context - count + ahead
    return table, start, count, context, token, pair % GROUP, position, ahead < count


@triton.jit
def find_slots(table, place, end, PAGE: tl.constexpr, MASKED: tl.constexpr):
    """Return the cache slots of a row's keys, int64 [KEYS, 1]; if MASKED, of those before `end`."""
    if MASKED:
        block = tl.load(table + place // PAGE, mask=place < end, other=0)
    else:
        block = tl.load(table + place // PAGE)
    return (block.to(tl.int64) * PAGE + place % PAGE)[:, None]


@triton.jit
def find_hidden(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the last position before those that queries at `position` see; it may be negative."""
    if WINDOW and CHUNK:
        return tl.maximum(position - WINDOW, position // CHUNK * CHUNK - 1)
    elif CHUNK:
        return position // CHUNK * CHUNK - 1
    else:
        return position - WINDOW


@triton.jit
def find_keys(
    start,
    count,
    context,
    last,  # [LANES] the last position that each pair sees, read with AHEAD only
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    DIVIDED: tl.constexpr,
    WINDOW: tl.constexpr,
    AHEAD: tl.constexpr,
    CHUNK: tl.constexpr = 0,
):
    """Return the first key that a program reads, and the end."""
    first = context - count + start // GROUP
    end = tl.minimum(context, context - count + (start + LANES - 1) // GROUP + 1)
    if AHEAD:
        end = tl.minimum(context, tl.max(last, 0) + 1)
    begin = 0
    if WINDOW or CHUNK:
        begin = tl.maximum(0, find_hidden(first, WINDOW, CHUNK) + 1) // KEYS * KEYS
    if DIVIDED:
        each = tl.cdiv(tl.cdiv(end - begin, tl.num_programs(2)), KEYS) * KEYS
        begin += tl.program_id(2) * each
        end = tl.minimum(begin + each, end)
    return begin, end


@triton.jit
def find_whole(
    start,
    count,
    context,
    begin,  # the program's keys, from `find_keys`
    end,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return the range within `begin` to `end`, in whole KEYS, that all of a tile's queries see."""
    first = context - count + start // GROUP  # the positions of its first query and its last
    last = context - count + (start + LANES - 1) // GROUP
    low = begin
    if WINDOW or CHUNK:
        hidden = find_hidden(last, WINDOW, CHUNK)
        low = begin + tl.cdiv(tl.maximum(hidden + 1 - begin, 0), KEYS) * KEYS
        low = tl.minimum(low, begin + tl.cdiv(end - begin, KEYS) * KEYS)
    high = low + tl.maximum(tl.minimum(first + 1, end) - low, 0) // KEYS * KEYS
    return low, high


@triton.jit
def finish_scores(
    score,  # float32 [LANES, KEYS]: products of queries and keys
    scale,
    soft_cap,
    slope,
    place,  # [KEYS]
    position,  # [LANES]
    last,  # [LANES]: the last visible position
    end,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    CHUNK: tl.constexpr = 0,
):
    """Return scores; if MASKED, -inf for keys that a query does not see.

    They are in base 2 with SOFT_CAP or ALIBI; otherwise scale * log2(e) is still to be applied.
    """
    if SOFT_CAP:  # cap * tanh(score / cap)
        score = (2.0 * tl.sigmoid(score * (2.0 * scale / soft_cap)) - 1.0) * (soft_cap * LOG2E)
    elif ALIBI:
        score = score * (scale * LOG2E)
    if ALIBI:
        score += (slope * LOG2E)[:, None] * place[None, :]
    if MASKED:
        seen = (place < end)[None, :] & (place[None, :] <= last[:, None])
        if WINDOW or CHUNK:
            seen = seen & (place[None, :] > find_hidden(position, WINDOW, CHUNK)[:, None])
        score = tl.where(seen, score, float("-inf"))
    return score


@triton.jit
def weigh(score, factor, best, mass):
    """Return new best scores and masses, the factor for earlier sums, and the keys' weights.

    `factor`, above zero, converts scores to base 2, in which `best` is.
    """
    higher = tl.maximum(best, tl.max(score, 1) * factor)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    weight = tl.exp2(score * factor - level[:, None])
    fade = tl.exp2(best - level)
    return higher, mass * fade + tl.sum(weight, 1), fade, weight


@triton.jit
def add_sinks(sink, best, mass, part):
    """Return best scores and masses with a sink, and the factor for earlier sums.

    A sink is a score that takes part in the softmax but has no value. The first part of a tile
    counts it, the others do not.
    """
    sink = tl.where(part == 0, sink * LOG2E, float("-inf"))
    higher = tl.maximum(best, sink)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(best - level)
    return higher, mass * fade + tl.exp2(sink - level), fade


@triton.jit
def store_tile(
    out,
    parts,
    bests,
    masses,
    which,  # int64 [LANES]: token * heads + head
    best,
    mass,
    total,  # float32 [LANES, padded DIM]
    real,
    dim,
    part,
    DIM: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """Store a tile's result, or one part of it."""
    stored = real[:, None] & (dim < DIM)[None, :]
    if DIVIDED:
        which = which * tl.num_programs(2) + part
        tl.store(bests + which, best, mask=real)
        tl.store(masses + which, mass, mask=real)
        tl.store(parts + which[:, None] * DIM + dim[None, :], total, mask=stored)
    else:
        result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        at = which[:, None] * DIM + dim[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=stored)
