"""Several hidden states of a token, of which gates let each part of a layer read something.

They are those of `torch_backend/layers/streams/gated_streams.py`. A row of STREAMS holds all of a
token's states. Gates are a product of low rank with all states, each normalised by itself, so
linear layers are between SETTLE and MIX. What a part has said stays in BRANCH until the next
SETTLE.
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.activation import sigmoid_times
from tgi_trio.shard.cpu_backend.kernels.linked_calls import gated_at, operation_at, step_at
from tgi_trio.shard.cpu_backend.kernels.norm import inverse_deviation
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_forms
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    load_float,
    load_int,
    multiply,
    store,
    store_float,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code, Epilogue
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

HIDDEN, BRANCH, STREAMS, SHARES, PROJECTED = (
    int(b) for b in (Buffer.HIDDEN, Buffer.BRANCH, Buffer.STREAMS, Buffer.SHARES, Buffer.PROJECTED)
)
REPEAT, SETTLE, MIX = int(Code.REPEAT), int(Code.SETTLE), int(Code.MIX)
PASS = int(Epilogue.PASS)


@entry
def run_gated(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation; every thread has its own tokens."""
    step, op = step_at(step_address), operation_at(op_address)
    gated = gated_at(op.facts)
    for t in range(rank, step.wanted if op.wanted_only else step.tokens, step.threads):
        if op.code == REPEAT:
            repeat_row(step, op, gated, t)
        elif op.code == SETTLE:
            settle_row(variant, step, op, gated, t)
        elif op.code == MIX:
            mix_row(variant, step, op, gated, t, scratch)
        else:
            pick_row(variant, step, op, t)


@kernel
def repeat_row(step, op, gated, t):
    """Copy hidden[t] to all states."""
    hidden = step.buffers[HIDDEN] + t * op.width * 4
    streams = step.buffers[STREAMS] + t * gated.count * op.width * 4
    for first in range(0, gated.count * op.width * 4, op.width * 4):
        for i in range(0, 4 * op.width, 4 * LANES):
            store(streams + first + i, load(hidden + i))


@kernel
def settle_row(variant, step, op, gated, t):
    """Add branch[t] to each state, times `scale` and twice the sigmoid of its factor. Then hand on
    all states, each normalised and divided by their number, if there are weights for it.
    """
    size = 4 * op.width
    streams = step.buffers[STREAMS] + t * gated.count * size
    branch, shares = step.buffers[BRANCH] + t * size, step.buffers[SHARES] + t * PANEL * 4
    if gated.adds:
        store(shares, sigmoid_times(fill(2.0 * op.scale), load(shares)))
    for stream in range(gated.count):
        row, place = streams + stream * size, op.weights + stream * size
        if gated.adds:
            factor = fill(load_float(shares + 4 * stream))
            for i in range(0, size, 4 * LANES):
                store(row + i, fma(load(branch + i), factor, load(row + i)))
        if op.weights:
            factor = fill(inverse_deviation(row, op.width, 0.0, op.eps) / gated.count)
            for i in range(0, size, 8 * LANES):
                first = multiply(multiply(load(row + i), factor), load(place + i))
                at = i + 4 * LANES
                second = multiply(multiply(load(row + at), factor), load(place + at))
                to = (t * gated.count + stream) * op.width + i // 4
                store_forms(variant, step, op, to, first, second)


@kernel
def mix_row(variant, step, op, gated, t, scratch):
    """target[t] = the mean of all states, each normalised and times the sigmoids of its gates.

    `scratch`: room for a number of each state.
    """
    size = 4 * op.width
    streams = step.buffers[STREAMS] + t * gated.count * size
    gates = step.buffers[PROJECTED] + t * gated.count * size
    for stream in range(gated.count):
        factor = inverse_deviation(streams + stream * size, op.width, 0.0, op.eps) / gated.count
        store_float(scratch + 4 * stream, factor)
    for i in range(0, size, 8 * LANES):
        first, second = fill(0.0), fill(0.0)
        for stream in range(gated.count):
            factor, place = fill(load_float(scratch + 4 * stream)), stream * size + i
            x = multiply(multiply(load(streams + place), factor), load(op.weights + place))
            first = add(first, sigmoid_times(x, load(gates + place)))
            place += 4 * LANES
            x = multiply(multiply(load(streams + place), factor), load(op.weights + place))
            second = add(second, sigmoid_times(x, load(gates + place)))
        if op.epilogue == PASS:
            store_forms(variant, step, op, t * op.width + i // 4, first, second)
        else:
            target = step.buffers[op.target] + t * size + i
            store(target, first)
            store(target + 4 * LANES, second)


@kernel
def pick_row(variant, step, op, row):
    """Convert a row of HIDDEN whose logits are wanted to the forms that products read."""
    t = load_int(step.wanted_ids + 4 * row)
    source = step.buffers[HIDDEN] + t * op.width * 4
    for i in range(0, op.width, 2 * LANES):
        first, second = load(source + 4 * i), load(source + 4 * i + 4 * LANES)
        store_forms(variant, step, op, row * op.width + i, first, second)
