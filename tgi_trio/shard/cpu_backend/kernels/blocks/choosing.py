"""An index of blocks: its keys and queries, the scores of blocks, the best of them.

Its heads are those of K and V, and each chooses for itself. A block is as good as its best token.
The scores of 16 tokens are a tile of heads x 1 vector, as in `attention.py`; every score is summed
in one order, so a token has the same choice at any load.

What is chosen is listed as pairs of a KV block of the context and a mask of its tokens, one bit
each. Work is shared as in `kernels/index/choosing.py`.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import greater, lesser
from tgi_trio.shard.cpu_backend.kernels.attention import seen_tokens, table_of
from tgi_trio.shard.cpu_backend.kernels.blocks.attending import attend_blocks
from tgi_trio.shard.cpu_backend.kernels.index.choosing import list_best
from tgi_trio.shard.cpu_backend.kernels.latents import turn_part
from tgi_trio.shard.cpu_backend.kernels.linked_calls import blocks_at, operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.norm import (
    BLOCK,
    gather_angles,
    inverse_deviation,
    store_key,
    turning_row,
)
from tgi_trio.shard.cpu_backend.kernels.threads import atomic_add
from tgi_trio.shard.cpu_backend.kernels.tiles import multiply_add, store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    first_lanes,
    largest,
    load,
    load_int,
    maximum,
    multiply,
    prefetch,
    store,
    store_float,
    store_int,
    store_query,
)
from tgi_trio.shard.cpu_backend.scratch_memory import INDEX_COUNTS, INDEX_TILES, MOST_SHARED
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

ASK, SCORE, CHOOSE = int(Code.ASK_BLOCKS), int(Code.SCORE_BLOCKS), int(Code.CHOOSE_BLOCKS)
QKV, ASKED, SCORES, CHOICE = (
    int(buffer) for buffer in (Buffer.QKV, Buffer.ASKED, Buffer.SCORES, Buffer.CHOICE)
)
_CHUNK = 1024  # tokens whose blocks a thread scores at a time
_NEVER = -np.inf
_WHOLE = (1 << BLOCK) - 1  # mask of a whole KV block


@entry
def run_blocks(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation."""
    step, op = step_at(step_address), operation_at(op_address)
    blocks = blocks_at(op.facts)
    if op.code == ASK:
        ask(variant, rank, step, op, blocks, scratch)
    elif op.code == SCORE or op.code == CHOOSE:
        choose(variant, step, op, blocks, counter, scratch)
    else:
        attend_blocks(variant, step, op, blocks, counter, scratch)


@kernel
def ask(variant, rank, step, op, blocks, scratch):
    """Normalise and rotate keys, and write them to the cache; do so with queries, for ASKED.

    Both are in rows of QKV. `scratch`: room for four keys.
    """
    size = op.head_dim
    for t in range(rank, step.tokens, step.threads):
        row = turning_row(step, op, t, 0)
        cosines, sines = op.cosines + row, op.sines + row
        if op.axes and step.turn_stride:
            cosines = scratch + 8 * size
            sines = cosines + 2 * op.rotated
            gather_angles(step, op, t, cosines)
        source = step.buffers[QKV] + t * op.width * 4
        target = step.buffers[ASKED] + t * op.heads * size * variant.query_bytes
        heads = op.heads if seen_tokens(step, op, t) > op.most else np.int64(0)
        for head in range(-1, heads):  # the key comes first
            place, gain = source + (blocks.queries + head * size) * 4, op.query_norm
            if head < 0:
                place, gain = source + blocks.key * 4, op.key_norm
            factor = fill(inverse_deviation(place, size, 0.0, op.eps))
            for i in range(0, 4 * size, 4 * LANES):
                store(scratch + i, multiply(multiply(load(place + i), factor), load(gain + i)))
            turn_part(op, scratch, size, cosines, sines, scratch + 4 * size)
            if head < 0:
                slot = load_int(step.slots + 4 * t)
                block = op.keys + slot // BLOCK * size * BLOCK * variant.cache.bytes
                store_key(variant, op, block, slot % BLOCK, scratch + 4 * size, scratch)
            else:
                for i in range(0, size, LANES):
                    value = load(scratch + 4 * (size + i))
                    store_query(variant, target + (head * size + i) * variant.query_bytes, value)


@kernel
def choose(variant, step, op, blocks, counter, scratch):
    """Score the blocks of tokens that see more than `most`; CHOOSE lists the best in CHOICE.

    `scratch`: as `find_blocks_room` in `operations/blocks.py` counts it.
    """
    shared = step.tokens <= MOST_SHARED
    each, items = greater(1, _CHUNK // blocks.size), step.tokens
    if op.code == SCORE:
        items = step.tokens * count_chunks(step, op, blocks, each) if shared else np.int64(0)
    item = items - 1 - atomic_add(counter, 1)
    while item >= 0:
        token, chunk = item % step.tokens, item // step.tokens
        seen = seen_tokens(step, op, token)
        if seen > op.most:
            begin, end = np.int64(0), (seen + blocks.size - 1) // blocks.size
            room = scratch + INDEX_TILES + 64 * op.heads
            scores = room + INDEX_COUNTS + 4 * blocks.most
            if shared:
                scores = step.buffers[SCORES] + token * op.heads * scores_stride(step, blocks)
            if op.code == SCORE:
                begin, end = chunk * each, lesser(end, (chunk + 1) * each)
            elif shared:
                begin = end
            score_units(variant, step, op, blocks, token, begin, end, scores, scratch)
            if op.code == CHOOSE:
                list_choices(step, op, blocks, token, seen, scores, room)
        item = items - 1 - atomic_add(counter, 1)


@kernel
def count_chunks(step, op, blocks, each):
    """Return the chunks of `each` blocks in the longest context of a step."""
    seen = np.int64(0)
    for t in range(step.tokens):
        seen = greater(seen, seen_tokens(step, op, t))
    return (seen + each * blocks.size - 1) // (each * blocks.size)


@kernel
def scores_stride(step, blocks):
    """Return the bytes of one head's scores, as `count_unit_bytes` does."""
    return (step.scores_bytes // (4 * blocks.size) + LANES) * 4


@kernel
def score_units(variant, step, op, blocks, token, begin, end, scores, tiles):
    """scores[head, block] = the largest of query . key over the block's tokens that are seen.

    The last blocks are better than any other. NaN is the worst score. Of an odd number of KV
    blocks, the last is computed twice.
    """
    one, rows, each = count(1), count(variant.block_rows), blocks.size // BLOCK
    query_bytes = op.head_dim * variant.query_bytes
    key_bytes = op.head_dim * BLOCK * variant.cache.bytes
    queries, table = step.buffers[ASKED] + token * op.heads * query_bytes, table_of(step, token)
    seen, best = seen_tokens(step, op, token), tiles + INDEX_TILES
    last, stride = (seen - 1) // BLOCK, scores_stride(step, blocks)
    for unit in range(begin, end):
        for head in range(op.heads):
            store(best + 64 * head, fill(_NEVER))
        stop = lesser((unit + 1) * each, last + 1)
        for block in range(unit * each, stop, 2):
            other = lesser(block + 1, stop - 1)
            a = op.keys + load_int(table + 4 * block) * key_bytes
            b = op.keys + load_int(table + 4 * other) * key_bytes
            next_a = op.keys + load_int(table + 4 * lesser(block + 2, last)) * key_bytes
            next_b = op.keys + load_int(table + 4 * lesser(block + 3, last)) * key_bytes
            for head in range(0, op.heads, number(rows)):
                tile_a, tile_b = zeros(rows, one), zeros(rows, one)
                x = queries + head * query_bytes
                for i in range(0, op.head_dim // variant.cache.step * 64, 64):
                    if head == 0:
                        prefetch(next_a + i)
                        prefetch(next_b + i)
                    tile_a = multiply_add(
                        variant.cache, rows, one, one, tile_a, a + i, x, query_bytes
                    )
                    tile_b = multiply_add(
                        variant.cache, rows, one, one, tile_b, b + i, x, query_bytes
                    )
                    x += variant.cache.step_bytes
                store_tile(rows, one, tile_a, tiles, 64)
                store_tile(rows, one, tile_b, tiles + 64 * number(rows), 64)
                for row in range(lesser(number(rows), op.heads - head)):
                    place, at = best + 64 * (head + row), tiles + 64 * row
                    found = first_lanes(seen - BLOCK * block, load(at), fill(_NEVER))
                    found = maximum(found, load(place))
                    later = load(at + 64 * number(rows))
                    later = first_lanes(seen - BLOCK * other, later, fill(_NEVER))
                    store(place, maximum(later, found))
        for head in range(op.heads):
            # adding 0 leaves no negative zero, which would be another number to `rank_of`
            score = largest(add(load(best + 64 * head), fill(0.0)))
            if unit > (seen - 1) // blocks.size - blocks.local:
                score = np.float32(np.inf)
            store_float(scores + head * stride + 4 * unit, score)


@kernel
def list_choices(step, op, blocks, token, seen, scores, room):
    """List the best blocks of every head, ascending. `room`: counts of buckets, then a list."""
    units, each = (seen + blocks.size - 1) // blocks.size, blocks.size // BLOCK
    chosen, stride = room + INDEX_COUNTS, scores_stride(step, blocks)
    for head in range(op.heads):
        list_best(scores + head * stride, units, blocks.most, room, chosen)
        listed = np.int64(0)
        target = step.buffers[CHOICE] + (token * op.heads + head) * blocks.choice_bytes
        for i in range(blocks.most * each):
            block = load_int(chosen + 4 * (i // each)) * each + i % each
            left = lesser(seen - block * BLOCK, BLOCK)
            if left > 0:
                store_int(target + 8 + 8 * listed, block)
                store_int(target + 12 + 8 * listed, _WHOLE >> (BLOCK - left))
                listed += 1
        store_int(target, listed)
