"""A causal convolution per channel, whose last inputs are the state: float32 [taps - 1, channels],
oldest first.
"""

from __future__ import annotations

from tgi_trio.shard.numba_backend.kernels import kernel
from tgi_trio.shard.numba_backend.kernels.activation import sigmoid_times
from tgi_trio.shard.numba_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.numba_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    load_int,
    multiply,
    store,
)
from tgi_trio.shard.numba_backend.tables import Buffer
from tgi_trio.shard.numba_backend.weight_layout import LANES

PROJECTED = int(Buffer.PROJECTED)


@kernel
def convolve(variant, rank, step, op, mixer, window):
    """Convolve this thread's channels, those of all rows.

    `window`: room for the inputs before a token, of 16 channels.
    """
    vectors = mixer.channels // LANES
    for i in range(vectors * rank // step.threads, vectors * (rank + 1) // step.threads):
        for row in range(step.row_count):
            convolve_row(variant, step, op, mixer, row, i * LANES, window)


@kernel
def convolve_row(variant, step, op, mixer, row, channel, window):
    """Convolve 16 channels of the tokens of a row, and leave the last inputs behind them."""
    stride, before = 4 * mixer.channels, mixer.taps - 1
    slot = load_int(step.state_reads + 4 * row)
    tail = op.states + slot * op.state_bytes + 4 * channel
    for k in range(before):
        value = fill(0.0)
        if slot >= 0:
            value = load(tail + k * stride)
        store(window + 64 * k, value)
    first, end = load_int(step.row_starts + 4 * row), load_int(step.row_starts + 4 * row + 4)
    for t in range(first, end):
        own = step.buffers[PROJECTED] + (t * op.inputs + mixer.first + channel) * 4
        x = load(own)
        if mixer.gated:
            x = multiply(x, load(own + 2 * stride))
        y = convolve_token(mixer, channel, window, x)
        if mixer.gated:
            y = multiply(y, load(own + stride))
            place = t * mixer.channels + channel
            store_result(variant, op, step.buffers[op.target], place, y)
        else:
            store(own, sigmoid_times(y, y))
    tail = op.states + load_int(step.state_writes + 4 * row) * op.state_bytes + 4 * channel
    for k in range(before):
        store(tail + k * stride, load(window + 64 * k))


@kernel
def convolve_token(mixer, channel, window, x):
    """Return the sum over the window and x, which the window then ends with."""
    stride, before = 4 * mixer.channels, mixer.taps - 1
    weights = mixer.kernel + 4 * channel
    y = multiply(x, load(weights + before * stride))
    if mixer.bias:
        y = add(y, load(mixer.bias + 4 * channel))
    for k in range(before):
        value = load(window + 64 * k)
        y = fma(value, load(weights + k * stride), y)
        if k > 0:
            store(window + 64 * (k - 1), value)
    if before > 0:
        store(window + 64 * (before - 1), x)
    return y
