"""Attention of one token's query heads over the blocks of its sequence.

A work item is a token and a KV head (and a part of its query heads, where they are many): all
heads of the item are computed together, so that every key and value is read once for all. Items
are taken from a counter that the threads share: contexts differ, and whoever is done takes the
next.

Scores of a block of 16 tokens are a tile of heads x 1 vector, summed over the head's dimensions
like a panel of a linear layer. Two blocks at a time keep the multiply-adds from waiting for each
other. The scores of the whole context are kept, so the softmax needs no corrections afterwards.

An item reads its blocks of K, then those of V, then comes the next item's K: as one stream, of
which some blocks are fetched ahead, for memory answers later than a block is computed.
"""

from __future__ import annotations

from tgi_trio.shard.numba_backend.kernels import kernel
from tgi_trio.shard.numba_backend.kernels.activation import apply_soft_cap
from tgi_trio.shard.numba_backend.kernels.arrays import greater, lesser
from tgi_trio.shard.numba_backend.kernels.norm import BLOCK
from tgi_trio.shard.numba_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.numba_backend.kernels.threads import atomic_add
from tgi_trio.shard.numba_backend.kernels.tiles import add_weighted, multiply_add, store_tile, zeros
from tgi_trio.shard.numba_backend.kernels.variant import count
from tgi_trio.shard.numba_backend.kernels.vectors import (
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
    subtract,
    total,
    weight,
)
from tgi_trio.shard.numba_backend.tables import Buffer
from tgi_trio.shard.numba_backend.weight_layout import LANES

QUERY, ATTENDED = int(Buffer.QUERY), int(Buffer.ATTENDED)
_NOTHING = -1e30  # score of a token that is not seen
TILE_BYTES = 1024  # room for a tile of values: at most 16 vectors
_AHEAD = 4  # blocks of the stream that are fetched ahead
_LINE = 64


@kernel
def attend(variant, step, op, counter, scratch):
    """Take items until none is left. `counter`: address of the number taken so far, an int64."""
    parts = step.heads // (step.kv_heads * variant.heads)
    items = step.tokens * step.kv_heads * parts
    item = items - 1 - atomic_add(counter, 1)
    while item >= 0:
        attend_item(variant, step, op, item, parts, scratch)
        item = items - 1 - atomic_add(counter, 1)


@kernel
def seen_tokens(step, token):
    """Return how many tokens there are up to this one, itself included."""
    return load_int(step.positions + 4 * token) + 1


@kernel
def hidden_tokens(op, seen):
    """Return how many of those that a token could see are outside the window."""
    return greater(0, seen - op.window) if op.window else 0


@kernel
def table_of(step, token):
    """Return the address of the blocks of a token's sequence."""
    return step.tables + load_int(step.rows + 4 * token) * step.table_width * 4


@kernel
def attend_item(variant, step, op, item, parts, scratch):
    """Attend with `variant.heads` query heads of one token; `parts`: items of its KV heads."""
    token, part = item // (step.kv_heads * parts), item % (step.kv_heads * parts)
    size, kv_head = step.head_dim, part // parts
    seen = seen_tokens(step, token)
    hidden = hidden_tokens(op, seen)
    table = table_of(step, token)
    first = step.heads * token + part * variant.heads
    query = step.buffers[QUERY] + first * size * variant.active_bytes
    block_bytes = size * BLOCK * variant.kv.bytes
    scores = scratch + TILE_BYTES
    keys, values = op.keys + kv_head * block_bytes, op.values + kv_head * block_bytes
    stride = block_bytes * step.kv_heads
    begin, end = hidden // BLOCK, (seen + BLOCK - 1) // BLOCK
    score_blocks(variant, step, table, begin, end, keys, values, stride, query, scores)
    for head in range(variant.heads):
        softmax(scores + head * step.scores_bytes, begin, end, hidden, seen, op.cap)
    following = greater(0, item - step.threads)
    sum_values(
        variant, step, op, table, begin, end, seen, values, following, parts, stride, scores,
        scratch, first * size,
    )  # fmt: skip


@kernel
def keys_of_item(step, op, item, parts, stride, number):
    """Return the address of one of the first blocks of K that an item reads."""
    token, kv_head = item // (step.kv_heads * parts), item % (step.kv_heads * parts) // parts
    seen = seen_tokens(step, token)
    block = lesser(hidden_tokens(op, seen) // BLOCK + number, (seen - 1) // BLOCK)
    keys = op.keys + kv_head * (stride // step.kv_heads)
    return keys + load_int(table_of(step, token) + 4 * block) * stride


@kernel
def key_or_value(table, begin, end, keys, values, stride, block):
    """Return the address of a block of K; behind the last one come those of V."""
    if block < end:
        return keys + load_int(table + 4 * block) * stride
    return values + load_int(table + 4 * lesser(begin + block - end, end - 1)) * stride


@kernel
def score_blocks(variant, step, table, begin, end, keys, values, stride, query, scores):
    """scores[head, token] = query[head] . key[token] for the tokens of blocks begin to end."""
    heads, one = count(variant.heads), count(1)
    query_bytes = step.head_dim * variant.active_bytes
    for block in range(begin, end, 2):
        other = lesser(block + 1, end - 1)  # of an odd number the last block is computed twice
        a = keys + load_int(table + 4 * block) * stride
        b = keys + load_int(table + 4 * other) * stride
        ahead = block + _AHEAD
        ahead_a = key_or_value(table, begin, end, keys, values, stride, ahead)
        ahead_b = key_or_value(table, begin, end, keys, values, stride, ahead + 1)
        tile_a, tile_b, x = zeros(heads, one), zeros(heads, one), query
        for i in range(0, step.head_dim // variant.kv.step * 64, 64):
            prefetch(ahead_a + i)
            prefetch(ahead_b + i)
            tile_a = multiply_add(variant.kv, heads, one, one, tile_a, a + i, x, query_bytes)
            tile_b = multiply_add(variant.kv, heads, one, one, tile_b, b + i, x, query_bytes)
            x += variant.kv.step_bytes
        store_tile(heads, one, tile_a, scores + 64 * block, step.scores_bytes)
        store_tile(heads, one, tile_b, scores + 64 * block + 64, step.scores_bytes)


@kernel
def softmax(scores, begin, end, hidden, seen, cap):
    """Turn one head's scores into weights that sum to 1; of tokens not seen, 0."""
    best = fill(_NOTHING)
    for block in range(begin, end):
        value = apply_soft_cap(load(scores + 64 * block), cap)
        if seen < (block + 1) * BLOCK:
            value = first_lanes(seen - block * BLOCK, value, fill(_NOTHING))
        if hidden > block * BLOCK:
            value = first_lanes(hidden - block * BLOCK, fill(_NOTHING), value)
        store(scores + 64 * block, value)
        best = maximum(value, best)
    best, sums = fill(largest(best)), fill(0.0)
    for block in range(begin, end):
        value = weight(subtract(load(scores + 64 * block), best))
        store(scores + 64 * block, value)
        sums = add(sums, value)
    factor = fill(1.0 / total(sums))
    for block in range(begin, end):
        store(scores + 64 * block, multiply(load(scores + 64 * block), factor))


@kernel
def sum_values(
    variant,
    step,
    op,
    table,
    begin,
    end,
    seen,
    values,
    following,
    parts,
    stride,
    weights,
    tile_at,
    place,
):
    """ATTENDED[place + head] = sum over tokens of weights[head, token] * value[token].

    After the last V the K of the item that is `following` is fetched.
    """
    heads, columns = count(variant.heads), count(variant.value_vectors)
    stored, size, target = variant.kv.bytes, step.head_dim, step.buffers[ATTENDED]
    width = LANES * variant.value_vectors
    for d in range(0, size, width):
        tile = zeros(heads, columns)
        for block in range(begin, end):
            value = values + load_int(table + 4 * block) * stride + d * stored
            if block + _AHEAD < end:
                ahead = values + load_int(table + 4 * (block + _AHEAD)) * stride + d * stored
            else:
                ahead = keys_of_item(step, op, following, parts, stride, block + _AHEAD - end)
                ahead += d * stored
            weight = weights + 64 * block
            for _ in range(lesser(BLOCK, seen - block * BLOCK)):
                for i in range(0, width * stored, _LINE):
                    prefetch(ahead + i)
                tile = add_weighted(
                    variant.kv, heads, columns, tile, value, weight, step.scores_bytes
                )
                value += size * stored
                ahead += size * stored
                weight += 4
        store_tile(heads, columns, tile, tile_at, 4 * width)
        for i in range(variant.heads):
            for j in range(0, width, LANES):
                sum_ = load(tile_at + (i * width + j) * 4)
                store_result(variant, op, target, place + i * size + d + j, sum_)
