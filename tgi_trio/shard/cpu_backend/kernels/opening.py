"""Output gates of attention and of recurrent states: float32 in, activations out."""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.activation import activate
from tgi_trio.shard.cpu_backend.kernels.linked_calls import opening_at
from tgi_trio.shard.cpu_backend.kernels.norm import inverse_deviation
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.cpu_backend.kernels.vectors import fill, load, load_float, multiply, store
from tgi_trio.shard.cpu_backend.tables import GroupNorm
from tgi_trio.shard.cpu_backend.weight_layout import LANES

NONE, BEHIND = int(GroupNorm.NONE), int(GroupNorm.BEHIND)


@kernel
def open_row(variant, step, op, t):
    """target[t] = norm(source[t]) * gate, or norm(source[t] * gate), group by group."""
    opening = opening_at(op.facts)
    source = step.buffers[op.source] + (t * op.inputs + op.offset) * 4
    gates = step.buffers[opening.gates] + (t * opening.gate_width + opening.gate_place) * 4
    for begin in range(0, op.width, opening.group):
        factor = fill(1.0)
        if opening.norm == BEHIND:
            for i in range(begin, begin + opening.group, LANES):
                store(source + 4 * i, through_gate(opening, gates, i, load(source + 4 * i)))
        if opening.norm != NONE:
            factor = fill(inverse_deviation(source + 4 * begin, opening.group, 0.0, op.eps))
        for i in range(begin, begin + opening.group, LANES):
            value = load(source + 4 * i)
            if opening.norm != NONE:
                value = multiply(multiply(value, factor), load(op.weights + 4 * i))
            if opening.norm != BEHIND:
                value = through_gate(opening, gates, i, value)
            store_result(variant, op, step.buffers[op.target], t * op.width + i, value)


@kernel
def through_gate(opening, gates, i, value):
    """Return 16 features from `i` on, multiplied by their activated gates."""
    if opening.gate_size == 1:
        gate = load(gates + 4 * i)
    else:
        gate = fill(load_float(gates + i // opening.gate_size * 4))
    return multiply(value, activate(opening.activation, gate, np.int64(0)))
