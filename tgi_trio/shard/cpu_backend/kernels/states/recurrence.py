"""Matrix-valued states of heads, which every token updates and reads: gated delta rule and Mamba-2.

A head's state maps keys to values, S [key_dim, value_dim]. A token makes it decay, adds its own
value under its key, and reads with its query:

    S <- a S;  S <- S + k u;  output = q S

In a delta rule (Yang, Kautz, Hatamizadeh 2024) u is beta (v - k S): it corrects what S holds under
the key. In Mamba-2 (Dao, Gu 2024) u is the token's time step times v; its b and c are key and query
here, its state dimensions are keys, its head dimensions values.

Columns of S are independent. So a work item is 32 columns of a head, which stay in the cache for
all tokens of a row; they are laid out like a panel of a linear layer.
"""

from __future__ import annotations

import math

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.activation import sigmoid_times, softplus
from tgi_trio.shard.cpu_backend.kernels.linear import panel_product
from tgi_trio.shard.cpu_backend.kernels.variant import count
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    load_float,
    load_int,
    maximum,
    minimum,
    multiply,
    store,
    store_aside,
    subtract,
    total,
    weight,
)
from tgi_trio.shard.cpu_backend.tables import Buffer
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

PROJECTED, DECAYS = int(Buffer.PROJECTED), int(Buffer.DECAYS)
_TINY = 1e-6  # keys near zero stay near zero
_LINE = 4 * PANEL  # bytes of 32 columns for one dimension of the key


@kernel
def recur(variant, rank, step, op, mixer, scratch):
    """Compute this thread's share of the columns, for the states of all rows.

    `scratch`: room for five keys, and for two sums of 32.
    """
    blocks = mixer.value_dim // PANEL
    items = mixer.heads * blocks
    block_bytes = mixer.key_dim * _LINE
    begin, end = items * rank // step.threads, items * (rank + 1) // step.threads
    for row in range(step.row_count):
        read = op.states + load_int(step.state_reads + 4 * row) * op.state_bytes
        write = op.states + load_int(step.state_writes + 4 * row) * op.state_bytes
        first, last = load_int(step.row_starts + 4 * row), load_int(step.row_starts + 4 * row + 4)
        for item in range(begin, end):
            source, target = read + item * block_bytes, write + item * block_bytes
            if read < op.states:
                clear(target, block_bytes)
                source = target
            for t in range(first, last):
                x = step.buffers[PROJECTED] + t * op.inputs * 4
                forgets = np.int64(0)
                if mixer.by_channel:
                    forgets = step.buffers[DECAYS]
                    forgets += (t * mixer.heads + item // blocks) * mixer.key_dim * 4
                recur_token(
                    variant, mixer, x, forgets, item // blocks, item % blocks, source, target,
                    last - first == 1, scratch,
                )  # fmt: skip
                source = target


@kernel
def clear(target, size):
    """Write `size` zero bytes."""
    for i in range(0, size, 4 * LANES):
        store(target + i, fill(0.0))


@kernel
def recur_token(variant, mixer, x, forgets, head, block, source, target, lone, scratch):
    """Update 32 columns of a head's state by one token; the output replaces its value.

    `forgets`: float32 [key_dim], from which a decay per channel is computed; 0: one decay for all.
    `lone`: no other token of the row follows in this step.
    """
    size = 4 * mixer.key_dim
    shared = head // mixer.sharing % mixer.key_heads * mixer.key_dim
    query, key = x + 4 * (mixer.query + shared), x + 4 * (mixer.key + shared)
    keys, queries, sums = scratch, scratch + size, scratch + 2 * size
    if mixer.corrects:
        scale_to_length(key, keys, mixer.key_dim, 1.0)
        scale_to_length(query, queries, mixer.key_dim, 1.0 / math.sqrt(mixer.key_dim))
    else:
        scale_by(key, keys, mixer.key_dim, 1.0)
        scale_by(query, queries, mixer.key_dim, 1.0)
    asking, decays = keys, sums + 2 * _LINE
    if forgets:
        forget_channels(mixer, head, forgets, decays)
        asking = decays + size
        for i in range(0, size, 4 * LANES):
            own = load(decays + i)
            store(asking + i, multiply(load(keys + i), own))
            store(asking + size + i, multiply(load(queries + i), own))
    # Both reads of the old state at once: with the key and with the query.
    panel_product(
        variant, count(2), count(2), count(4),
        asking, size, source, mixer.key_dim, source, 0, sums,
    )  # fmt: skip
    pace = decay = fill(1.0)  # with a decay per channel it is in `asking` already
    if not forgets:
        pace = softplus(
            fill(load_float(x + 4 * (mixer.decay + head)) + load_float(mixer.decay_bias + 4 * head))
        )
        pace = minimum(maximum(pace, fill(mixer.least_step)), fill(mixer.most_step))
        decay = weight(multiply(fill(load_float(mixer.rate + 4 * head)), pace))
    likeness = fill(dot_product(keys, queries, mixer.key_dim))
    value = x + 4 * (mixer.value + head * mixer.value_dim + block * PANEL)
    first, second = load(value), load(value + 4 * LANES)
    if mixer.corrects:
        beta = sigmoid_times(fill(mixer.beta_scale), fill(load_float(x + 4 * (mixer.beta + head))))
        update_a = multiply(beta, subtract(first, multiply(decay, load(sums))))
        update_b = multiply(beta, subtract(second, multiply(decay, load(sums + 4 * LANES))))
    else:
        update_a, update_b = multiply(pace, first), multiply(pace, second)
    seen = sums + _LINE
    read_a = fma(likeness, update_a, multiply(decay, load(seen)))
    read_b = fma(likeness, update_b, multiply(decay, load(seen + 4 * LANES)))
    if mixer.skip:
        skip = fill(load_float(mixer.skip + 4 * head))
        read_a, read_b = fma(skip, first, read_a), fma(skip, second, read_b)
    store(value, read_a)
    store(value + 4 * LANES, read_b)
    change_state(mixer, keys, forgets, decays, decay, update_a, update_b, source, target, lone)


@kernel
def change_state(mixer, keys, forgets, decays, decay, update_a, update_b, source, target, lone):
    """Write 32 columns of a state after a token: a S + k u, where S is in `source`.

    `forgets`: unless 0, `decays` [key_dim] replace the one `decay`. `lone`: the state is not read
    again in this step. Two loops are faster than one that tests it.
    """
    if lone:
        for i in range(0, 4 * mixer.key_dim, 4):
            own = fill(load_float(keys + i))
            if forgets:
                decay = fill(load_float(decays + i))
            store_aside(target, fma(own, update_a, multiply(decay, load(source))))
            place = source + 4 * LANES
            store_aside(target + 4 * LANES, fma(own, update_b, multiply(decay, load(place))))
            source += _LINE
            target += _LINE
        return
    for i in range(0, 4 * mixer.key_dim, 4):
        own = fill(load_float(keys + i))
        if forgets:
            decay = fill(load_float(decays + i))
        store(target, fma(own, update_a, multiply(decay, load(source))))
        place = source + 4 * LANES
        store(target + 4 * LANES, fma(own, update_b, multiply(decay, load(place))))
        source += _LINE
        target += _LINE


@kernel
def forget_channels(mixer, head, forgets, decays):
    """Write the decay of each channel of a head's keys (Kimi Linear, Moonshot AI 2025)."""
    rate, bound = load_float(mixer.rate + 4 * head), mixer.least_decay
    bias = mixer.decay_bias + 4 * head * mixer.key_dim
    for i in range(0, 4 * mixer.key_dim, 4 * LANES):
        pace = add(load(forgets + i), load(bias + i))
        if bound != 0.0:
            log = sigmoid_times(fill(bound), multiply(fill(-rate), pace))
        else:
            log = multiply(fill(rate), softplus(pace))
        store(decays + i, weight(log))


@kernel
def dot_product(a, b, size):
    """Return a . b of two vectors [size]."""
    sums = fill(0.0)
    for i in range(0, 4 * size, 4 * LANES):
        sums = fma(load(a + i), load(b + i), sums)
    return total(sums)


@kernel
def scale_to_length(source, target, size, length):
    """Write a vector [size] scaled to the given length; one near zero stays near zero."""
    found = dot_product(source, source, size)
    scale_by(source, target, size, length / math.sqrt(found + _TINY))


@kernel
def scale_by(source, target, size, factor):
    """Write a vector [size] times a number."""
    for i in range(0, 4 * size, 4 * LANES):
        store(target + i, multiply(load(source + i), fill(factor)))
