"""Several hidden states of a token, which every part of a layer mixes as well as it adds to them.

They are those of `torch_backend/layers/streams/hyper_connections.py` with a mixture, whose weights
are made doubly stochastic (Sinkhorn and Knopp). A row of SHARES has them behind the weights of
`hyper.py`.
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import floats_at, greater
from tgi_trio.shard.cpu_backend.kernels.hyper import fork_row, gather_row, rows_of
from tgi_trio.shard.cpu_backend.kernels.linked_calls import hyper_at, operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    largest,
    load,
    load_float,
    multiply,
    store,
    weight,
)
from tgi_trio.shard.cpu_backend.tables import Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

FORK, GATHER, SCATTER = (
    int(code) for code in (Code.FORK_MIXED, Code.GATHER_MIXED, Code.SCATTER_MIXED)
)


@entry
def run_mixed(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation; every thread has its own tokens."""
    step, op = step_at(step_address), operation_at(op_address)
    hyper = hyper_at(op.facts)
    for t in range(rank, step.tokens, step.threads):
        hidden, branch, streams, shares = rows_of(step, op, hyper, t)
        if op.code == FORK:
            fork_row(op, hyper, hidden, streams)
        elif op.code == GATHER:
            gather_row(op, hyper, hidden, streams, shares)
            if hyper.weights > 2 * hyper.count:
                balance(hyper, shares + 8 * hyper.count)
        elif op.code == SCATTER:
            mix_row(op, hyper, branch, streams, shares, scratch)
        else:
            join_row(op, hyper, hidden, streams)


@kernel
def balance(hyper, place):
    """Make weights [count, count], from each state to each, of raw ones: a softmax of what leaves
    each state, then rows and columns that add up to one.
    """
    count, eps = hyper.count, hyper.read_eps
    weights = floats_at(place, count * count)
    for a in range(count):
        most, sum_ = weights[a * count], eps - eps
        for b in range(count):
            most = greater(most, weights[a * count + b])
        for b in range(count):
            weights[a * count + b] = largest(weight(fill(weights[a * count + b] - most)))
            sum_ += weights[a * count + b]
        for b in range(count):
            weights[a * count + b] = weights[a * count + b] / sum_ + eps
    for i in range(2 * hyper.iterations - 1):
        # what enters each state comes first, then turns
        across, along = (count, 1) if i % 2 == 0 else (1, count)
        for a in range(count):
            sum_ = eps
            for b in range(count):
                sum_ += weights[a * along + b * across]
            for b in range(count):
                weights[a * along + b * across] /= sum_


@kernel
def mix_row(op, hyper, branch, streams, shares, scratch):
    """Each state = the sum of all, by their weights, and of a part's result, times its weight.

    `scratch`: a vector of each state.
    """
    count, size = hyper.count, 4 * op.width
    for i in range(0, size, 4 * LANES):
        for to in range(count):
            said = fill(load_float(shares + 4 * (count + to)) * op.scale)
            sums = multiply(load(branch + i), said)
            for of in range(count):
                share = fill(load_float(shares + 4 * (2 * count + of * count + to)))
                sums = fma(load(streams + of * size + i), share, sums)
            store(scratch + 4 * LANES * to, sums)
        for to in range(count):
            store(streams + to * size + i, load(scratch + 4 * LANES * to))


@kernel
def join_row(op, hyper, hidden, streams):
    """hidden = the mean of all states."""
    size, share = 4 * op.width, fill(1.0 / hyper.count)
    for i in range(0, size, 4 * LANES):
        sums = fill(0.0)
        for stream in range(hyper.count):
            sums = add(sums, load(streams + stream * size + i))
        store(hidden + i, multiply(sums, share))
