"""Small operations that few families need, on float32 rows of a buffer; see `linked_calls.py`."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.activation import activate, sigmoid_times
from tgi_trio.shard.cpu_backend.kernels.linked_calls import operation_at, own_at, step_at
from tgi_trio.shard.cpu_backend.kernels.norm import inverse_deviation, normed
from tgi_trio.shard.cpu_backend.kernels.opening import open_row
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_forms, store_result
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    copy_word,
    fill,
    fma,
    load,
    load_int,
    load_stored,
    maximum,
    multiply,
    store,
    subtract,
    total,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

PLACE, NORM_ROWS, PASS_ON, OPEN, SCALE, OWN_INPUT = (
    int(code)
    for code in (Code.PLACE, Code.NORM_ROWS, Code.PASS_ON, Code.OPEN, Code.SCALE, Code.OWN_INPUT)
)
CUT, COPY, GATE_NORM = int(Code.CUT), int(Code.COPY), int(Code.GATE_NORM)
_BOTH = 2.0**-0.5  # the factor of a sum of two, which keeps its variance
QKV, UNSORTED = int(Buffer.QKV), int(Buffer.UNSORTED)


@entry
def run_rare(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation; every thread has its own tokens."""
    step, op = step_at(step_address), operation_at(op_address)
    for t in range(rank, step.tokens, step.threads):
        if op.code == PLACE:
            place(variant, step, op, t)
        elif op.code == NORM_ROWS:
            norm_row(step, op, t)
        elif op.code == PASS_ON:
            pass_on(variant, step, op, t)
        elif op.code == OPEN:
            open_row(variant, step, op, t)
        elif op.code == SCALE:
            scale_row(step, op, t)
        elif op.code == OWN_INPUT:
            add_own_input(variant, step, op, t)
        elif op.code == CUT:
            cut_gates(variant, step, op, t)
        elif op.code == COPY:
            copy_row(step, op, t)
        elif op.code == GATE_NORM:
            gate_norm(variant, step, op, t)
        else:
            reorder(step, op, t, scratch)


@kernel
def place(variant, step, op, t):
    """hidden[t] += table[position of t + offset]: learned position embeddings."""
    row = load_int(step.positions + 4 * t) + op.offset
    source = op.weights + row * op.width * variant.kv.bytes
    target = step.buffers[op.target] + t * op.width * 4
    for i in range(0, op.width, LANES):
        value = load_stored(variant.kv, source + i * variant.kv.bytes)
        store(target + 4 * i, add(value, load(target + 4 * i)))


@kernel
def norm_row(step, op, t):
    """Normalise `inputs` features of a row of `width`, from `offset` on, in place: all of them
    together, or heads of `head_dim` features.
    """
    row = step.buffers[op.target] + (t * op.width + op.offset) * 4
    size = op.head_dim if op.head_dim else op.inputs
    for first in range(0, op.inputs, size):
        x, mean = row + 4 * first, 0.0
        if op.centred:
            sums = fill(0.0)
            for i in range(0, size, LANES):
                sums = add(sums, load(x + 4 * i))
            mean = total(sums) / size
        centre, factor = fill(mean), fill(inverse_deviation(x, size, mean, op.eps))
        for i in range(first, first + size, LANES):
            store(row + 4 * i, normed(op, row, i, centre, factor))


@kernel
def pass_on(variant, step, op, t):
    """Convert `inputs` of the `span` features of a row, from `offset` on, to the forms that
    products read: of the residual stream, or of a part of a mixer's projections.
    """
    source = step.buffers[op.source] + (t * op.span + op.offset) * 4
    for i in range(0, op.inputs, 2 * LANES):
        first, second = load(source + 4 * i), load(source + 4 * i + 4 * LANES)
        store_forms(variant, step, op, t * op.inputs + i, first, second)


@kernel
def gate_norm(variant, step, op, t):
    """Convert a norm's result, in UNSORTED, times the sigmoids of a row of `source`."""
    norm = step.buffers[UNSORTED] + t * op.inputs * 4
    gates = step.buffers[op.source] + t * op.inputs * 4
    for i in range(0, op.inputs, 2 * LANES):
        first = sigmoid_times(load(norm + 4 * i), load(gates + 4 * i))
        at = 4 * (i + LANES)
        second = sigmoid_times(load(norm + at), load(gates + at))
        store_forms(variant, step, op, t * op.inputs + i, first, second)


@kernel
def copy_row(step, op, t):
    """Copy a row of `inputs` features to a part of a row of `width`, from `offset` on."""
    source = step.buffers[op.source] + t * op.inputs * 4
    target = step.buffers[op.target] + (t * op.width + op.offset) * 4
    for i in range(0, 4 * op.inputs, 4 * LANES):
        store(target + i, load(source + i))


@kernel
def scale_row(step, op, t):
    """target[t] *= scale."""
    row = step.buffers[op.target] + t * op.width * 4
    for i in range(0, op.width, LANES):
        store(row + 4 * i, multiply(load(row + 4 * i), fill(op.scale)))


@kernel
def add_own_input(variant, step, op, t):
    """target[t] = (norm(target[t]) + table[token t] * scale) / sqrt(2), layer by layer."""
    own, token = own_at(op.facts), load_int(step.token_ids + 4 * t)
    row = token if token < own.rows else np.int64(0)
    source = own.table + row * op.width * variant.kv.bytes
    target = step.buffers[op.target] + t * op.width * 4
    for begin in range(0, op.width, op.inputs):
        x = target + 4 * begin
        factor = fill(inverse_deviation(x, op.inputs, 0.0, op.eps))
        for i in range(0, op.inputs, LANES):
            value = multiply(multiply(load(x + 4 * i), factor), load(op.weights + 4 * i))
            told = load_stored(variant.kv, source + (begin + i) * variant.kv.bytes)
            both = fma(told, fill(op.scale), value)
            store(x + 4 * i, multiply(both, fill(_BOTH)))


@kernel
def cut_gates(variant, step, op, t):
    """target[t] = activation(max(gate - bound, 0)) * up, of a row of gates, then ups.

    The bound is the mean of the row's gates and `scale` times their standard deviation.
    """
    size = op.width
    gates, sums = step.buffers[op.source] + t * 2 * size * 4, fill(0.0)
    for i in range(0, 4 * size, 4 * LANES):
        sums = add(sums, load(gates + i))
    mean = total(sums) / size
    bound = fill(mean + op.scale / inverse_deviation(gates, size, mean, 0.0))
    for i in range(0, size, LANES):
        gate = maximum(subtract(load(gates + 4 * i), bound), fill(0.0))
        value = multiply(activate(op.activation, gate, op.learned), load(gates + 4 * (size + i)))
        store_result(variant, op, step.buffers[op.target], t * size + i, value)


@kernel
def reorder(step, op, t, scratch):
    """Reorder the dimensions of every query and key so that pairs are half a head apart: the new
    dimension i is the old `order[i]`.
    """
    size, heads = op.head_dim, op.heads + op.kv_heads
    row = step.buffers[QKV] + t * op.width * 4
    for head in range(heads):
        x = row + head * size * 4
        for i in range(0, 4 * size, 4 * LANES):
            store(scratch + i, load(x + i))
        for i in range(size):
            copy_word(x + 4 * i, scratch + 4 * load_int(op.order + 4 * i))
