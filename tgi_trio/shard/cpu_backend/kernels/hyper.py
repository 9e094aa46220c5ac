"""Several hidden states of a token, each part of a layer between a sum of them and all of them.

They are those of `torch_backend/layers/streams/hyper_connections.py`, without a mixture. A row of
STREAMS holds all of a token's states; the sum that a part reads is in HIDDEN, and what it says
comes from BRANCH.
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.activation import sigmoid_times
from tgi_trio.shard.cpu_backend.kernels.arrays import lesser
from tgi_trio.shard.cpu_backend.kernels.linked_calls import hyper_at, operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.norm import inverse_deviation
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    largest,
    load,
    load_float,
    store,
    store_float,
    total,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

HIDDEN, BRANCH, STREAMS, SHARES = (
    int(b) for b in (Buffer.HIDDEN, Buffer.BRANCH, Buffer.STREAMS, Buffer.SHARES)
)
FORK, GATHER = int(Code.FORK), int(Code.GATHER)


@entry
def run_hyper(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation; every thread has its own tokens."""
    step, op = step_at(step_address), operation_at(op_address)
    hyper = hyper_at(op.facts)
    for t in range(rank, step.tokens, step.threads):
        hidden, branch, streams, shares = rows_of(step, op, hyper, t)
        if op.code == FORK:
            fork_row(op, hyper, hidden, streams)
        elif op.code == GATHER:
            gather_row(op, hyper, hidden, streams, shares)
        else:
            scatter_row(op, hyper, branch, streams, shares)


@kernel
def rows_of(step, op, hyper, t):
    """Return where a token's rows are: what a part reads, what it said, all states, weights."""
    size = op.width * 4
    streams = step.buffers[STREAMS] + t * hyper.count * size
    hidden, branch = step.buffers[HIDDEN] + t * size, step.buffers[BRANCH] + t * size
    return hidden, branch, streams, step.buffers[SHARES] + t * PANEL * 4


@kernel
def fork_row(op, hyper, hidden, streams):
    """Copy what is embedded to all states."""
    for first in range(0, hyper.count * op.width * 4, op.width * 4):
        for i in range(0, 4 * op.width, 4 * LANES):
            store(streams + first + i, load(hidden + i))


@kernel
def gather_row(op, hyper, hidden, streams, shares):
    """hidden = weighted sum of the states; weights of what follows go to `shares`.

    Both are sigmoids of products with all states, which are normalised together.
    """
    width = hyper.count * op.width
    factor = inverse_deviation(streams, width, 0.0, op.eps)
    for number in range(hyper.weights):
        row = hyper.mix + number * width * 4
        sums, others = fill(0.0), fill(0.0)
        for i in range(0, 4 * width, 8 * LANES):
            sums = fma(load(streams + i), load(row + i), sums)
            others = fma(load(streams + i + 4 * LANES), load(row + i + 4 * LANES), others)
        scale = load_float(hyper.scales + lesser(number // hyper.count, 2) * 4)
        value = total(add(sums, others)) * factor * scale + load_float(hyper.bases + 4 * number)
        store_share(hyper, shares, number, value)
    for i in range(0, 4 * op.width, 4 * LANES):
        sums = fill(0.0)
        for stream in range(hyper.count):
            share = fill(load_float(shares + 4 * stream))
            sums = fma(load(streams + stream * op.width * 4 + i), share, sums)
        store(hidden + i, sums)


@kernel
def store_share(hyper, shares, number, value):
    """Write a weight: of what is read, or of the result; or of a mixture, which is raw."""
    if number >= 2 * hyper.count:
        store_float(shares + 4 * number, value)
        return
    most, least = hyper.added, hyper.added_eps
    if number < hyper.count:
        most, least = hyper.read, hyper.read_eps
    store_float(shares + 4 * number, largest(sigmoid_times(fill(most), fill(value))) + least)


@kernel
def scatter_row(op, hyper, branch, streams, shares):
    """Add the result of a part to each state, times its weight."""
    for stream in range(hyper.count):
        state = streams + stream * op.width * 4
        share = fill(load_float(shares + 4 * (hyper.count + stream)) * op.scale)
        for i in range(0, 4 * op.width, 4 * LANES):
            store(state + i, fma(load(branch + i), share, load(state + i)))
