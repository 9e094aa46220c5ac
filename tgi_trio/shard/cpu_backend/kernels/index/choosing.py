"""An index of tokens: its keys and queries, the scores of all visible tokens, the best of them.

Scores of a block of 16 tokens are a tile of heads x 1 vector, as in `attention.py`; what is
positive of a head's scores is added up with the head's weight. Every score is summed in one order,
however a step is put together, so a token has the same choice at any load.

In a step of few tokens, several threads score the context of one (SCORE). In others each thread
scores the contexts of its own tokens, right before it chooses (CHOOSE).
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import greater, ints_at, lesser
from tgi_trio.shard.cpu_backend.kernels.attention import seen_tokens, table_of
from tgi_trio.shard.cpu_backend.kernels.index.attending import attend_chosen
from tgi_trio.shard.cpu_backend.kernels.latents import turn_part
from tgi_trio.shard.cpu_backend.kernels.linked_calls import operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.norm import (
    BLOCK,
    head_factor,
    inverse_deviation,
    normed,
    store_key,
    turning_row,
)
from tgi_trio.shard.cpu_backend.kernels.threads import atomic_add
from tgi_trio.shard.cpu_backend.kernels.tiles import multiply_add, store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    load_float,
    load_int,
    maximum,
    multiply,
    prefetch,
    store,
    store_int,
    store_query,
    total,
)
from tgi_trio.shard.cpu_backend.scratch_memory import INDEX_COUNTS, INDEX_TILES, MOST_SHARED
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

ASK, SCORE, CHOOSE = int(Code.ASK), int(Code.SCORE), int(Code.CHOOSE)
PROJECTED, ASKED, SCORES, CHOICE = (
    int(buffer) for buffer in (Buffer.PROJECTED, Buffer.ASKED, Buffer.SCORES, Buffer.CHOICE)
)
_CHUNK = 64  # blocks that a thread scores at a time
_BITS = 8  # of a score by which it is sorted into a bucket at a time
_BUCKETS = 1 << _BITS
_SIGN, _ALL = 0x80000000, 0xFFFFFFFF  # bits of a float32
_NEVER = -np.inf


@entry
def run_index(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation."""
    step, op = step_at(step_address), operation_at(op_address)
    if op.code == ASK:
        ask(variant, rank, step, op, scratch)
    elif op.code == SCORE or op.code == CHOOSE:
        choose(variant, step, op, counter, scratch)
    else:
        attend_chosen(variant, step, op, counter, scratch)


@kernel
def ask(variant, rank, step, op, scratch):
    """Normalise and rotate keys, and write them to the cache; rotate queries to ASKED.

    Keys are at `offset` in a row of PROJECTED, queries in `source`. `scratch`: room for two keys.
    """
    size, room = op.head_dim, scratch + 4 * op.head_dim
    for t in range(rank, step.tokens, step.threads):
        row = turning_row(step, op, t, 0)
        cosines, sines = op.cosines + row, op.sines + row
        key, sums = step.buffers[PROJECTED] + (t * op.inputs + op.offset) * 4, fill(0.0)
        for i in range(0, size, LANES):
            sums = add(sums, load(key + 4 * i))
        mean = total(sums) / size
        centre, factor = fill(mean), fill(inverse_deviation(key, size, mean, op.eps))
        for i in range(0, size, LANES):
            store(scratch + 4 * i, normed(op, key, i, centre, factor))
        turn_part(op, scratch, size, cosines, sines, room)
        slot = load_int(step.slots + 4 * t)
        block = op.keys + slot // BLOCK * size * BLOCK * variant.cache.bytes
        store_key(variant, op, block, slot % BLOCK, room, scratch)
        if seen_tokens(step, op, t) <= op.most:
            continue
        source = step.buffers[op.source] + t * op.width * 4
        target = step.buffers[ASKED] + t * op.heads * size * variant.query_bytes
        for head in range(op.heads):
            first, scale = head * size, fill(head_factor(step, op, t, head))
            turn_part(op, source + 4 * first, size, cosines, sines, room)
            for i in range(0, size, LANES):
                place = target + (first + i) * variant.query_bytes
                store_query(variant, place, multiply(load(room + 4 * i), scale))


@kernel
def choose(variant, step, op, counter, scratch):
    """Score what tokens see that see more than `most`; CHOOSE lists the best in CHOICE.

    `scratch`: two tiles, the counts of buckets, and the scores of a context.
    """
    shared = step.tokens <= MOST_SHARED
    items = step.tokens
    if op.code == SCORE:
        items = step.tokens * count_chunks(step, op) if shared else np.int64(0)
    item = items - 1 - atomic_add(counter, 1)
    while item >= 0:
        token, chunk = item % step.tokens, item // step.tokens
        seen = seen_tokens(step, op, token)
        if seen > op.most:
            begin, end = np.int64(0), (seen + BLOCK - 1) // BLOCK
            scores = scratch + INDEX_TILES + INDEX_COUNTS
            if shared:
                scores = step.buffers[SCORES] + token * step.scores_bytes
            if op.code == SCORE:
                begin, end = chunk * _CHUNK, lesser(end, (chunk + 1) * _CHUNK)
            elif shared:
                begin = end
            score_blocks(variant, step, op, token, begin, end, scores, scratch)
            if op.code == CHOOSE:
                target = step.buffers[CHOICE] + token * op.most * 4
                list_best(scores, seen, op.most, scratch + INDEX_TILES, target)
        item = items - 1 - atomic_add(counter, 1)


@kernel
def count_chunks(step, op):
    """Return the chunks of the longest context in a step."""
    seen = np.int64(0)
    for t in range(step.tokens):
        seen = greater(seen, seen_tokens(step, op, t))
    return (seen + _CHUNK * BLOCK - 1) // (_CHUNK * BLOCK)


@kernel
def score_blocks(variant, step, op, token, begin, end, scores, tiles):
    """scores[i] = sum over heads of weight * max(0, query . key[i]), for blocks begin to end.

    Of an odd number of blocks, the last is computed twice, once for the place behind it. NaN is
    the worst score.
    """
    one, rows = count(1), count(variant.index_rows)
    query_bytes = op.head_dim * variant.query_bytes
    key_bytes = op.head_dim * BLOCK * variant.cache.bytes
    queries = step.buffers[ASKED] + token * op.heads * query_bytes
    weights = step.buffers[PROJECTED] + (token * op.inputs + op.offset + op.head_dim) * 4
    table, other_tile = table_of(step, token), tiles + number(rows) * 64
    for block in range(begin, end, 2):
        other, ahead = lesser(block + 1, end - 1), lesser(block + 2, end - 1)
        a = op.keys + load_int(table + 4 * block) * key_bytes
        b = op.keys + load_int(table + 4 * other) * key_bytes
        next_a = op.keys + load_int(table + 4 * ahead) * key_bytes
        next_b = op.keys + load_int(table + 4 * lesser(block + 3, end - 1)) * key_bytes
        sum_a, sum_b = fill(0.0), fill(0.0)
        for head in range(0, op.heads, number(rows)):
            tile_a, tile_b = zeros(rows, one), zeros(rows, one)
            x = queries + head * query_bytes
            for i in range(0, op.head_dim // variant.cache.step * 64, 64):
                if head == 0:
                    prefetch(next_a + i)
                    prefetch(next_b + i)
                tile_a = multiply_add(variant.cache, rows, one, one, tile_a, a + i, x, query_bytes)
                tile_b = multiply_add(variant.cache, rows, one, one, tile_b, b + i, x, query_bytes)
                x += variant.cache.step_bytes
            store_tile(rows, one, tile_a, tiles, 64)
            store_tile(rows, one, tile_b, other_tile, 64)
            for row in range(lesser(number(rows), op.heads - head)):
                part = fill(load_float(weights + 4 * (head + row)))
                sum_a = fma(maximum(fill(0.0), load(tiles + 64 * row)), part, sum_a)
                sum_b = fma(maximum(fill(0.0), load(other_tile + 64 * row)), part, sum_b)
        # adding 0 leaves no negative zero, which would be another number to `rank_of`
        store(scores + 64 * block, maximum(add(sum_a, fill(0.0)), fill(_NEVER)))
        store(scores + 64 * block + 64, maximum(add(sum_b, fill(0.0)), fill(_NEVER)))


@kernel
def rank_of(score):
    """Return a number from 0 to 2^32 - 1 for the float32 at an address, in the same order."""
    bits = load_int(score) & _ALL
    return bits ^ _ALL if bits & _SIGN else bits | _SIGN


@kernel
def list_best(scores, seen, most, room, target):
    """List the places of the `most` best of `seen` scores, ascending; of equals the first.

    The rank of the worst of them is found from its highest bits on. `room`: counts of buckets.
    """
    counts = ints_at(room, _BUCKETS)
    found, left = np.int64(0), most - np.int64(0)  # bits of the rank; how many have them
    for shift in range(32 - _BITS, -1, -_BITS):
        for i in range(_BUCKETS):
            counts[i] = 0
        for i in range(seen):
            rank = rank_of(scores + 4 * i)
            if rank >> (shift + _BITS) == found:
                counts[(rank >> shift) & (_BUCKETS - 1)] += 1
        bucket = np.int64(_BUCKETS - 1)
        while counts[bucket] < left:
            left -= counts[bucket]
            bucket -= 1
        found = (found << _BITS) | bucket
    place = target
    for i in range(seen):
        rank = rank_of(scores + 4 * i)
        if rank == found and left > 0:
            left -= 1
            store_int(place, i)
            place += 4
        elif rank > found:
            store_int(place, i)
            place += 4
