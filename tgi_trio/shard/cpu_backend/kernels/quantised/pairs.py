"""Floating-point codes times rows, by a matrix unit (AMX) that multiplies pairs of bfloat16.

A block is unpacked to bfloat16, which holds its numbers exactly. It is then sixteen steps of a
panel, which `matrix_unit.py` multiplies. Blocks of a span share a scale, so their products are
added up in the unit; the sums are scaled and added span by span.

The unit multiplies any number of rows, so a row's results are the same to the bit among any others.
A few blocks at a time are unpacked into memory that stays in the first-level cache, and multiplied.
For many rows all of a panel stays unpacked after the first 32 rows.

Where the unit would keep a single row waiting (`Multiplier.alone`), vectors multiply it. They add
up in the unit's order: products are exact before they are added, and each is added to the sum of
the first features of pairs, or to that of the second ones, of 32 inputs.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import lesser
from tgi_trio.shard.cpu_backend.kernels.matrix_unit import (
    HEIGHT,
    add_products,
    clear_sums,
    prepare_registers,
    release_registers,
    store_sums,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.blocks import (
    add_span,
    add_unscaled,
    unpack_block,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.fetching import fetch_for_one
from tgi_trio.shard.cpu_backend.kernels.quantised.unpacking import unpack_panel
from tgi_trio.shard.cpu_backend.kernels.tiles import store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    fma,
    load,
    load_half,
    prefetch,
    prefetch_near,
    store,
)
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS
from tgi_trio.shard.cpu_backend.tables import UNPACK, UNPACK_FOR_MANY, UNPACKED
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

_LINE = 64  # bytes: of a cache line, and of 32 activations
_ROW = 4 * PANEL  # bytes of a row of sums
_ROWS = 2 * HEIGHT  # that are multiplied at once
# Blocks that are unpacked before they are multiplied. With one a product waits for its weights; 16
# take as long as 4 while panels come from memory, and longer when they do not.
_TOGETHER = 4
# Bytes that are prefetched ahead, into both caches: 3 KiB are a tenth slower.
_AHEAD = 8192


@entry
def multiply_as_pairs(
    way, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes, mode, room, sums
):
    """sums[rows, 32] = inputs[rows, 32 * blocks] x one panel at `weights`.

    `inputs`: bfloat16. The arguments are those of `multiply_by_vectors`, and so is what lies in
    `room` afterwards; behind the panel there is room for products.
    """
    if rows == 0:
        unpack_panel(way, weights, blocks, span_blocks, np.int64(0), room)
        return
    if not way.span_bytes:
        span_blocks = blocks
    kept = mode == UNPACK or (mode == UNPACK_FOR_MANY and rows >= way.least_unpacked)
    if way.alone and rows == 1 and mode != UNPACKED and not kept:
        sum_row(way, inputs, weights, blocks, span_blocks, room, sums)
        return
    prepare_registers(rows)
    # Once the panel has been unpacked, memory is free to read the next one.
    ahead, prefetched = weights + panel_bytes, np.int64(0)  # bytes with each block
    if kept and rows > _ROWS:
        prefetched = (panel_bytes // ((rows - 1) // _ROWS * blocks) + _LINE - 1) // _LINE * _LINE
    for row in range(0, rows, _ROWS):
        left = lesser(rows - row, _ROWS)
        fresh = mode != UNPACKED and (row == 0 or not kept)
        x, target = inputs + row * stride, sums + row * _ROW
        if left > HEIGHT:
            sum_spans(
                way, count(2), left, x, stride, weights, blocks, span_blocks, fresh,
                kept or not fresh, ahead, prefetched, room, target,
            )  # fmt: skip
        else:
            sum_spans(
                way, count(1), left, x, stride, weights, blocks, span_blocks, fresh,
                kept or not fresh, ahead, prefetched, room, target,
            )  # fmt: skip
        if not fresh:
            ahead += blocks * prefetched
    release_registers()


@kernel
def sum_spans(
    way, registers, rows, inputs, stride, weights, blocks, span_blocks, fresh, kept, ahead,
    prefetched, room, sums,
):  # fmt: skip
    """sums[rows, 32] = inputs x a panel, for up to 16 times `registers` rows.

    `fresh`: blocks have to be unpacked. `kept`: each has its own place in `room`. Where they are
    not fresh, so many bytes are `prefetched` with each, from `ahead` on.
    """
    size = way.unpacked.block_bytes
    table, products = weights, room + blocks * size
    weights += way.table_bytes
    span_head, unread, added = weights, np.int64(0), np.int64(0)
    clear_sums(registers)
    store_sums(registers, sums)
    for first in range(0, blocks, _TOGETHER):
        some = lesser(_TOGETHER, blocks - first)
        unpacked = room
        if kept:
            unpacked += first * size
        if fresh:
            for i in range(some):
                if unread == 0:
                    span_head, unread = weights, span_blocks
                    weights += way.span_bytes
                unread -= 1
                for line in range(0, way.block_bytes, _LINE):
                    prefetch(weights + _AHEAD + line)
                for line in range(0, way.block_bytes, _LINE):
                    prefetch_near(weights + _AHEAD + line)
                unpack_block(way, table, span_head, weights, np.int64(0), unpacked + i * size)
                weights += way.block_bytes
        for i in range(some):
            if not fresh:
                for line in range(0, prefetched, _LINE):
                    prefetch(ahead + line)
                ahead += prefetched
            if added == 0:
                clear_sums(registers)
            add_products(registers, inputs, stride, unpacked + way.unpacked.head_bytes)
            inputs += _LINE
            added += 1
            if added == span_blocks or first + i + 1 == blocks:
                store_sums(registers, products)
                add_scaled(rows, products, unpacked, sums)
                added = np.int64(0)
            unpacked += size


@kernel
def add_scaled(rows, products, scales, sums):
    """sums[rows, 32] += products[rows, 32] * scales[32]."""
    first, second = load(scales), load(scales + 4 * LANES)
    for i in range(0, rows * _ROW, _ROW):
        store(sums + i, fma(load(products + i), first, load(sums + i)))
        i += 4 * LANES
        store(sums + i, fma(load(products + i), second, load(sums + i)))


@kernel
def sum_row(way, inputs, weights, blocks, span_blocks, room, sums):
    """sums[32] = a row of inputs x a panel, without the unit and in its order."""
    one, both = count(1), count(2)
    for i in range(0, 2 * blocks * BLOCK_INPUTS, 2 * LANES):
        store(room + 2 * i, load_half(inputs + i))
    total, table = zeros(one, both), weights
    weights += way.table_bytes
    for first in range(0, blocks, span_blocks):
        span_head, span = weights, zeros(one, both)
        weights += way.span_bytes
        for _ in range(lesser(span_blocks, blocks - first)):
            fetch_for_one(way, weights + way.ahead, way.block_bytes)
            span = add_unscaled(way, span, table, weights, room)
            weights += way.block_bytes
            room += 4 * BLOCK_INPUTS
        total = add_span(way, total, span, span_head)
    store_tile(one, both, total, sums, _ROW)
