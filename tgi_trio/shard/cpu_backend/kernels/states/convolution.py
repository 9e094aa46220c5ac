"""A causal convolution per channel (depthwise); its last inputs are the state.

State and weights are stored by groups of 16 channels, so that both are read sequentially: float32
[channels / 16, taps - 1, 16], oldest first, and [channels / 16, taps, 16].
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.activation import sigmoid_times
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    load_int,
    multiply,
    store,
)
from tgi_trio.shard.cpu_backend.tables import Buffer
from tgi_trio.shard.cpu_backend.weight_layout import LANES

PROJECTED = int(Buffer.PROJECTED)


@kernel
def convolve(variant, rank, step, op, mixer, window):
    """Convolve this thread's share of the channels, for all rows.

    `window`: room for the preceding inputs of 16 channels.
    """
    vectors = mixer.channels // LANES
    for row in range(step.row_count):
        for i in range(vectors * rank // step.threads, vectors * (rank + 1) // step.threads):
            convolve_row(variant, step, op, mixer, row, i * LANES, window)


@kernel
def convolve_row(variant, step, op, mixer, row, channel, window):
    """Convolve 16 channels of a row's tokens, and write the last inputs as the new state."""
    stride, before = 4 * mixer.channels, mixer.taps - 1
    place = channel * before * 4
    slot = load_int(step.state_reads + 4 * row)
    tail = op.states + slot * op.state_bytes + place
    for k in range(0, 64 * before, 64):
        value = fill(0.0)
        if slot >= 0:
            value = load(tail + k)
        store(window + k, value)
    first, end = load_int(step.row_starts + 4 * row), load_int(step.row_starts + 4 * row + 4)
    for t in range(first, end):
        own = step.buffers[PROJECTED] + (t * op.inputs + mixer.first + channel) * 4
        x = load(own)
        if mixer.gated:
            x = multiply(x, load(own + 2 * stride))
        y = convolve_token(mixer, channel, window, x)
        if mixer.gated:
            y = multiply(y, load(own + stride))
            to = t * mixer.channels + channel
            store_result(variant, op, step.buffers[op.target], to, y)
        elif mixer.bare:
            store(own, y)
        else:
            store(own, sigmoid_times(y, y))
    tail = op.states + load_int(step.state_writes + 4 * row) * op.state_bytes + place
    for k in range(0, 64 * before, 64):
        store(tail + k, load(window + k))


@kernel
def convolve_token(mixer, channel, window, x):
    """Return the convolution of the window and x, and append x to the window."""
    before = mixer.taps - 1
    weights = mixer.kernel + 4 * channel * mixer.taps
    y = multiply(x, load(weights + 64 * before))
    if mixer.bias:
        y = add(y, load(mixer.bias + 4 * channel))
    for k in range(0, 64 * before, 64):
        value = load(window + k)
        y = fma(value, load(weights + k), y)
        if k > 0:
            store(window + k - 64, value)
    if before > 0:
        store(window + 64 * before - 64, x)
    return y
