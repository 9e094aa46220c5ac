"""Several hidden states (streams) of a token, of which layers compute one (AltUp).

They are those of `torch_backend/layers/streams/alternating_updates.py`. A row of STREAMS holds all
of a token's streams; the one that layers compute is in HIDDEN as well.
"""

from __future__ import annotations

import math

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.activation import apply_soft_cap
from tgi_trio.shard.cpu_backend.kernels.arrays import floats_at, greater
from tgi_trio.shard.cpu_backend.kernels.linked_calls import operation_at, step_at, streams_at
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    multiply,
    store,
    subtract,
    total,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

HIDDEN, BRANCH, ROUTED, STREAMS = (
    int(b) for b in (Buffer.HIDDEN, Buffer.BRANCH, Buffer.ROUTED, Buffer.STREAMS)
)
SPLIT, PREDICT, CORRECT, SPREAD = (
    int(code) for code in (Code.SPLIT, Code.PREDICT, Code.CORRECT, Code.SPREAD)
)
_LEAST = 1e-5  # the smallest mean square whose root divides


@entry
def run_streams(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation; every thread has its own tokens."""
    step, op = step_at(step_address), operation_at(op_address)
    for t in range(rank, step.tokens, step.threads):
        if op.code == SPLIT:
            split_row(step, op, t)
        elif op.code == PREDICT:
            predict_row(step, op, t, scratch)
        elif op.code == CORRECT:
            correct_row(step, op, t, scratch)
        elif op.code == SPREAD:
            spread_row(step, op, t)
        else:
            merge_row(step, op, t)


@kernel
def split_row(step, op, t):
    """Scale the projected streams to the magnitude of hidden[t], which is the first stream."""
    facts, size = streams_at(op.facts), op.width
    hidden = step.buffers[HIDDEN] + t * size * 4
    first = step.buffers[STREAMS] + t * facts.count * size * 4
    wanted = mean_square(hidden, size)
    for i in range(0, 4 * size, 4 * LANES):
        store(first + i, load(hidden + i))
    for stream in range(1, facts.count):
        row = first + stream * size * 4
        factor = fill(growth(row, size, wanted))
        for i in range(0, 4 * size, 4 * LANES):
            store(row + i, multiply(load(row + i), factor))
    show(facts, hidden, first, size)


@kernel
def merge_row(step, op, t):
    """hidden[t] = the mean of the streams, each scaled to the magnitude of the first."""
    facts, size = streams_at(op.facts), op.width
    hidden = step.buffers[HIDDEN] + t * size * 4
    first = step.buffers[STREAMS] + t * facts.count * size * 4
    wanted, part = mean_square(first, size), 1.0 / facts.count
    for stream in range(facts.count):
        row, factor = first + stream * size * 4, fill(part)
        if stream > 0:
            factor = fill(growth(row, size, wanted) * part)
        for i in range(0, 4 * size, 4 * LANES):
            value = multiply(load(row + i), factor)
            if stream > 0:
                value = add(value, load(hidden + i))
            store(hidden + i, value)


@kernel
def predict_row(step, op, t, scratch):
    """Add to each stream its prediction: the router's combination of all streams.

    `scratch`: room for a weight of each pair of streams, and a vector of each stream.
    """
    facts, size = streams_at(op.facts), op.width
    count = facts.count
    first = step.buffers[STREAMS] + t * count * size * 4
    weigh(step, op, facts, t, count * count, scratch)
    weights, sums = floats_at(scratch, count * count), scratch + 4 * LANES * count
    for i in range(0, 4 * size, 4 * LANES):
        for a in range(count):
            sum_ = load(first + a * size * 4 + i)
            for b in range(count):
                sum_ = fma(load(first + b * size * 4 + i), fill(weights[a * count + b]), sum_)
            store(sums + 4 * LANES * a, sum_)
        for a in range(count):
            store(first + a * size * 4 + i, load(sums + 4 * LANES * a))
    show(facts, step.buffers[HIDDEN] + t * size * 4, first, size)


@kernel
def correct_row(step, op, t, scratch):
    """Add to each stream its share of hidden[t]'s difference from its prediction; then hidden[t] is
    the input of the layer's own embeddings. `scratch`: room for a weight of each stream.
    """
    facts, size = streams_at(op.facts), op.width
    count = facts.count
    hidden = step.buffers[HIDDEN] + t * size * 4
    first = step.buffers[STREAMS] + t * count * size * 4
    weigh(step, op, facts, t, count, scratch)
    weights, active = floats_at(scratch, count), facts.active * size * 4
    for i in range(0, 4 * size, 4 * LANES):
        missed = subtract(load(hidden + i), load(first + active + i))
        for a in range(count):
            row = first + a * size * 4 + i
            store(row, fma(missed, fill(weights[a] + 1.0), load(row)))
        value = load(first + active + i)
        if facts.scale:
            value = multiply(value, load(facts.scale + i))
        store(hidden + i, value)


@kernel
def spread_row(step, op, t):
    """Add branch[t] to all streams but the first."""
    facts, size = streams_at(op.facts), op.width
    branch = step.buffers[BRANCH] + t * size * 4
    first = step.buffers[STREAMS] + t * facts.count * size * 4
    for stream in range(1, facts.count):
        row = first + stream * size * 4
        for i in range(0, 4 * size, 4 * LANES):
            store(row + i, add(load(row + i), load(branch + i)))
    show(facts, step.buffers[HIDDEN] + t * size * 4, first, size)


@kernel
def weigh(step, op, facts, t, weights, target):
    """Write the weights: `coefficients` [weights, count] times the tanh of a router's results."""
    routes = step.buffers[ROUTED] + t * PANEL * 4
    store(routes, apply_soft_cap(load(routes), 1.0))
    given, found = floats_at(routes, facts.count), floats_at(target, weights)
    coefficients = floats_at(facts.coefficients, weights * facts.count)
    for i in range(weights):
        found[i] = 0.0
        for j in range(facts.count):
            found[i] += coefficients[i * facts.count + j] * given[j]


@kernel
def show(facts, hidden, first, size):
    """Copy the stream that layers compute to `hidden`."""
    row = first + facts.active * size * 4
    for i in range(0, 4 * size, 4 * LANES):
        store(hidden + i, load(row + i))


@kernel
def growth(row, size, wanted):
    """Return the factor that makes the mean square of a row `wanted`."""
    return math.sqrt(wanted / greater(mean_square(row, size), _LEAST))


@kernel
def mean_square(row, size):
    squares = fill(0.0)
    for i in range(0, 4 * size, 4 * LANES):
        squares = fma(load(row + i), load(row + i), squares)
    return total(squares) / size
