"""Paged attention in Triton: prefill chunks, decodes and guesses alike, a context divided or whole.

A program computes one tile: some consecutive (query, head) pairs of one row and one KV head, so
that a key is read once for all of them. It walks the row's keys through its block table and keeps
a running softmax (Milakov and Gimelshein 2018; Dao et al. 2022), so no score is ever stored. Where
tiles are few, each is divided over several programs along the keys (Dao et al., "Flash-Decoding",
2023), whose parts `merging_kernel.py` puts together. Imported only where Triton is installed.

Scores are in base 2, which is what a device has an instruction for: constants that they are
multiplied by anyhow take up log2(e), and that is done together with what is subtracted. Of a prompt
most keys are seen by all of a tile's queries; those are walked by a loop that masks nothing, as
what is done to every score takes as long as the products. Offsets into the cache are of 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.eight_bits import decode_like
from tgi_trio.shard.torch_backend.kernels.overlapping import (
    fetch,
    let_next_begin,
    wait_for_earlier,
)

LOG2E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit
def attend_tile(
    out,  # [T, heads, DIM], contiguous
    parts,  # float32 [T, heads, parts, DIM]: sums of what a part has seen, with DIVIDED only
    bests,  # float32 [T, heads, parts]: largest score of a part
    masses,  # float32 [T, heads, parts]: sum of 2 ** (score - best)
    query,  # [T, heads, DIM], of any strides but the last
    key,  # [slots, kv_heads, DIM], contiguous: one layer of the cache, numbers or CODES
    value,
    tables,  # int32: rows of `width` block numbers
    width,  # int32 [1], on the device: a recording outlives a step's width
    contexts,  # int32 [R] keys a row sees
    query_starts,  # int32 [R + 1]
    tile_rows,  # int32 [tiles] the row of each tile
    tile_starts,  # int32 [tiles] its first (query, head) pair, counted from the row's first
    slopes,  # float32 [heads], read with ALIBI only
    sinks,  # float32 [heads], read with SINKS only
    lasts,  # int32 [T] the last position that each query sees, read with AHEAD only
    scale,  # of scores; that of keys of 8 bits in it
    value_scale,  # read with CODES only
    soft_cap, query_token_stride, query_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # the next power of two
    PAGE: tl.constexpr,  # tokens of a KV block
    LANES: tl.constexpr,  # pairs of a tile, a power of two
    KEYS: tl.constexpr,  # keys looked at together, a power of two
    DIVIDED: tl.constexpr,  # programs share a tile's keys: as many as the grid is deep
    WINDOW: tl.constexpr,  # 0: a query sees all keys before it
    SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    AHEAD: tl.constexpr,  # queries see tokens behind their own
    CODES: tl.constexpr,  # see `eight_bits.py`
    OVERLAPS: tl.constexpr,
):
    """Attend; what a step is told of its rows is read while the kernels before this one compute."""
    let_next_begin(OVERLAPS)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    table, start, count, context, token, head, position, real = find_tile(
        tables, width, contexts, query_starts, tile_rows, tile_starts, GROUP, LANES
    )
    head += kv_head * GROUP
    last = position
    if AHEAD:
        last = tl.load(lasts + token, mask=real, other=0)
    begin, end = find_keys(start, count, context, last, GROUP, LANES, KEYS, DIVIDED, WINDOW, AHEAD)
    # Of a decode's keys all but the newest are there already.
    if OVERLAPS and DIVIDED and LANES <= 16:
        fetch_keys(key, value, table, kv_head, begin, end, KV_HEADS, DIM, PADDED_DIM, PAGE, KEYS)
    wait_for_earlier(OVERLAPS)
    dim = tl.arange(0, PADDED_DIM)
    where = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    q = tl.load(query + where, mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
    slope = tl.zeros([LANES], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=real, other=0.0)
    best, mass = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.float32)
    total = tl.zeros([LANES, PADDED_DIM], tl.float32)
    if LANES > 16:
        low, high = find_whole(start, count, context, begin, end, GROUP, LANES, KEYS, WINDOW)
        if WINDOW:
            best, mass, total = walk(
                best, mass, total, q, key, value, table, kv_head, begin, low, end, scale, soft_cap,
                slope, position, last, KV_HEADS, DIM, PADDED_DIM, PAGE, KEYS, True, WINDOW,
                SOFT_CAP, ALIBI, CODES,
            )
        best, mass, total = walk(
            best, mass, total, q, key, value, table, kv_head, low, high, end, scale, soft_cap,
            slope, position, last, KV_HEADS, DIM, PADDED_DIM, PAGE, KEYS, False, WINDOW,
            SOFT_CAP, ALIBI, CODES,
        )
        begin = high
    best, mass, total = walk(
        best, mass, total, q, key, value, table, kv_head, begin, end, end, scale, soft_cap,
        slope, position, last, KV_HEADS, DIM, PADDED_DIM, PAGE, KEYS, True, WINDOW,
        SOFT_CAP, ALIBI, CODES,
    )
    if SINKS:
        best, mass, fade = add_sinks(tl.load(sinks + head, mask=real, other=0.0), best, mass, part)
        total = total * fade[:, None]
    if CODES != "":
        total = total * value_scale
    which = token * KV_HEADS * GROUP + head
    store_tile(out, parts, bests, masses, which, best, mass, total, real, dim, part, DIM, DIVIDED)


@triton.jit
def fetch_keys(
    key, value, table, kv_head, begin, end,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Have the first keys and values that a program looks at brought to the cache of level 2."""
    if begin < end:
        numbers: tl.constexpr = 64 * 8 // key.dtype.element_ty.primitive_bitwidth  # of 64 bytes
        slot = find_slots(table, begin + tl.arange(0, KEYS), end, PAGE, True) * KV_HEADS + kv_head
        place = tl.arange(0, (PADDED_DIM + numbers - 1) // numbers)[None, :] * numbers
        at = slot * DIM + tl.minimum(place, DIM - 1)
        fetch(key + at)
        fetch(value + at)


@triton.jit
def walk(
    best,  # float32 [LANES], as `weigh` has them
    mass,
    total,  # float32 [LANES, PADDED_DIM]: values by the weights of their keys
    q,
    key, value, table, kv_head,
    begin,  # the first key, and behind the last that is looked at
    until,
    end,  # behind the last that is there
    scale, soft_cap, slope, position, last,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # a query may not see a key, or there may be none
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, CODES: tl.constexpr,
):
    """Return what a running softmax becomes by some keys: best scores, masses, totals."""
    dim = tl.arange(0, PADDED_DIM)[None, :]
    factor = 1.0 if SOFT_CAP or ALIBI else scale * LOG2E
    for low in range(begin, until, KEYS):
        place = low + tl.arange(0, KEYS)
        at = (find_slots(table, place, end, PAGE, MASKED) * KV_HEADS + kv_head) * DIM + dim
        k = decode_like(load_there(key + at, place, end, dim, DIM, PADDED_DIM, MASKED), q, CODES)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = finish_scores(
            score, scale, soft_cap, slope, place, position, last, end, MASKED, WINDOW, SOFT_CAP,
            ALIBI,
        )
        best, mass, fade, weight = weigh(score, factor, best, mass)
        v = decode_like(load_there(value + at, place, end, dim, DIM, PADDED_DIM, MASKED), q, CODES)
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
    """Return what lies there, zeros behind a head's end and, where MASKED, of keys behind `end`."""
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
    """Return what a program's row has, and what each of the tile's pairs is.

    Of the row its block table, the tile's first pair, queries and context; of pairs, [LANES] each,
    the token (int64), the head within the group, the position, and whether there is one.
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
    """Return where the cache has a row's keys, int64 [KEYS, 1]; if MASKED, those before `end`."""
    if MASKED:
        block = tl.load(table + place // PAGE, mask=place < end, other=0)
    else:
        block = tl.load(table + place // PAGE)
    return (block.to(tl.int64) * PAGE + place % PAGE)[:, None]


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
):
    """Return the first key that a program looks at, and where it ends."""
    first = context - count + start // GROUP
    end = tl.minimum(context, context - count + (start + LANES - 1) // GROUP + 1)
    if AHEAD:
        end = tl.minimum(context, tl.max(last, 0) + 1)
    begin = 0
    if WINDOW:
        begin = tl.maximum(0, first - WINDOW + 1) // KEYS * KEYS
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
    begin,  # of a program's keys, as `find_keys` has them
    end,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Return from where to where in `begin` to `end`, in whole KEYS, all of a tile see all keys."""
    first = context - count + start // GROUP  # the positions of its first query and its last
    last = context - count + (start + LANES - 1) // GROUP
    low = begin
    if WINDOW:
        low = begin + tl.cdiv(tl.maximum(last - WINDOW + 1 - begin, 0), KEYS) * KEYS
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
    last,  # [LANES]: the last position that is seen
    end,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Return scores, where MASKED -inf where a query does not see a key.

    In base 2 with SOFT_CAP or ALIBI; else scale * log2(e) is still to come.
    """
    if SOFT_CAP:  # cap * tanh(score / cap)
        score = (2.0 * tl.sigmoid(score * (2.0 * scale / soft_cap)) - 1.0) * (soft_cap * LOG2E)
    elif ALIBI:
        score = score * (scale * LOG2E)
    if ALIBI:
        score += (slope * LOG2E)[:, None] * place[None, :]
    if MASKED:
        seen = (place < end)[None, :] & (place[None, :] <= last[:, None])
        if WINDOW:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    return score


@triton.jit
def weigh(score, factor, best, mass):
    """Return the new best scores and masses, what earlier sums fade to, and the keys' weights.

    `factor`, above zero, makes scores those of base 2, as `best` is.
    """
    higher = tl.maximum(best, tl.max(score, 1) * factor)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    weight = tl.exp2(score * factor - level[:, None])
    fade = tl.exp2(best - level)
    return higher, mass * fade + tl.sum(weight, 1), fade, weight


@triton.jit
def add_sinks(sink, best, mass, part):
    """Return best scores and masses with a sink, and what sums fade to.

    A sink is a score that takes its share of the softmax and adds nothing. It counts once for a
    tile: with its first part.
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
    """Store a tile's result, or its part of one."""
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
