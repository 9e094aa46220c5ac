"""Embeddings of n-grams: hashes of a token and those before it choose rows of a table.

They are those of `torch_backend/states/ngrams_layer.py`. Between LOOK_UP and WEIGH a linear layer
makes a key for each hidden state, and one value. A sequence's last tokens and the last inputs of
the convolution are states in slots, as in `states/`: rows are the same to the bit wherever a
sequence's chunks end.
"""

from __future__ import annotations

import math

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.activation import sigmoid_times
from tgi_trio.shard.cpu_backend.kernels.arrays import greater, ints_at
from tgi_trio.shard.cpu_backend.kernels.linked_calls import ngrams_at, operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.norm import inverse_deviation
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_forms
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    load_int,
    load_stored,
    multiply,
    prefetch,
    store,
    store_int,
    total,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

HASH, LOOK_UP, WEIGH = int(Code.HASH), int(Code.LOOK_UP), int(Code.WEIGH)
FOUND, PROJECTED, STREAMS = int(Buffer.FOUND), int(Buffer.PROJECTED), int(Buffer.STREAMS)
_LEAST = 1e-6  # least size of a product whose root is taken
_VECTOR = 4 * LANES  # bytes


@entry
def run_ngrams(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation: its sequences, its tokens or its channels."""
    step, op = step_at(step_address), operation_at(op_address)
    ngrams = ngrams_at(op.facts)
    if op.code == HASH:
        for row in range(rank, step.row_count, step.threads):
            hash_row(step, op, ngrams, row, scratch)
    elif op.code == LOOK_UP:
        for t in range(rank, step.tokens, step.threads):
            look_up(variant, step, op, ngrams, t, scratch)
    elif op.code == WEIGH:
        for t in range(rank, step.tokens, step.threads):
            weigh(step, op, ngrams, t)
    else:
        vectors = ngrams.count * op.width // LANES
        for row in range(step.row_count):
            for i in range(vectors * rank // step.threads, vectors * (rank + 1) // step.threads):
                spread_out(step, op, ngrams, row, i * LANES, scratch)


@kernel
def hash_row(step, op, ngrams, row, window):
    """found[t, head] = the row of the table for each token of a sequence; the last tokens become
    its state. `window`: room for those before the first, oldest first.
    """
    before, each = ngrams.order - 1, ngrams.heads // (ngrams.order - 1)
    slot = load_int(step.state_reads + 4 * row)
    for i in range(0, 4 * before, 4):
        token = np.int64(ngrams.end)
        if slot >= 0:
            token = load_int(op.states + slot * op.state_bytes + i)
        store_int(window + i, token)
    factors, rows = ints_at(ngrams.factors, ngrams.order), ints_at(ngrams.rows, ngrams.heads)
    firsts = ints_at(ngrams.firsts, ngrams.heads)
    found = ints_at(step.buffers[FOUND], step.tokens * ngrams.heads)
    first, end = load_int(step.row_starts + 4 * row), load_int(step.row_starts + 4 * row + 4)
    for t in range(first, end):
        hashed, ended = load_int(step.token_ids + 4 * t) * factors[0], False
        for back in range(1, ngrams.order):
            token = token_at(step, window, before, first, t - back)
            ended = ended or token == ngrams.end
            if ended:  # n-grams do not reach over the end of a text
                token = np.int64(ngrams.end)
            hashed ^= token * factors[back]
            for head in range((back - 1) * each, back * each):
                found[t * ngrams.heads + head] = hashed % rows[head] + firsts[head]
    target = op.states + load_int(step.state_writes + 4 * row) * op.state_bytes
    for i in range(before):
        store_int(target + 4 * i, token_at(step, window, before, first, end - before + i))


@kernel
def token_at(step, window, before, first, t):
    """Return token t of a step; those before the `first` of its sequence are in `window`."""
    if t < first:
        return load_int(window + 4 * (before + t - first))
    return load_int(step.token_ids + 4 * t)


@kernel
def look_up(variant, step, op, ngrams, t, scratch):
    """target[t] = the rows of the table that the token's hashes chose, one behind the other.

    `scratch`: room for all of them, float32.
    """
    size, stored = ngrams.size, ngrams.size * variant.kv.bytes
    found = ints_at(step.buffers[FOUND] + 8 * t * ngrams.heads, ngrams.heads)
    for head in range(ngrams.heads):
        row = row_at(ngrams, found[head], stored)
        for i in range(0, stored, 64):
            prefetch(row + i)
    for head in range(ngrams.heads):
        row = row_at(ngrams, found[head], stored)
        for i in range(0, size, LANES):
            value = load_stored(variant.kv, row + i * variant.kv.bytes)
            store(scratch + 4 * (head * size + i), value)
    for i in range(0, op.width, 2 * LANES):
        first, second = load(scratch + 4 * i), load(scratch + 4 * i + _VECTOR)
        store_forms(variant, step, op, t * op.width + i, first, second)


@kernel
def row_at(ngrams, row, stored):
    """Return the address of a row of the table, of `stored` bytes."""
    part = row // ngrams.part_rows
    begin = ints_at(ngrams.parts + 8 * part, 1)
    return begin[0] + row % ngrams.part_rows * stored


@kernel
def weigh(step, op, ngrams, t):
    """Multiply the value by a gate for each hidden state, and add it to that; its norm takes the
    place of the state's key.

    A gate is the sigmoid of the root of key . state, both normalised, with the product's sign.
    """
    size = 4 * op.width
    keys = step.buffers[PROJECTED] + t * op.inputs * 4
    value, streams = keys + ngrams.count * size, step.buffers[STREAMS] + t * ngrams.count * size
    for place in range(0, ngrams.count * size, size):
        key, stream, sums = keys + place, streams + place, fill(0.0)
        for i in range(0, size, _VECTOR):
            one = multiply(load(key + i), load(ngrams.key_norm + place + i))
            other = multiply(load(stream + i), load(ngrams.query_norm + place + i))
            sums = fma(one, other, sums)
        product = total(sums) * inverse_deviation(key, op.width, 0.0, op.eps)
        product *= inverse_deviation(stream, op.width, 0.0, op.eps) / math.sqrt(op.width)
        root = math.sqrt(greater(abs(product), _LEAST))
        if product < 0.0:
            root = -root
        elif product == 0.0:
            root = 0.0
        gate = sigmoid_times(fill(1.0), fill(root))
        for i in range(0, size, _VECTOR):
            gated = multiply(gate, load(value + i))
            store(key + i, gated)
            store(stream + i, add(load(stream + i), gated))
        factor = fill(inverse_deviation(key, op.width, 0.0, op.eps))
        for i in range(0, size, _VECTOR):
            normed = multiply(load(key + i), factor)
            store(key + i, multiply(normed, load(ngrams.kernel_norm + place + i)))


@kernel
def spread_out(step, op, ngrams, row, channel, window):
    """Add the SiLU of a convolution over every `order`-th token to 16 channels of all hidden states
    of a sequence's tokens; the last inputs become its state. `window`: room for those before.
    """
    before, channels = (ngrams.taps - 1) * ngrams.order, ngrams.count * op.width
    slot = load_int(step.state_reads + 4 * row)
    tail = op.states + slot * op.state_bytes + channel * before * 4
    for k in range(0, _VECTOR * before, _VECTOR):
        value = fill(0.0)
        if slot >= 0:
            value = load(tail + k)
        store(window + k, value)
    weights, inputs = ngrams.kernel + 4 * channel * ngrams.taps, step.buffers[PROJECTED]
    inputs += 4 * channel
    first, end = load_int(step.row_starts + 4 * row), load_int(step.row_starts + 4 * row + 4)
    for t in range(first, end):
        sums = fill(0.0)
        for tap in range(ngrams.taps):
            back = t - (ngrams.taps - 1 - tap) * ngrams.order
            value = load(input_at(op, window, before, first, back, inputs))
            sums = fma(value, load(weights + _VECTOR * tap), sums)
        stream = step.buffers[STREAMS] + (t * channels + channel) * 4
        store(stream, add(load(stream), sigmoid_times(sums, sums)))
    slot = load_int(step.state_writes + 4 * row)
    tail = op.states + slot * op.state_bytes + channel * before * 4
    for k in range(before):
        place = input_at(op, window, before, first, end - before + k, inputs)
        store(tail + _VECTOR * k, load(place))


@kernel
def input_at(op, window, before, first, t, inputs):
    """Return where 16 inputs of token t are: those before the `first` of a sequence in `window`."""
    if t < first:
        return window + _VECTOR * (before + t - first)
    return inputs + t * op.inputs * 4
