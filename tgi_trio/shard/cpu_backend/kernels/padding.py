"""Heads whose size is no multiple of a vector: padded with zeros before attention, unpadded after.

Zeros change no score and no sum, so attention need not know of them.
"""

from __future__ import annotations

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.linked_calls import operation_at, padding_at, step_at
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    copy_word,
    fill,
    first_lanes,
    load,
    load_int,
    store,
    store_float,
)
from tgi_trio.shard.cpu_backend.tables import Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

PAD = int(Code.PAD)


@entry
def run_padding(variant, rank, step_address, op_address, counter, scratch):
    """Run one thread's part of an operation; every thread has its own tokens."""
    step, op = step_at(step_address), operation_at(op_address)
    padding = padding_at(op.facts)
    for t in range(rank, step.tokens, step.threads):
        if op.code == PAD:
            pad_row(step, op, padding, t, scratch)
        else:
            close_row(variant, step, op, padding, t)


@kernel
def pad_row(step, op, padding, t, scratch):
    """Pad the heads of a row, in place, the last one first; `scratch`: room for one head.

    Queries and keys are reordered as by REORDER, if there is an order: -1 stands for a zero.
    """
    row = step.buffers[op.target] + t * op.width * 4
    narrow, wide = padding.queries * padding.dim, padding.queries * op.head_dim
    for i in range(padding.values):
        head = padding.values - 1 - i
        source = row + (narrow + head * padding.value_dim) * 4
        target = row + (wide + head * op.value_dim) * 4
        move_head(source, target, scratch, padding.value_dim, op.value_dim)
    for i in range(padding.queries):
        head = padding.queries - 1 - i
        target = row + head * op.head_dim * 4
        move_head(row + head * padding.dim * 4, target, scratch, padding.dim, op.head_dim)
        if op.order:
            for j in range(op.head_dim):
                place = load_int(op.order + 4 * j)
                if place < 0:
                    store_float(target + 4 * j, 0.0)
                else:
                    copy_word(target + 4 * j, scratch + 4 * place)


@kernel
def move_head(source, target, scratch, size, padded):
    """Copy `size` numbers by way of `scratch`, followed by zeros up to `padded`."""
    for i in range(0, size, LANES):
        store(scratch + 4 * i, load(source + 4 * i))
    for i in range(0, padded, LANES):
        store(target + 4 * i, first_lanes(size - i, load(scratch + 4 * i), fill(0.0)))


@kernel
def close_row(variant, step, op, padding, t):
    """Remove the padding of a row's heads, and write them as activations for the next product."""
    row, size = step.buffers[op.source] + t * op.heads * op.value_dim * 4, padding.value_dim
    for head in range(1, op.heads):
        source, target = row + head * op.value_dim * 4, row + head * size * 4
        for i in range(0, 4 * size, 4 * LANES):
            store(target + i, load(source + i))
    for i in range(0, op.width, LANES):
        value = load(row + 4 * i)
        store_result(variant, op, step.buffers[op.target], t * op.width + i, value)
