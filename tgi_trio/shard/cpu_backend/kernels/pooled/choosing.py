"""An index of blocks with one key each: the scores of blocks, the best of them, for all heads.

A score is the sum over heads of the positive part of query . key, 16 heads to a vector; four blocks
are scored at a time. A score is summed in one order, so a token has the same choice at any load.
Work is shared as in `kernels/index/choosing.py`, and what is chosen is listed as in
`kernels/blocks/`, with the tokens since the last whole block.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import greater, lesser
from tgi_trio.shard.cpu_backend.kernels.attention import seen_tokens
from tgi_trio.shard.cpu_backend.kernels.blocks.attending import attend_blocks
from tgi_trio.shard.cpu_backend.kernels.index.choosing import list_best
from tgi_trio.shard.cpu_backend.kernels.linked_calls import blocks_at, operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.norm import BLOCK
from tgi_trio.shard.cpu_backend.kernels.pooled.keys import ask, pool, slot_of
from tgi_trio.shard.cpu_backend.kernels.pooled.runs import ask_runs, pool_run
from tgi_trio.shard.cpu_backend.kernels.threads import atomic_add
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    load_float,
    load_int,
    load_stored,
    maximum,
    multiply,
    prefetch,
    store,
    store_float,
    store_int,
    total,
)
from tgi_trio.shard.cpu_backend.scratch_memory import INDEX_COUNTS, MOST_SHARED
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

ASK, POOL, SCORE, CHOOSE = (
    int(code) for code in (Code.ASK_POOLED, Code.POOL_KEYS, Code.SCORE_POOLED, Code.CHOOSE_POOLED)
)
ASK_RUNS, POOL_RUNS = int(Code.ASK_RUNS), int(Code.POOL_RUNS)
ASKED, SCORES, CHOICE, PROJECTED = (
    int(b) for b in (Buffer.ASKED, Buffer.SCORES, Buffer.CHOICE, Buffer.PROJECTED)
)
_CHUNK = 256  # blocks that a thread scores at a time
_AT_ONCE = 4


@entry
def run_pooled(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation."""
    step, op = step_at(step_address), operation_at(op_address)
    blocks = blocks_at(op.facts)
    if op.code == ASK:
        for t in range(rank, step.tokens, step.threads):
            ask(variant, step, op, blocks, t, scratch)
    elif op.code == POOL:
        for t in range(rank, step.tokens, step.threads):
            pool(variant, step, op, blocks, t, scratch)
    elif op.code == ASK_RUNS:
        for t in range(rank, step.tokens, step.threads):
            ask_runs(variant, step, op, blocks, t)
    elif op.code == POOL_RUNS:
        for t in range(rank, step.tokens, step.threads):
            pool_run(variant, step, op, blocks, t)
    elif op.code == SCORE or op.code == CHOOSE:
        choose(variant, step, op, blocks, counter, scratch)
    else:
        attend_blocks(variant, step, op, blocks, counter, scratch)


@kernel
def choose(variant, step, op, blocks, counter, scratch):
    """Score the blocks of tokens that see more than `most`; CHOOSE lists the best in CHOICE.

    `scratch`: as `find_pooled_room` in `operations/pooled.py` counts it.
    """
    shared, items = step.tokens <= MOST_SHARED, step.tokens
    if op.code == SCORE:
        items = step.tokens * count_chunks(step, op, blocks) if shared else np.int64(0)
    item = items - 1 - atomic_add(counter, 1)
    while item >= 0:
        token, chunk = item % step.tokens, item // step.tokens
        seen = seen_tokens(step, op, token)
        if seen > op.most:
            begin, end = np.int64(0), seen // blocks.size
            room = scratch + 4 * _AT_ONCE * op.head_dim
            scores = room + INDEX_COUNTS + 4 * blocks.most
            if shared:
                scores = step.buffers[SCORES] + token * scores_stride(step, blocks)
            if op.code == SCORE:
                begin, end = chunk * _CHUNK, lesser(end, (chunk + 1) * _CHUNK)
            elif shared:
                begin = end
            score_keys(variant, step, op, blocks, token, begin, end, scores, scratch)
            if op.code == CHOOSE:
                list_choices(step, blocks, token, seen, scores, room)
        item = items - 1 - atomic_add(counter, 1)


@kernel
def count_chunks(step, op, blocks):
    """Return the chunks of blocks in the longest context of a step."""
    seen = np.int64(0)
    for t in range(step.tokens):
        seen = greater(seen, seen_tokens(step, op, t))
    return (seen // blocks.size + _CHUNK - 1) // _CHUNK


@kernel
def scores_stride(step, blocks):
    """Return the bytes of a token's scores, as `count_unit_bytes` does."""
    return (step.scores_bytes // (4 * blocks.size) + LANES) * 4


@kernel
def score_keys(variant, step, op, blocks, token, begin, end, scores, keys):
    """scores[block] = sum over heads of max(0, query . key), times their weights if they have some,
    for whole blocks from begin to end.

    `keys`: room for four keys, float32. NaN counts as 0. Behind the last block it is scored again.
    """
    size, row = 4 * op.head_dim, blocks.kept * variant.cache.bytes
    weights = step.buffers[PROJECTED] + (token * blocks.weights_width + blocks.weights) * 4
    vectors = (op.heads + LANES - 1) // LANES
    queries = step.buffers[ASKED] + token * vectors * LANES * size
    for block in range(begin, end, _AT_ONCE):
        for i in range(_AT_ONCE):
            last = lesser(block + i, end - 1) * blocks.size + blocks.size - 1
            key = op.keys + slot_of(step, token, last) * row
            following = lesser(block + i + _AT_ONCE, end - 1) * blocks.size + blocks.size - 1
            ahead = op.keys + slot_of(step, token, following) * row
            for d in range(0, op.head_dim, LANES):
                prefetch(ahead + d * variant.cache.bytes)
                value = load_stored(variant.cache, key + d * variant.cache.bytes)
                store(keys + i * size + 4 * d, value)
        found_a = found_b = found_c = found_d = np.float32(0.0)
        for vector in range(vectors):
            asked = queries + vector * LANES * size
            a, b, c, d = fill(0.0), fill(0.0), fill(0.0), fill(0.0)
            for i in range(0, size, 4):
                query = load(asked + LANES * i)
                a = fma(query, fill(load_float(keys + i)), a)
                b = fma(query, fill(load_float(keys + size + i)), b)
                c = fma(query, fill(load_float(keys + 2 * size + i)), c)
                d = fma(query, fill(load_float(keys + 3 * size + i)), d)
            shares = load(weights + 4 * LANES * vector) if blocks.weights else fill(1.0)
            found_a += positive_part(a, shares)
            found_b += positive_part(b, shares)
            found_c += positive_part(c, shares)
            found_d += positive_part(d, shares)
        store_float(scores + 4 * block, found_a)
        if block + 1 < end:
            store_float(scores + 4 * block + 4, found_b)
        if block + 2 < end:
            store_float(scores + 4 * block + 8, found_c)
        if block + 3 < end:
            store_float(scores + 4 * block + 12, found_d)


@kernel
def positive_part(products, shares):
    """Return the weighted sum of the positive ones of 16 products, which is no negative zero."""
    return total(add(multiply(maximum(products, fill(0.0)), shares), fill(0.0)))


@kernel
def list_choices(step, blocks, token, seen, scores, room):
    """List the best blocks and the tokens since the last whole one, ascending, as pairs of a KV
    block of the context and a mask of its tokens. `room`: counts of buckets, then a list.
    """
    whole, chosen = seen // blocks.size, room + INDEX_COUNTS
    list_best(scores, whole, blocks.most, room, chosen)
    target, listed, last = (
        step.buffers[CHOICE] + token * blocks.choice_bytes,
        np.int64(0),
        np.int64(-1),
    )
    for i in range(blocks.most + 1):
        begin, end = whole * blocks.size, seen
        if i < blocks.most:
            begin = load_int(chosen + 4 * i) * blocks.size
            end = begin + blocks.size
        for block in range(begin // BLOCK, (end + BLOCK - 1) // BLOCK):
            first, behind = greater(begin - block * BLOCK, 0), lesser(end - block * BLOCK, BLOCK)
            mask = (1 << behind) - (1 << first)
            if block == last:
                mask |= load_int(target + 8 * listed + 4)
            else:
                listed += 1
                last = block
                store_int(target + 8 * listed, block)
            store_int(target + 8 * listed + 4, mask)
    store_int(target, listed)
