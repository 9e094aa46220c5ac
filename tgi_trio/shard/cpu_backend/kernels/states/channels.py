"""Recurrences of independent channels: Mamba's selective scan, and Griffin's RG-LRU.

In Mamba (Gu, Dao 2023) a channel has a state s [key_dim], each number of which has its own decay:

    s <- exp(dt A) s + dt x b;  output = (s . c + D x) * silu(gate)

where all channels share b and c. In RG-LRU (De, others 2024) the state is a single number:

    s <- a s + sqrt(1 - a^2) * opened * x;  output = s

A work item is 16 channels of a row. Their states stay in the cache, or in a register, for all
tokens of the row: float32 [channels / 16, key_dim, 16], or [channels].
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.activation import sigmoid_times, softplus
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    load_float,
    load_int,
    multiply,
    square_root,
    store,
    subtract,
    weight,
)
from tgi_trio.shard.cpu_backend.tables import Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

PROJECTED, DECAYS, SCAN = int(Buffer.PROJECTED), int(Buffer.DECAYS), int(Code.SCAN)
_VECTOR = 4 * LANES  # bytes


@kernel
def keep_channels(variant, rank, step, op, mixer):
    """Compute this thread's share of the channels, for all rows."""
    vectors = mixer.channels // LANES
    for row in range(step.row_count):
        for i in range(vectors * rank // step.threads, vectors * (rank + 1) // step.threads):
            if op.code == SCAN:
                scan_row(variant, step, op, mixer, row, i * LANES)
            else:
                blend_row(step, op, mixer, row, i * LANES)


@kernel
def scan_row(variant, step, op, mixer, row, channel):
    """Update 16 channels' states by a row's tokens, and write their outputs to `target`."""
    size, place = _VECTOR * mixer.key_dim, 4 * channel * mixer.key_dim
    slot = load_int(step.state_reads + 4 * row)
    source = op.states + slot * op.state_bytes + place
    target = op.states + load_int(step.state_writes + 4 * row) * op.state_bytes + place
    if slot < 0:
        for i in range(0, size, _VECTOR):
            store(target + i, fill(0.0))
        source = target
    bias, skip = load(mixer.decay_bias + 4 * channel), load(mixer.skip + 4 * channel)
    rates = mixer.rate + place
    first, end = load_int(step.row_starts + 4 * row), load_int(step.row_starts + 4 * row + 4)
    for t in range(first, end):
        own = step.buffers[PROJECTED] + (t * op.inputs + channel) * 4
        told = step.buffers[DECAYS] + t * mixer.decays_width * 4
        b, c = told + 4 * mixer.key, told + 4 * mixer.query
        x, pace = load(own), softplus(add(load(told + 4 * channel), bias))
        enters, says = multiply(pace, x), multiply(skip, x)
        for i in range(mixer.key_dim):
            decay = weight(multiply(pace, load(rates + _VECTOR * i)))
            value = multiply(enters, fill(load_float(b + 4 * i)))
            value = fma(decay, load(source + _VECTOR * i), value)
            store(target + _VECTOR * i, value)
            says = fma(value, fill(load_float(c + 4 * i)), says)
        source = target
        gate = load(own + 4 * mixer.gate)
        says = multiply(says, sigmoid_times(gate, gate))
        store_result(variant, op, step.buffers[op.target], t * mixer.channels + channel, says)


@kernel
def blend_row(step, op, mixer, row, channel):
    """Update 16 channels by a row's tokens (RG-LRU); outputs replace inputs.

    The factor of the input keeps the state at the same magnitude, however slowly it decays. The
    first token of a sequence enters unscaled.
    """
    slot = load_int(step.state_reads + 4 * row)
    state = fill(0.0)
    if slot >= 0:
        state = load(op.states + slot * op.state_bytes + 4 * channel)
    rate = load(mixer.rate + 4 * channel)
    size = mixer.head_dim
    place = channel // size * 2 * size + channel % size
    first, end = load_int(step.row_starts + 4 * row), load_int(step.row_starts + 4 * row + 4)
    for t in range(first, end):
        own = step.buffers[PROJECTED] + (t * op.inputs + mixer.first + channel) * 4
        gates = step.buffers[DECAYS] + (t * mixer.decays_width + place) * 4
        logarithm = sigmoid_times(rate, load(gates + 4 * size))
        enters = sigmoid_times(load(own), load(gates))
        if slot >= 0 or t > first:
            kept = weight(add(logarithm, logarithm))
            enters = multiply(enters, square_root(subtract(fill(1.0), kept)))
        state = fma(weight(logarithm), state, enters)
        store(own, state)
    store(op.states + load_int(step.state_writes + 4 * row) * op.state_bytes + 4 * channel, state)
