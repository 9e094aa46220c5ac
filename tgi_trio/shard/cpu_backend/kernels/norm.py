"""Embeddings, norms and rotary positions: the cheap parts of a step, by row or by head."""

from __future__ import annotations

import math

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_forms
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    copy_word,
    divide,
    fill,
    fma,
    load,
    load_float,
    load_int,
    load_stored,
    multiply,
    store,
    store_query,
    store_stored,
    subtract,
    total,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Epilogue
from tgi_trio.shard.cpu_backend.weight_layout import LANES

ADD, QKV, QUERY = int(Epilogue.ADD), int(Buffer.QKV), int(Buffer.QUERY)
BLOCK = 16  # tokens of a KV block: one vector of scores


@kernel
def embed(variant, rank, step, op):
    """hidden[t] = embedding[token t] * scale."""
    scale = fill(op.scale)
    for t in range(rank, step.tokens, step.threads):
        source = op.weights + load_int(step.token_ids + 4 * t) * op.width * variant.kv.bytes
        target = step.buffers[op.target] + t * op.width * 4
        for i in range(0, op.width, LANES):
            value = load_stored(variant.kv, source + i * variant.kv.bytes)
            store(target + 4 * i, multiply(value, scale))


@kernel
def inverse_deviation(x, size, mean, eps):
    """Return 1 / sqrt(mean((x - mean)^2) + eps)."""
    squares, centre = fill(0.0), fill(mean)
    for i in range(0, size, LANES):
        value = subtract(load(x + 4 * i), centre)
        squares = fma(value, value, squares)
    return 1.0 / math.sqrt(total(squares) / size + eps)


@kernel
def norm(variant, rank, step, op):
    """RMSNorm or LayerNorm of every row, or of the wanted rows, which are gathered."""
    size = op.inputs
    for row in range(rank, step.wanted if op.wanted_only else step.tokens, step.threads):
        place = load_int(step.wanted_ids + 4 * row) if op.wanted_only else row
        source = step.buffers[op.source] + place * size * 4
        mean = 0.0
        if op.centred:
            sums = fill(0.0)
            for i in range(0, size, LANES):
                sums = add(sums, load(source + 4 * i))
            mean = total(sums) / size
        centre = fill(mean)
        factor = fill(inverse_deviation(source, size, mean, op.eps))
        for i in range(0, size, 2 * LANES):
            first = normed(op, source, i, centre, factor)
            second = normed(op, source, i + LANES, centre, factor)
            if op.epilogue == ADD:
                target, scale = step.buffers[op.target] + (row * size + i) * 4, fill(op.scale)
                store(target, fma(first, scale, load(target)))
                target += 4 * LANES
                store(target, fma(second, scale, load(target)))
            else:
                store_forms(variant, step, op, row * size + i, first, second)


@kernel
def normed(op, source, i, centre, factor):
    """Return 16 normalised features of a row, from `i` on."""
    value = multiply(subtract(load(source + 4 * i), centre), factor)
    if op.weights:
        value = multiply(value, load(op.weights + 4 * i))
    if op.bias:
        value = add(value, load(op.bias + 4 * i))
    return value


@kernel
def turning_row(step, op, t, axis):
    """Return the offset of a token's cosines and sines, for its position on an axis."""
    return load_int(step.turns + axis * step.turn_stride + 4 * t) * (op.rotated // 2) * 4


@kernel
def gather_angles(step, op, t, target):
    """Gather the cosines of a token with three positions (M-RoPE), then its sines."""
    size = op.rotated // 2 * 4
    for i in range(0, size, 4):
        row = turning_row(step, op, t, load_int(op.axes + i))
        copy_word(target + i, op.cosines + row + i)
        copy_word(target + size + i, op.sines + row + i)


@kernel
def turn_head(x, size, weights, op, cosines, sines):
    """Normalise one head [size] in place if it has norm weights, then rotate it; the other way
    round with `norm_last`.
    """
    for stage in range(2):
        if stage != op.norm_last:
            turn(x, op, cosines, sines)
        elif weights:
            factor = fill(inverse_deviation(x, size, 0.0, op.eps))
            for i in range(0, size, LANES):
                store(x + 4 * i, multiply(multiply(load(x + 4 * i), factor), load(weights + 4 * i)))


@kernel
def turn(x, op, cosines, sines):
    """Rotate one head in place (RoPE): dimensions i and i + rotated / 2 are a point in a plane,
    rotated by position * frequency i.
    """
    half = op.rotated // 2
    for i in range(0, 4 * half, 4 * LANES):
        cosine, sine = load(cosines + i), load(sines + i)
        a, b = load(x + i), load(x + 4 * half + i)
        store(x + i, subtract(multiply(a, cosine), multiply(b, sine)))
        store(x + 4 * half + i, fma(a, sine, multiply(b, cosine)))


@kernel
def rotate(variant, rank, step, op, scratch):
    """Rotate queries and keys; write queries, scaled, to QUERY, and K and V to the cache.

    K of a block is [head_dim / step, 16 tokens, step], so that scores of 16 tokens are summed like
    a panel of a linear layer; V is [16 tokens, value_dim]. 8-bit K and V are divided by their
    scales; the queries' scale includes the scale of K.
    """
    size, kv_heads = op.head_dim, op.kv_heads
    group = op.heads // kv_heads
    for item in range(rank, step.tokens * kv_heads, step.threads):
        t, kv_head = item // kv_heads, item % kv_heads
        scale = query_factor(step, op, t)
        row = turning_row(step, op, t, 0)
        cosines, sines = op.cosines + row, op.sines + row
        if op.axes and step.turn_stride:
            cosines = scratch + 4 * size  # after the room of one key
            sines = cosines + 2 * op.rotated
            gather_angles(step, op, t, cosines)
        qkv = step.buffers[QKV] + t * op.width * 4
        for head in range(kv_head * group, (kv_head + 1) * group):
            query = qkv + head * size * 4
            turn_head(query, size, op.query_norm, op, cosines, sines)
            target = step.buffers[QUERY] + (t * op.heads + head) * size * variant.query_bytes
            for i in range(0, size, LANES):
                value = multiply(load(query + 4 * i), scale)
                store_query(variant, target + i * variant.query_bytes, value)
        if op.reads_only:
            continue
        key = qkv + (op.heads + kv_head) * size * 4
        value = qkv + ((op.heads + kv_heads) * size + kv_head * op.value_dim) * 4
        if op.keys_as_values:
            value = scratch + 8 * size
            for i in range(0, 4 * size, 4 * LANES):
                store(value + i, load(key + i))
        make_value(op, value)
        turn_head(key, size, op.key_norm, op, cosines, sines)
        store_key_and_value(variant, step, op, t, kv_head, key, value, scratch)


@kernel
def make_value(op, value):
    """Normalise a value [value_dim] in place, and scale it."""
    if op.value_norm or op.value_factor != 1.0:
        factor = fill(op.value_factor)
        if op.value_norm:
            norm = inverse_deviation(value, op.value_dim, 0.0, op.eps)
            factor = multiply(factor, fill(norm))
        for i in range(0, op.value_dim, LANES):
            store(value + 4 * i, multiply(load(value + 4 * i), factor))


@kernel
def query_factor(step, op, t):
    """Return the factor of a token's queries."""
    factor = fill(op.scale)
    if op.query_scales:
        position = load_int(step.positions + 4 * t)
        factor = multiply(factor, fill(load_float(op.query_scales + 4 * position)))
    return factor


@kernel
def head_factor(step, op, t, head):
    """Return the factor of one head's query by the logarithm of its position, 1 without any."""
    if not op.log_scales:
        return np.float32(1.0)
    log = load_float(op.logs + 4 * load_int(step.positions + 4 * t))
    return load_float(op.log_scales + 8 * head) * log + load_float(op.log_scales + 8 * head + 4)


@kernel
def store_key_and_value(variant, step, op, t, kv_head, key, value, scratch):
    """Write a head's key and value, float32, to the cache; `scratch`: room for one key."""
    value_size, stored = op.value_dim, variant.cache.bytes
    slot = load_int(step.slots + 4 * t)
    block, place = ((slot // BLOCK) * op.kv_heads + kv_head) * BLOCK * stored, slot % BLOCK
    store_key(variant, op, op.keys + block * op.head_dim, place, key, scratch)
    values = op.values + block * value_size + place * value_size * stored
    for i in range(0, value_size, LANES):
        v = load(value + 4 * i)
        if variant.cache.eight:
            v = divide(v, fill(op.value_scale))
        store_stored(variant.cache, values + i * stored, v)


@kernel
def store_key(variant, op, keys, place, key, scratch):
    """Write a key, float32 [head_dim], to its `place` in a block of 16; `scratch`: room for it."""
    size, stored = op.head_dim, variant.cache.bytes
    for i in range(0, size, LANES):
        k = load(key + 4 * i)
        if variant.cache.eight:
            k = divide(k, fill(op.key_scale))
        store_stored(variant.cache, scratch + i * stored, k)
    for i in range(size // variant.cache.step):
        copy_word(keys + (i * BLOCK + place) * 4, scratch + 4 * i)
