"""y = x W^T: the packed matrix product, where nearly all of a step's time goes.

Weights are packed into *panels* of 32 output features. A panel is a list of steps; a step holds,
for a pair of input features (one feature in float32), the weights of all 32 outputs, which is two
vectors. So the kernel reads weights strictly in order, at the speed of memory:

    panel p, step k:   w[32p + 0, 2k]  w[32p + 0, 2k + 1]  w[32p + 1, 2k]  w[32p + 1, 2k + 1]  ...

For up to eight rows of x, the 32 sums of each row stay in registers (a *tile* of 8 x 2 vectors)
over the whole panel: per step two loads of weights, and per row one load of a pair of x, given to
all lanes, and two multiply-adds. The tile is then written once, and `finish` does what is left to
do with a result: bias, activation, adding to the residual stream. Where there are 16 registers of
half the size, a tile is six rows of half a panel, one half after the other. Where a batch is a lone
tile memory sets the pace, and it is read fastest by a full one: two rows then cost what eight do.

Each thread has a share of the panels, one after the other in memory. But no two threads get the
same speed out of memory, and all wait for the slowest: so the last eighth of every share goes panel
by panel to whoever is there first.

A batch of more rows takes several tiles per panel. The panel is then in the cache, and memory
would idle while the processor multiplies; so each tile fetches its share of the next panel ahead.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.numba_backend.kernels import kernel
from tgi_trio.shard.numba_backend.kernels.activation import activate, apply_soft_cap, cut
from tgi_trio.shard.numba_backend.kernels.adapters import call_adapter_kernel
from tgi_trio.shard.numba_backend.kernels.arrays import greater, lesser
from tgi_trio.shard.numba_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.numba_backend.kernels.quantised.link import call_panel_kernel
from tgi_trio.shard.numba_backend.kernels.quantised.panels import UNPACK_FOR_MANY, UNPACKED
from tgi_trio.shard.numba_backend.kernels.threads import atomic_add
from tgi_trio.shard.numba_backend.kernels.tiles import multiply_add, store_tile, zeros
from tgi_trio.shard.numba_backend.kernels.variant import count, number
from tgi_trio.shard.numba_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    multiply,
    prefetch,
    store,
)
from tgi_trio.shard.numba_backend.kinds.kind import BLOCK_INPUTS
from tgi_trio.shard.numba_backend.rooms import DELTAS, ROWS
from tgi_trio.shard.numba_backend.tables import Buffer, Epilogue
from tgi_trio.shard.numba_backend.weight_layout import LANES, PANEL

_STEP_BYTES = 4 * PANEL  # of a step of a panel
_AHEAD = 4096  # bytes that a lone row fetches ahead
_FURTHER_AHEAD = 8192  # bytes that a lone tile of several rows does: 8 rows are a sixth faster
_SHARED = 8  # one of so many panels of a lone tile belongs to whoever is there first
LOW = int(Buffer.LOW)
STORE, ADD, ACTIVATE, GATE = (
    int(e) for e in (Epilogue.STORE, Epilogue.ADD, Epilogue.ACTIVATE, Epilogue.GATE)
)


@kernel
def end_of_share(rank, step, op):
    """Return the panel after a thread's share, where the next thread's begins."""
    return op.outputs // PANEL * (rank + 1) // step.threads


@kernel
def linear(variant, rank, step, op, counter, sums):
    """Compute this thread's share of the panels of one linear layer, and what is left to all.

    `counter`: address of the number of panels taken of what is left to all, an int64. `sums`:
    float32 [ROWS + DELTAS, 32] of this thread's own, and behind them what `multiply_panel` needs.
    """
    rows = step.wanted if op.wanted_only else step.tokens
    source = step.buffers[op.source] + op.begin * variant.active_bytes
    steps = op.inputs // variant.weights.step
    stride, panel_bytes = row_and_panel_bytes(variant, op)
    tiles = count_tiles(variant, rows)
    shared = np.int64(0)  # panels at the end of every share that are anybody's
    if tiles <= 1 and step.threads > 1:
        shared = op.outputs // PANEL // step.threads // _SHARED
    panel, end = end_of_share(rank - 1, step, op), end_of_share(rank, step, op) - shared
    # Rows whose deltas are made together: whole tiles, for one of six rows would begin among those
    # of one 64 and end among those of the next.
    most = np.int64(ROWS)
    if not op.multiply:
        most = np.int64(ROWS // variant.rows * variant.rows)
    at_once = lesser(rows, most)
    group, group_end = panel, panel  # panels that have them
    while True:
        if panel >= end:
            panel = take_shared(step, op, counter, shared)
            if panel < 0:
                break
            end = np.int64(0)  # its own ones are done
        weights = op.weights + panel * panel_bytes
        ahead, pace = weights + bytes_ahead(rows), _STEP_BYTES
        if tiles > 1:
            ahead, pace = weights + steps * _STEP_BYTES, _STEP_BYTES // tiles
        row = np.int64(0)  # a bare 0 is a type of its own: everything would be compiled twice
        while row < rows:
            inputs, deltas = source + row * stride, np.int64(0)
            if op.expand:
                if row % most == 0 and (rows > most or panel < group or panel >= group_end):
                    group, group_end = panel, panel + 1
                    if rows <= most:
                        group_end = greater(group_end, lesser(end, panel + DELTAS // rows))
                    call_adapter_kernel(
                        op.expand, step.runs, step.run_of, op.site, op.offset // PANEL + panel,
                        group_end - group, row, lesser(rows - row, most), step.buffers[LOW],
                        step.low_stride, sums + ROWS * 4 * PANEL, 0,
                    )  # fmt: skip
                deltas = (panel - group) * at_once + row % most
                deltas = sums + (ROWS + deltas) * 4 * PANEL
            if op.multiply:
                taken = multiply_quantised(op, rows, row, inputs, stride, weights, sums)
            else:
                taken = multiply_rows(
                    variant, rows - row, rows <= variant.rows, inputs, stride, weights, steps,
                    ahead, pace, sums,
                )  # fmt: skip
            finish(variant, step, op, panel, row, taken, sums, deltas)
            if taken == variant.rows:  # in one or two halves
                ahead += steps * pace * (2 // variant.columns - 1)
            ahead += steps * pace
            row += taken
        panel += 1


@kernel
def row_and_panel_bytes(variant, op):
    """Return the bytes of a row of what a linear layer reads, and of a panel of its weights."""
    if op.multiply:
        return op.inputs // BLOCK_INPUTS * op.active_bytes, op.panel_bytes
    inputs = op.inputs
    if op.span:
        inputs = op.span
    return inputs * variant.active_bytes, op.inputs // variant.weights.step * _STEP_BYTES


@kernel
def take_shared(step, op, counter, shared):
    """Take one of the panels that are anybody's, `shared` of each thread; -1: there is none left.

    `counter`: address of the number of those taken.
    """
    item = np.int64(0)
    if shared:
        item = atomic_add(counter, 1)
    if item >= shared * step.threads:
        return np.int64(-1)
    return end_of_share(item % step.threads, step, op) - shared + item // step.threads


@kernel
def count_tiles(variant, rows):
    """Return how many tiles fetch their share of the next panel; those of the last rows do not,
    where a tile has many.
    """
    if variant.rows >= 8:
        return rows // variant.rows
    return rows // variant.rows * 2 + rows % variant.rows // 2


@kernel
def multiply_quantised(op, rows, row, inputs, stride, weights, sums):
    """Multiply some of the `rows` from `row` on with a panel as it is stored; return how many."""
    taken = lesser(rows - row, ROWS)
    mode = np.int64(UNPACK_FOR_MANY)
    if row:  # behind `ROWS` others
        mode = np.int64(UNPACKED)
    room = sums + (ROWS + DELTAS) * 4 * PANEL
    call_panel_kernel(
        op.multiply, taken, inputs, stride, weights, op.inputs // BLOCK_INPUTS, op.span_blocks,
        op.panel_bytes, mode, room, sums,
    )  # fmt: skip
    return taken


@kernel
def bytes_ahead(rows):
    """Return how many bytes ahead a lone tile fetches."""
    if rows > 1:
        return np.int64(_FURTHER_AHEAD)
    return np.int64(_AHEAD)


@kernel
def multiply_rows(variant, rows, alone, inputs, stride, weights, steps, ahead, pace, sums):
    """Multiply as many of the `rows` as one tile takes; return how many.

    `alone`: nothing is multiplied with this panel before or after them. Rows behind the last are
    read and multiplied where a tile is larger, and nobody looks at what came of them.

    Tiles of all sizes add up a row's products in the same order, so that its sums are the same to
    the bit whatever is beside it (batch invariance).
    """
    both, one, some = count(2), count(1), count(4)
    full = np.int64(variant.least_behind)
    least = np.int64(3)  # of a tile of four
    if alone:
        full = np.int64(variant.least_alone)
        least = np.int64(2)  # which wait for memory
    if rows >= full:
        for column in range(0, 2, variant.columns):
            panel_product(
                variant, count(variant.rows), count(variant.columns), one,
                inputs, stride, weights + column * variant.weights.half_bytes, steps,
                ahead + column * steps * pace, pace, sums + column * 4 * LANES,
            )  # fmt: skip
        return lesser(rows, variant.rows)
    if rows >= least and variant.rows >= 8:
        panel_product(
            variant, count(4), both, one, inputs, stride, weights, steps, ahead, pace, sums
        )
        return lesser(rows, 4)
    if rows >= 2:
        return panel_product(
            variant, count(2), both, some, inputs, stride, weights, steps, ahead, pace, sums
        )
    return panel_product(
        variant, one, both, some, inputs, stride, weights, steps, ahead, pace, sums
    )


@kernel
def panel_product(
    variant, rows, columns, at_once, inputs, stride, weights, steps, ahead, pace, sums
):
    """sums[rows, 16 * columns] = inputs[rows, K] x one panel, or one half of it. See the module.

    `at_once`: steps in a turn of the loop, for those of a tile of few rows are short. They have no
    sums of their own: the order in which a row is added up may not depend on how many there are.
    """
    one, bytes_ = count(1), variant.weights.step_bytes
    tile = zeros(rows, columns)
    for _ in range(steps // number(at_once)):
        for i in range(number(at_once)):
            prefetch(ahead + i * pace)
            prefetch(ahead + i * pace + 64)
            tile = multiply_add(
                variant.weights, rows, columns, one, tile, weights + i * _STEP_BYTES,
                inputs + i * bytes_, stride,
            )  # fmt: skip
        ahead += number(at_once) * pace
        weights += number(at_once) * _STEP_BYTES
        inputs += number(at_once) * bytes_
    store_tile(rows, columns, tile, sums, 4 * PANEL)
    return number(rows)


@kernel
def finish(variant, step, op, panel, row, rows, sums, deltas):
    """Take the sums of one panel to where they belong; `op.epilogue` says how.

    `deltas`: float32 [rows, 32], what adapters add; 0: nothing.
    """
    target = step.buffers[op.target]
    scale = fill(op.scale)
    for i in range(rows):
        first, second = load(sums + i * 4 * PANEL), load(sums + i * 4 * PANEL + 4 * LANES)
        if op.scales:
            first = multiply(first, load(op.scales + panel * 4 * PANEL))
            second = multiply(second, load(op.scales + panel * 4 * PANEL + 4 * LANES))
        if deltas:
            first = add(first, load(deltas + i * 4 * PANEL))
            second = add(second, load(deltas + i * 4 * PANEL + 4 * LANES))
        if op.bias:
            first = add(first, load(op.bias + panel * 4 * PANEL))
            second = add(second, load(op.bias + panel * 4 * PANEL + 4 * LANES))
        begin = target + ((row + i) * op.width + op.offset + panel * PANEL) * 4
        if op.epilogue == ADD:
            store(begin, fma(first, scale, load(begin)))
            store(begin + 4 * LANES, fma(second, scale, load(begin + 4 * LANES)))
        elif op.epilogue == GATE:
            place = (row + i) * op.width + panel * LANES
            opened = activate(op.activation, multiply(first, scale), op.learned)
            value = multiply(opened, second)
            store_result(variant, op, target, place, value)
        elif op.epilogue == ACTIVATE:
            place = (row + i) * op.width + panel * PANEL
            first = activate(op.activation, first, op.learned)
            second = activate(op.activation, second, op.learned)
            store_result(variant, op, target, place, first)
            store_result(variant, op, target, place + LANES, second)
        else:
            first, second = multiply(first, scale), multiply(second, scale)
            store(begin, cut(apply_soft_cap(first, op.cap), op.clip))
            store(begin + 4 * LANES, cut(apply_soft_cap(second, op.cap), op.clip))
