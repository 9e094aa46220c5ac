"""Scores of query heads with two blocks of keys, all heads at once or as many as registers hold.

With 32 registers of 64 bytes the sums of all heads of a tile and both blocks stay in registers.
With 16 of 32 bytes those of two heads do; more heads pass over a block four at a time, which is in
the nearest cache by then. A head's sum is added up in one order in all tiles.
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.tiles import multiply_add, store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import prefetch

_LINE = 64


@kernel
def score_pair(variant, rows, fetches, op, a, b, ahead_a, ahead_b, query, scores, stride):
    """scores[rows, 32] = query[rows] . keys of two blocks, panels at `a` and `b`.

    `fetches`: 1: meanwhile the blocks at `ahead_a` and `ahead_b` are prefetched; 0: none is.
    """
    if number(rows) <= variant.paired_rows:
        score_both(variant, rows, fetches, op, a, b, ahead_a, ahead_b, query, scores, stride)
    else:
        for _ in range(number(rows) // 4):
            score_each(
                variant, count(4), fetches, op, a, b, ahead_a, ahead_b, query, scores, stride
            )
            query += 4 * op.head_dim * variant.query_bytes
            scores += 4 * stride
        rest = count(number(rows) % 4)
        if number(rest) == 3:
            score_each(variant, rest, fetches, op, a, b, ahead_a, ahead_b, query, scores, stride)
        elif number(rest) > 0:
            score_both(variant, rest, fetches, op, a, b, ahead_a, ahead_b, query, scores, stride)


@kernel
def score_both(variant, rows, fetches, op, a, b, ahead_a, ahead_b, query, scores, stride):
    """Do so with all rows and both blocks in one pass."""
    one, query_bytes = count(1), op.head_dim * variant.query_bytes
    tile_a, tile_b, x = zeros(rows, one), zeros(rows, one), query
    for i in range(0, op.head_dim // variant.cache.step * _LINE, _LINE):
        if number(fetches):
            prefetch(ahead_a + i)
            prefetch(ahead_b + i)
        tile_a = multiply_add(variant.cache, rows, one, one, tile_a, a + i, x, query_bytes)
        tile_b = multiply_add(variant.cache, rows, one, one, tile_b, b + i, x, query_bytes)
        x += variant.cache.step_bytes
    store_tile(rows, one, tile_a, scores, stride)
    store_tile(rows, one, tile_b, scores + _LINE, stride)


@kernel
def score_each(variant, rows, fetches, op, a, b, ahead_a, ahead_b, query, scores, stride):
    """Do so with one block after the other."""
    score_one(variant, rows, fetches, op, a, ahead_a, query, scores, stride)
    score_one(variant, rows, fetches, op, b, ahead_b, query, scores + _LINE, stride)


@kernel
def score_one(variant, rows, fetches, op, keys, ahead, query, scores, stride):
    """scores[rows, 16] = query[rows] . keys of a block."""
    one, query_bytes = count(1), op.head_dim * variant.query_bytes
    tile, x = zeros(rows, one), query
    for i in range(0, op.head_dim // variant.cache.step * _LINE, _LINE):
        if number(fetches):
            prefetch(ahead + i)
        tile = multiply_add(variant.cache, rows, one, one, tile, keys + i, x, query_bytes)
        x += variant.cache.step_bytes
    store_tile(rows, one, tile, scores, stride)
