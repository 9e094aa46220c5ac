"""Attention of one token's query heads over the listed KV blocks of its sequence.

It is `attention.py` for a list of pairs of a KV block and a mask of its tokens. A work item is a
token, a KV head, and a part of its query heads, if there are many.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import lesser
from tgi_trio.shard.cpu_backend.kernels.attention import seen_tokens, softmax, table_of
from tgi_trio.shard.cpu_backend.kernels.norm import BLOCK
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.cpu_backend.kernels.scores import score_pair
from tgi_trio.shard.cpu_backend.kernels.threads import atomic_add
from tgi_trio.shard.cpu_backend.kernels.tiles import add_weighted, store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    fill,
    load,
    load_int,
    multiply,
    prefetch,
    store,
    where_bits,
)
from tgi_trio.shard.cpu_backend.scratch_memory import TILE_BYTES
from tgi_trio.shard.cpu_backend.tables import Buffer
from tgi_trio.shard.cpu_backend.weight_layout import LANES

QUERY, ATTENDED, CHOICE = int(Buffer.QUERY), int(Buffer.ATTENDED), int(Buffer.CHOICE)
_NOTHING = -1e30  # the score of a token that is not attended to
_LINE = 64


@kernel
def attend_blocks(variant, step, op, blocks, counter, scratch):
    """Attend for all tokens that see more than `most`; ATTEND has done so for the others.

    `scratch`: as `find_blocks_room` in `operations/blocks.py` counts it.
    """
    parts = op.heads // (op.kv_heads * variant.heads)
    each = op.kv_heads * parts
    items = step.tokens * each
    item = items - 1 - atomic_add(counter, 1)
    while item >= 0:
        if seen_tokens(step, op, item // each) > op.most:
            attend_to_blocks(
                variant, count(variant.heads), count(variant.value_vectors), step, op, blocks,
                item // each, item % each, parts, scratch,
            )  # fmt: skip
        item = items - 1 - atomic_add(counter, 1)


@kernel
def attend_to_blocks(variant, rows, columns, step, op, blocks, token, own, parts, scratch):
    """Attend with `rows` query heads of a token; `own`: the KV head, and which of its `parts`."""
    size, kv_head = op.head_dim, own // parts
    first = op.heads * token + own * number(rows)
    query = step.buffers[QUERY] + first * size * variant.query_bytes
    place = token * blocks.lists + kv_head % blocks.lists
    listed = step.buffers[CHOICE] + place * blocks.choice_bytes
    entries, table = load_int(listed), table_of(step, token)
    scores, stride = scratch + TILE_BYTES, 8 * blocks.choice_bytes  # a line for eight bytes
    key_bytes = size * BLOCK * variant.cache.bytes
    value_bytes = op.value_dim * BLOCK * variant.cache.bytes
    keys, values = op.keys + kv_head * key_bytes, op.values + kv_head * value_bytes
    score_listed(
        variant, rows, op, table, listed + 8, entries, keys, key_bytes * op.kv_heads, query,
        scores, stride,
    )  # fmt: skip
    for row in range(number(rows)):
        softmax(
            op, own * number(rows) + row, scores + row * stride, np.int64(0), entries,
            np.int64(0), entries * BLOCK,
        )  # fmt: skip
    target, value_stride = step.buffers[ATTENDED], value_bytes * op.kv_heads
    if number(rows) <= variant.paired_rows:
        sum_listed(
            variant, rows, columns, op, table, listed + 8, entries, values, value_stride, scores,
            stride, scratch, target, first * op.value_dim,
        )  # fmt: skip
    else:
        for _ in range(number(rows) // 4):
            sum_listed(
                variant, count(4), count(1), op, table, listed + 8, entries, values, value_stride,
                scores, stride, scratch, target, first * op.value_dim,
            )  # fmt: skip
            scores += 4 * stride
            first += 4
        if number(rows) % 4:
            sum_listed(
                variant, count(number(rows) % 4), count(2), op, table, listed + 8, entries, values,
                value_stride, scores, stride, scratch, target, first * op.value_dim,
            )  # fmt: skip


@kernel
def block_at(table, listed, i):
    """Return the number of the KV block of a listed pair."""
    return load_int(table + 4 * load_int(listed + 8 * i))


@kernel
def score_listed(
    variant, rows, op, table, listed, entries, keys, key_stride, query, scores, stride
):
    """scores[row, i] = query[row] . key[i] for listed tokens; those masked have none.

    Of an odd number of KV blocks, the last is computed twice.
    """
    for i in range(0, entries, 2):
        other = lesser(i + 1, entries - 1)
        a = keys + block_at(table, listed, i) * key_stride
        b = keys + block_at(table, listed, other) * key_stride
        next_a = keys + block_at(table, listed, lesser(i + 2, entries - 1)) * key_stride
        next_b = keys + block_at(table, listed, lesser(i + 3, entries - 1)) * key_stride
        score_pair(
            variant, rows, count(1), op, a, b, next_a, next_b, query, scores + 64 * i, stride
        )
        for row in range(number(rows)):
            place = scores + row * stride + 64 * i
            for at in range(2):
                mask = listed + 8 * lesser(i + at, entries - 1) + 4
                value = where_bits(mask, load(place + 64 * at), fill(_NOTHING))
                store(place + 64 * at, value)


@kernel
def sum_listed(
    variant, rows, columns, op, table, listed, entries, values, value_stride, weights, stride,
    tile_at, target, place,
):  # fmt: skip
    """target[place of row] = sum over listed tokens of weights[row, token] * value[token]."""
    stored, size, width = variant.cache.bytes, op.value_dim, LANES * number(columns)
    for d in range(0, size, width):
        tile, weight = zeros(rows, columns), weights
        for i in range(entries):
            value = values + block_at(table, listed, i) * value_stride + d * stored
            following = block_at(table, listed, lesser(i + 1, entries - 1))
            ahead = values + following * value_stride + d * stored
            mask = load_int(listed + 8 * i + 4)
            for lane in range(BLOCK):
                if (mask >> lane) & 1:
                    for j in range(0, width * stored, _LINE):
                        prefetch(ahead + j)
                    tile = add_weighted(variant.cache, rows, columns, tile, value, weight, stride)
                value += size * stored
                ahead += size * stored
                weight += 4
        store_tile(rows, columns, tile, tile_at, 4 * width)
        for i in range(number(rows)):
            for j in range(0, width, LANES):
                sum_ = load(tile_at + (i * width + j) * 4)
                if variant.cache.eight:
                    sum_ = multiply(sum_, fill(op.value_scale))
                store_result(variant, op, target, place + i * size + d + j, sum_)
