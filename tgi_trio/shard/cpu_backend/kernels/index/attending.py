"""Attention of one token's query heads over a list of tokens.

The rows of V are those of K too, since latents are both (`kernels/latents.py`). So the listed rows
of V are copied to panels of K, 32 at a time for all heads of an item; values are read where they
are. A work item is a token, or in steps of few tokens a part of its heads.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import ints_at, lesser
from tgi_trio.shard.cpu_backend.kernels.attention import seen_tokens, softmax, table_of
from tgi_trio.shard.cpu_backend.kernels.norm import BLOCK
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.cpu_backend.kernels.scores import score_pair
from tgi_trio.shard.cpu_backend.kernels.threads import atomic_add
from tgi_trio.shard.cpu_backend.kernels.tiles import add_weighted, store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    copy_word,
    fill,
    load,
    load_int,
    multiply,
    prefetch,
)
from tgi_trio.shard.cpu_backend.scratch_memory import LISTED_AHEAD, TILE_BYTES
from tgi_trio.shard.cpu_backend.tables import Buffer
from tgi_trio.shard.cpu_backend.weight_layout import LANES

QUERY, ATTENDED, CHOICE = int(Buffer.QUERY), int(Buffer.ATTENDED), int(Buffer.CHOICE)
_ITEMS = 4  # work items of each thread, if heads of a token are divided
_LINE = 64


@kernel
def attend_chosen(variant, step, op, counter, scratch):
    """Attend for all tokens that see more than `most`; `ATTEND` has done so for the others.

    `scratch`: as `find_room` in `operations/index.py` counts it.
    """
    parts = op.heads // variant.heads
    splits = np.int64(1)
    if step.threads > 1:
        splits = lesser(parts, (_ITEMS * step.threads + step.tokens - 1) // step.tokens)
    items = step.tokens * splits
    item = items - 1 - atomic_add(counter, 1)
    while item >= 0:
        token, split = item // splits, item % splits
        if seen_tokens(step, op, token) > op.most:
            attend_to_list(
                variant, count(variant.heads), count(variant.value_vectors), step, op, token,
                parts * split // splits, parts * (split + 1) // splits, scratch,
            )  # fmt: skip
        item = items - 1 - atomic_add(counter, 1)


@kernel
def attend_to_list(variant, rows, columns, step, op, token, begin, end, scratch):
    """Attend with parts `begin` to `end` of a token's query heads, `rows` in each."""
    blocks = (op.most + BLOCK - 1) // BLOCK
    pairs = (blocks + 1) // 2
    stride = (2 * pairs + 1) * 64  # bytes of a head's scores, and a line between
    places = scratch + TILE_BYTES
    panels = places + 8 * (2 * BLOCK * pairs + LISTED_AHEAD)
    scores = panels + 2 * BLOCK * op.head_dim * variant.cache.bytes
    find_rows(variant, step, op, token, 2 * BLOCK * pairs + LISTED_AHEAD, places)
    for pair in range(pairs):
        gather_keys(variant, op, places + 8 * 2 * BLOCK * pair, panels)
        score_panels(
            variant, rows, step, op, token, begin, end, panels, scores + 128 * pair, stride
        )
    for row in range((end - begin) * number(rows)):
        softmax(
            op, begin * number(rows) + row, scores + row * stride, np.int64(0), blocks,
            np.int64(0), op.most,
        )  # fmt: skip
    for part in range(begin, end):
        weights = scores + (part - begin) * number(rows) * stride
        head = token * op.heads + part * number(rows)
        if number(rows) <= variant.paired_rows:
            sum_rows(variant, rows, columns, step, op, head, places, weights, stride, scratch)
        else:
            for _ in range(number(rows) // 4):
                sum_rows(
                    variant, count(4), count(1), step, op, head, places, weights, stride, scratch
                )
                weights += 4 * stride
                head += 4
            if number(rows) % 4:
                sum_rows(
                    variant, count(number(rows) % 4), count(2), step, op, head, places, weights,
                    stride, scratch,
                )  # fmt: skip


@kernel
def find_rows(variant, step, op, token, size, target):
    """Write the addresses of a token's chosen rows of V, int64 [size]; the last one is repeated."""
    places, table = ints_at(target, size), table_of(step, token)
    chosen, row_bytes = (
        step.buffers[CHOICE] + token * op.most * 4,
        op.value_dim * variant.cache.bytes,
    )
    for i in range(size):
        place = load_int(chosen + 4 * lesser(i, op.most - 1))
        slot = load_int(table + 4 * (place // BLOCK)) * BLOCK + place % BLOCK
        places[i] = op.values + slot * row_bytes


@kernel
def gather_keys(variant, op, places, panels):
    """Copy two blocks of listed rows to panels of K, one behind the other."""
    words, rows = op.head_dim // variant.cache.step, ints_at(places, 2 * BLOCK)
    for i in range(2 * BLOCK):
        target = panels + (i // BLOCK * words * BLOCK + i % BLOCK) * 4
        for word in range(words):
            copy_word(target + 4 * BLOCK * word, rows[i] + 4 * word)


@kernel
def score_panels(variant, rows, step, op, token, begin, end, panels, scores, stride):
    """scores[row, i] = query[row] . key[i] for 32 keys, in two panels."""
    query_bytes = op.head_dim * variant.query_bytes
    size = op.head_dim // variant.cache.step * 64
    query = step.buffers[QUERY] + (token * op.heads + begin * number(rows)) * query_bytes
    for _ in range(begin, end):
        score_pair(
            variant, rows, count(0), op, panels, panels + size, panels, panels, query, scores,
            stride,
        )  # fmt: skip
        query += number(rows) * query_bytes
        scores += number(rows) * stride


@kernel
def sum_rows(variant, rows, columns, step, op, head, places_at, weights, stride, tile_at):
    """ATTENDED[head + row] = sum over i of weights[row, i] * value[i]."""
    stored, size, width = variant.cache.bytes, op.value_dim, LANES * number(columns)
    places = ints_at(places_at, op.most + LISTED_AHEAD)
    first = head * size
    for d in range(0, size, width):
        tile, weight = zeros(rows, columns), weights
        for i in range(op.most):
            for j in range(0, width * stored, _LINE):
                prefetch(places[i + LISTED_AHEAD] + d * stored + j)
            tile = add_weighted(
                variant.cache, rows, columns, tile, places[i] + d * stored, weight, stride
            )
            weight += 4
        store_tile(rows, columns, tile, tile_at, 4 * width)
        for i in range(number(rows)):
            for j in range(0, width, LANES):
                sum_ = load(tile_at + (i * width + j) * 4)
                if variant.cache.eight:
                    sum_ = multiply(sum_, fill(op.value_scale))
                store_result(variant, op, step.buffers[ATTENDED], first + i * size + d + j, sum_)
