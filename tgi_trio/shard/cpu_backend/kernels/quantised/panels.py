"""Panels of quantised weights times rows of activations by vectors: the way of most kinds.

A way (`WAYS` in `machine_code/entry.py`) is compiled for each kind apart from the step, and called
by address. So a model of other kinds needs no other step, and kinds are compiled in parallel. All
ways have the arguments of `multiply_by_vectors`. Few rows are multiplied with the panel as stored:
unpacking codes and the products use different execution units. For many rows
(`Multiplier.least_unpacked`) the panel is unpacked once, into the thread's scratch memory, which
stays in its cache. One of float32 numbers is unpacked a few blocks at a time where registers are
few.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import lesser
from tgi_trio.shard.cpu_backend.kernels.quantised.blocks import add_block
from tgi_trio.shard.cpu_backend.kernels.quantised.fetching import fetch_for_one
from tgi_trio.shard.cpu_backend.kernels.quantised.unpacking import unpack_blocks, unpack_panel
from tgi_trio.shard.cpu_backend.kernels.tiles import load_tile, store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import prefetch
from tgi_trio.shard.cpu_backend.tables import DIRECT, UNPACK, UNPACK_FOR_MANY, UNPACKED
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

_LINE = 64


@entry
def multiply_by_vectors(
    way, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes, mode, room, sums
):
    """sums[rows, 32] = inputs[rows, 32 * blocks] x one panel at `weights`.

    `inputs`: activations as `way` reads them, whose rows are `stride` bytes apart. `span_blocks`:
    blocks of a span; the last may have fewer. `room`: for an unpacked panel, used as `mode` says:
    see `DIRECT` and the others. With 0 rows the panel is only unpacked. A tile may have more rows
    than are left: it reads beyond the last row of `inputs`, and writes as many rows of `sums`.
    """
    mode = choose_mode(way, rows, mode)
    if mode == UNPACK and way.chunk_blocks == 0:
        unpack_panel(way, weights, blocks, span_blocks, np.int64(0), room)
    multiply_tiles(
        way, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes, mode, room, sums
    )


@kernel
def choose_mode(way, rows, mode):
    """Return `mode`, or what `UNPACK_FOR_MANY` means for so many rows."""
    if mode == UNPACK_FOR_MANY:
        mode = np.int64(UNPACK) if rows >= way.least_unpacked else np.int64(DIRECT)
    return mode


@kernel
def multiply_tiles(
    way, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes, mode, room, sums
):
    """Do what a way does, tile by tile, with a panel as stored or, as `mode` says, unpacked."""
    if way.chunk_blocks and mode != DIRECT:
        multiply_chunks(
            way, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes, room, sums
        )
        return
    if rows > 1 and rows <= way.most_in_one_pass and mode == DIRECT:
        multiply_lone_tile(way, rows, inputs, stride, weights, blocks, span_blocks, sums)
        return
    one, both = count(1), count(2)
    # The next panel is prefetched while the rows are multiplied with this one; a single row
    # prefetches later blocks of this one instead.
    ahead, pace, end = weights + panel_bytes, np.int64(0), weights + 2 * panel_bytes
    if rows < way.least_four:
        ahead, pace = weights + way.ahead, np.int64(way.block_bytes)
    elif mode != UNPACKED:
        passes = (rows + way.rows - 1) // way.rows * 2  # memory is busy in all of them
        pace = (panel_bytes // (passes * blocks) + _LINE - 1) // _LINE * _LINE
    row = np.int64(0)
    while row < rows:
        x, target = inputs + row * stride, sums + row * 4 * PANEL
        left = rows - row
        if way.takes_two and left == 2:
            row += sum_blocks(
                way, count(2), both, 0, x, stride, weights, blocks, span_blocks, ahead, pace, target
            )
            continue
        if left < way.least_four:
            row += sum_blocks(
                way, one, both, 0, x, stride, weights, blocks, span_blocks, ahead, pace, target
            )
            ahead += blocks * pace
            continue
        for column in range(2):
            if left >= way.least_full and mode != DIRECT:
                taken = sum_blocks(
                    way.unpacked, count(way.rows), one, column,
                    x, stride, room, blocks, blocks, ahead, pace, target,
                )  # fmt: skip
            elif left >= way.least_full:
                taken = sum_blocks(
                    way, count(way.rows), one, column,
                    x, stride, weights, blocks, span_blocks, ahead, pace, target,
                )  # fmt: skip
            else:
                taken = sum_blocks(
                    way, count(4), one, column,
                    x, stride, weights, blocks, span_blocks, ahead, pace, target,
                )  # fmt: skip
            ahead += blocks * pace
            if ahead >= end:
                pace = np.int64(0)
        row += lesser(taken, left)


@kernel
def multiply_lone_tile(way, rows, inputs, stride, weights, blocks, span_blocks, sums):
    """Multiply a few rows with both halves of a panel in one pass, as a single row is.

    Memory sets the pace, which a second pass over the panel would interrupt.
    """
    both, ahead, pace = count(2), weights + way.ahead, np.int64(way.block_bytes)
    if rows > 4:
        sum_blocks(
            way, count(way.rows), both, 0, inputs, stride, weights, blocks, span_blocks, ahead,
            pace, sums,
        )  # fmt: skip
    else:
        sum_blocks(
            way, count(4), both, 0, inputs, stride, weights, blocks, span_blocks, ahead, pace, sums
        )


@kernel
def sum_blocks(
    way, rows, columns, column, inputs, stride, weights, blocks, span_blocks, ahead, pace, sums
):
    """sums[rows, columns x 16] = inputs x a panel, `columns` from `column` on; return the rows.

    With every block `pace` bytes are prefetched from `ahead` on.
    """
    tile = zeros(rows, columns)
    table = weights
    weights += way.table_bytes
    if not way.span_bytes:
        span_blocks = blocks
    for first in range(0, blocks, span_blocks):
        span_head = weights
        weights += way.span_bytes
        if number(columns) == 2:  # it prefetches what it reads, heads as well
            ahead += way.span_bytes
        for _ in range(lesser(span_blocks, blocks - first)):
            if number(columns) == 2:
                fetch_for_one(way, ahead, pace)
            else:
                for i in range(0, pace, _LINE):
                    prefetch(ahead + i)
            ahead += pace
            tile = add_block(
                way, rows, columns, tile, column, table, span_head, weights, inputs, stride
            )
            weights += way.block_bytes
            inputs += way.active_bytes
    store_tile(rows, columns, tile, sums + column * 4 * LANES, 4 * PANEL)
    return number(rows)


@kernel
def multiply_chunks(
    way, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes, room, sums
):
    """Unpack a few blocks of a panel and multiply all rows with them, before the next blocks.

    A panel of float32 numbers stays in no near cache, but so many blocks do. Sums are in memory
    meanwhile. All tiles are full.
    """
    passes = (rows + way.rows - 1) // way.rows * 2
    pace = (panel_bytes // (passes * blocks) + _LINE - 1) // _LINE * _LINE
    ahead, end = weights + panel_bytes, weights + 2 * panel_bytes
    for first in range(0, blocks, way.chunk_blocks):
        taken = lesser(way.chunk_blocks, blocks - first)
        unpack_blocks(way, weights, first, taken, span_blocks, room)
        for row in range(0, rows, way.rows):
            x = inputs + row * stride + first * way.active_bytes
            for column in range(2):
                add_blocks(
                    way.unpacked, count(way.rows), column, x, stride, room, taken, ahead, pace,
                    first, sums + row * 4 * PANEL + column * 4 * LANES,
                )  # fmt: skip
                ahead += taken * pace
                if ahead >= end:
                    pace = np.int64(0)


@kernel
def add_blocks(way, rows, column, inputs, stride, weights, blocks, ahead, pace, before, sums):
    """sums[rows, 16] += inputs x unpacked blocks; where none has been `before`, there is no sum.

    With every block `pace` bytes are prefetched from `ahead` on.
    """
    one = count(1)
    tile = zeros(rows, one)
    if before:
        tile = load_tile(rows, one, sums, 4 * PANEL)
    for _ in range(blocks):
        for i in range(0, pace, _LINE):
            prefetch(ahead + i)
        ahead += pace
        tile = add_block(way, rows, one, tile, column, weights, weights, weights, inputs, stride)
        weights += way.block_bytes
        inputs += way.active_bytes
    store_tile(rows, one, tile, sums, 4 * PANEL)
