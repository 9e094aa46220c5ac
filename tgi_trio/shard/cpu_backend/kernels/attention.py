"""Attention of one token's query heads over the KV blocks of its sequence.

A work item is a token and a KV head (and a part of its query heads, if there are many). All heads
of an item are computed together, so every key and value is read once for all. Threads take items
from a shared counter, since contexts differ in length.

Scores of a block of 16 tokens are a tile of heads x 1 vector, summed over the head's dimensions
like a panel of a linear layer, by the matrix unit where there is one. Two blocks are computed at a
time, so that multiply-adds do not wait for each other. The scores of the whole context are kept, so
the softmax needs no corrections afterwards.

An item reads its blocks of K, then those of V; after that comes the next item's K. This is one
stream, of which some blocks are prefetched, since memory takes longer to answer than a block to
compute.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.activation import apply_soft_cap
from tgi_trio.shard.cpu_backend.kernels.arrays import greater, lesser
from tgi_trio.shard.cpu_backend.kernels.matrix_unit import (
    configure_registers,
    release_registers,
    score_two_blocks,
)
from tgi_trio.shard.cpu_backend.kernels.norm import BLOCK
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.cpu_backend.kernels.scores import score_pair
from tgi_trio.shard.cpu_backend.kernels.threads import atomic_add
from tgi_trio.shard.cpu_backend.kernels.tiles import add_weighted, store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    count_from,
    fill,
    first_lanes,
    fma,
    largest,
    load,
    load_float,
    load_int,
    maximum,
    multiply,
    prefetch,
    store,
    subtract,
    total,
    weight,
)
from tgi_trio.shard.cpu_backend.scratch_memory import TILE_BYTES
from tgi_trio.shard.cpu_backend.tables import Buffer
from tgi_trio.shard.cpu_backend.weight_layout import LANES

QUERY, ATTENDED = int(Buffer.QUERY), int(Buffer.ATTENDED)
_NOTHING = -1e30  # the score of a token that is not attended to
_AHEAD = 4  # blocks of the stream to prefetch
_LINE = 64


@kernel
def attend(variant, step, op, counter, scratch):
    """Take items until none is left. `counter`: address of the number taken so far, an int64.

    A prompt's items are ordered by KV head, whose K and V then stay in the cache; sequences that
    get one token each have nothing to share.
    """
    parts = op.heads // (op.kv_heads * variant.heads)
    tiles = (step.tokens + step.tile - 1) // step.tile
    items = tiles * op.kv_heads * parts
    item = items - 1 - atomic_add(counter, 1)
    while item >= 0:
        tile, own = item // (op.kv_heads * parts), item % (op.kv_heads * parts)
        following = greater(0, item - step.threads)
        if step.tile > 1:
            tile, own, following = item % tiles, item // tiles, np.int64(-1)
        token, end = tile * step.tile, lesser((tile + 1) * step.tile, step.tokens)
        while token < end:
            if op.most and seen_tokens(step, op, token) > op.most:
                token += 1  # an index chooses what it attends to
            elif is_run(variant, step, token, end):
                attend_rows(
                    variant, count(variant.tokens), count(variant.tile_rows),
                    count(variant.tile_vectors), step, op, token, own, following, parts, scratch,
                )  # fmt: skip
                token += variant.tokens
            else:
                attend_rows(
                    variant, count(1), count(variant.heads), count(variant.value_vectors),
                    step, op, token, own, following, parts, scratch,
                )  # fmt: skip
                token += 1
        item = items - 1 - atomic_add(counter, 1)


@kernel
def is_run(variant, step, token, end):
    """Return whether a whole tile of tokens, from this one on, belongs to one sequence."""
    if variant.tokens == 1 or end - token < variant.tokens:
        return False
    last = token + variant.tokens - 1
    return load_int(step.rows + 4 * token) == load_int(step.rows + 4 * last)


@kernel
def seen_tokens(step, op, token):
    """Return the number of tokens up to the last one that this token attends to."""
    lasts = step.positions if op.causal else step.lasts
    return load_int(lasts + 4 * token) + 1


@kernel
def hidden_tokens(step, op, token):
    """Return how many leading tokens of the context lie outside this token's window or chunk."""
    position = load_int(step.positions + 4 * token)
    if op.chunk:
        return position - position % op.chunk
    return greater(0, position + 1 - op.window) if op.window else 0


@kernel
def table_of(step, token):
    """Return the address of the block table of a token's sequence."""
    return step.tables + load_int(step.rows + 4 * token) * step.table_width * 4


@kernel
def attend_rows(variant, tokens, rows, columns, step, op, token, own, following, parts, scratch):
    """Attend with `variant.heads` query heads of `tokens` tokens, `rows` in all.

    `own`: the KV head, and which of the `parts` of its query heads. Every row is computed as it
    would be alone: the weights of tokens that it does not attend to are 0.
    """
    size, kv_head = op.head_dim, own // parts
    last = token + number(tokens) - 1
    seen = seen_tokens(step, op, last)
    hidden = hidden_tokens(step, op, token)
    table = table_of(step, token)
    first = op.heads * token + own * variant.heads
    query = step.buffers[QUERY] + first * size * variant.query_bytes
    scores = scratch + TILE_BYTES + number(rows) * size * 4
    if number(tokens) > 1:
        query = gather_queries(variant, tokens, step, op, query, scratch + TILE_BYTES)
    key_bytes = size * BLOCK * variant.cache.bytes
    value_bytes = op.value_dim * BLOCK * variant.cache.bytes
    keys, values = op.keys + kv_head * key_bytes, op.values + kv_head * value_bytes
    key_stride, value_stride = key_bytes * op.kv_heads, value_bytes * op.kv_heads
    begin, end = hidden // BLOCK, (seen + BLOCK - 1) // BLOCK
    score_blocks(
        variant, rows, step, op, table, begin, end, keys, key_stride, values, value_stride, query,
        scores,
    )  # fmt: skip
    for row in range(number(rows)):
        own_token = token + row // variant.heads
        softmax(
            op, own * variant.heads + row % variant.heads, scores + row * step.scores_bytes,
            begin, end, hidden_tokens(step, op, own_token), seen_tokens(step, op, own_token),
        )  # fmt: skip
    if number(rows) <= variant.paired_rows:
        sum_values(
            variant, rows, columns, 0, step, op, table, begin, end, seen, values, value_stride,
            following, parts, key_stride, scores, scratch, first * op.value_dim,
        )  # fmt: skip
    else:
        whole = number(rows) // 4 * 4
        for row in range(0, whole, 4):
            sum_values(
                variant, count(4), count(1), row, step, op, table, begin, end, seen, values,
                value_stride, following, parts, key_stride, scores, scratch, first * op.value_dim,
            )  # fmt: skip
        if number(rows) % 4:
            sum_values(
                variant, count(number(rows) % 4), count(2), whole, step, op, table, begin, end,
                seen, values, value_stride, following, parts, key_stride, scores, scratch,
                first * op.value_dim,
            )  # fmt: skip


@kernel
def gather_queries(variant, tokens, step, op, query, target):
    """Copy the queries of some tokens next to each other; return their address."""
    size = variant.heads * op.head_dim * variant.query_bytes
    stride = op.heads * op.head_dim * variant.query_bytes
    for i in range(number(tokens)):
        for byte in range(0, size, _LINE):
            store(target + i * size + byte, load(query + i * stride + byte))
    return target


@kernel
def keys_of_item(step, op, item, parts, stride, place):
    """Return the address of one of the first blocks of K that an item reads."""
    token, kv_head = item // (op.kv_heads * parts), item % (op.kv_heads * parts) // parts
    seen = seen_tokens(step, op, token)
    block = lesser(hidden_tokens(step, op, token) // BLOCK + place, (seen - 1) // BLOCK)
    keys = op.keys + kv_head * (stride // op.kv_heads)
    return keys + load_int(table_of(step, token) + 4 * block) * stride


@kernel
def key_or_value(table, begin, end, keys, key_stride, values, value_stride, block):
    """Return the address of a block of the stream: of K, or after its last block of V."""
    if block < end:
        return keys + load_int(table + 4 * block) * key_stride
    return values + load_int(table + 4 * lesser(begin + block - end, end - 1)) * value_stride


@kernel
def score_blocks(
    variant,
    rows,
    step,
    op,
    table,
    begin,
    end,
    keys,
    key_stride,
    values,
    value_stride,
    query,
    scores,
):
    """scores[row, token] = query[row] . key[token] for the tokens of blocks begin to end."""
    query_bytes = op.head_dim * variant.query_bytes
    if variant.cache.amx:
        configure_registers(number(rows))
    for block in range(begin, end, 2):
        other = lesser(block + 1, end - 1)  # of an odd number of blocks, the last is computed twice
        a = keys + load_int(table + 4 * block) * key_stride
        b = keys + load_int(table + 4 * other) * key_stride
        ahead = block + _AHEAD
        ahead_a = key_or_value(table, begin, end, keys, key_stride, values, value_stride, ahead)
        ahead_b = key_or_value(table, begin, end, keys, key_stride, values, value_stride, ahead + 1)
        if variant.cache.amx:
            size = op.head_dim // variant.cache.step * 64
            for i in range(0, size, 64):
                prefetch(ahead_a + i)
                prefetch(ahead_b + i)
            score_two_blocks(query, query_bytes, a, b, size, scores + 64 * block, step.scores_bytes)
            continue
        score_pair(
            variant, rows, count(1), op, a, b, ahead_a, ahead_b, query, scores + 64 * block,
            step.scores_bytes,
        )  # fmt: skip
    if variant.cache.amx:
        release_registers()


@kernel
def softmax(op, head, scores, begin, end, hidden, seen):
    """Turn one head's scores into weights that sum to 1; 0 for tokens not attended to.

    With linear biases (ALiBi, Press et al. 2022) tokens weigh less the farther back they are. A
    sink (gpt-oss) takes part in the softmax but has no value.
    """
    slope, sink = np.float32(0.0), np.float32(_NOTHING)
    if op.slopes:
        slope = load_float(op.slopes + 4 * head)
    if op.sinks:
        sink = load_float(op.sinks + 4 * head)
    best = fill(sink)
    for block in range(begin, end):
        value = apply_soft_cap(load(scores + 64 * block), op.cap)
        if op.slopes:
            value = fma(count_from(block * BLOCK - seen + 1), fill(slope), value)
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
    whole = total(sums)
    if op.sinks:
        whole += largest(weight(subtract(fill(sink), best)))
    factor = fill(1.0 / whole)
    for block in range(begin, end):
        store(scores + 64 * block, multiply(load(scores + 64 * block), factor))


@kernel
def sum_values(
    variant,
    rows,
    columns,
    first,
    step,
    op,
    table,
    begin,
    end,
    seen,
    values,
    stride,
    following,
    parts,
    key_stride,
    weights,
    tile_at,
    place,
):
    """ATTENDED[place of row] = sum over tokens of weights[row, token] * value[token].

    `first`: the first of these rows among those of the item, at whose first row `place` and
    `weights` are. After the last block of V, the K of the item `following` is prefetched; -1: none.
    """
    stored, size, target = variant.cache.bytes, op.value_dim, step.buffers[ATTENDED]
    width = LANES * number(columns)
    for d in range(0, size, width):
        tile = zeros(rows, columns)
        for block in range(begin, end):
            value = values + load_int(table + 4 * block) * stride + d * stored
            if block + _AHEAD < end:
                ahead = values + load_int(table + 4 * (block + _AHEAD)) * stride + d * stored
            elif following < 0:
                ahead = value
            else:
                ahead = keys_of_item(step, op, following, parts, key_stride, block + _AHEAD - end)
                ahead += d * stored
            weight = weights + first * step.scores_bytes + 64 * block
            for _ in range(lesser(BLOCK, seen - block * BLOCK)):
                for i in range(0, width * stored, _LINE):
                    prefetch(ahead + i)
                tile = add_weighted(
                    variant.cache, rows, columns, tile, value, weight, step.scores_bytes
                )
                value += size * stored
                ahead += size * stored
                weight += 4
        store_tile(rows, columns, tile, tile_at, 4 * width)
        for i in range(number(rows)):
            token, head = (first + i) // variant.heads, (first + i) % variant.heads
            target_row = place + (token * op.heads + head) * size + d
            for j in range(0, width, LANES):
                sum_ = load(tile_at + (i * width + j) * 4)
                if variant.cache.eight:
                    sum_ = multiply(sum_, fill(op.value_scale))
                store_result(variant, op, target, target_row + j, sum_)
