"""y = x W^T: the packed matrix product (GEMM), where nearly all of a step's time goes.

Weights are packed into *panels* of 32 output features. A panel is a list of steps. A step holds the
weights of all 32 outputs for a pair of input features (one feature in float32), which is two
vectors. So the kernel reads weights strictly in order, at the speed of memory:

    panel p, step k:   w[32p + 0, 2k]  w[32p + 0, 2k + 1]  w[32p + 1, 2k]  w[32p + 1, 2k + 1]  ...

For up to eight rows of x, the 32 sums of each row stay in registers (a *tile* of 8 x 2 vectors)
over the whole panel. A step takes two loads of weights, and for each row one broadcast load of a
pair of x and two multiply-adds. The tile is then written once, and `finish` is the epilogue: bias,
activation, adding to the residual stream. On machines with 16 registers of half the size, a tile is
six rows of half a panel, one half after the other. A batch of a single tile is bound by memory,
which a full tile reads fastest: two rows then cost as much as eight.

Each thread has a contiguous share of the panels. But threads get different bandwidths, and all wait
for the slowest. So the last eighth of every share is given out panel by panel (work stealing).

A batch of more rows takes several tiles per panel. The panel is then in the cache, and memory would
idle during the arithmetic; so each tile prefetches its part of the next panel.
"""

from __future__ import annotations

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.activation import activate, apply_soft_cap, cut
from tgi_trio.shard.cpu_backend.kernels.adapters import (
    call_adapter_kernel,
    find_factors,
    find_runs,
)
from tgi_trio.shard.cpu_backend.kernels.arrays import greater, lesser
from tgi_trio.shard.cpu_backend.kernels.matrix_unit import (
    multiply_rows_as_matrix,
    prepare_registers,
    release_registers,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.activations import store_result
from tgi_trio.shard.cpu_backend.kernels.quantised.link import call_panel_kernel
from tgi_trio.shard.cpu_backend.kernels.threads import atomic_add
from tgi_trio.shard.cpu_backend.kernels.tiles import multiply_add, store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    fill,
    fma,
    load,
    load_int,
    minimum,
    multiply,
    prefetch,
    store,
)
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS
from tgi_trio.shard.cpu_backend.scratch_memory import DELTAS, ROWS
from tgi_trio.shard.cpu_backend.tables import UNPACK_FOR_MANY, UNPACKED, Buffer, Epilogue
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

_STEP_BYTES = 4 * PANEL  # bytes of one step of a panel
_AHEAD = 4096  # bytes that a single row prefetches
# bytes that a single tile of several rows prefetches: 8 rows are a sixth faster
_FURTHER_AHEAD = 8192
# Bytes of panels, or of activations, that stay in the second-level cache, which is 2 MiB wherever
# there is a matrix unit, and how many panels at most.
_NEAR_BYTES = 1 << 20
_MOST_NEAR = 8
_SHARED = 8  # for a single tile, one panel of so many is given out to the first free thread
LOW = int(Buffer.LOW)
STORE, ADD, ACTIVATE, GATE = (
    int(e) for e in (Epilogue.STORE, Epilogue.ADD, Epilogue.ACTIVATE, Epilogue.GATE)
)


@kernel
def end_of_share(rank, step, op):
    """Return the end of a thread's share of panels, where the next thread's begins."""
    return op.outputs // PANEL * (rank + 1) // step.threads


@kernel
def linear(variant, rank, step, op, counter, sums):
    """Compute this thread's share of the panels of one linear layer, then shared ones.

    `counter`: address of the number of shared panels taken, an int64. `sums`: float32 [ROWS +
    DELTAS, 32], this thread's own, followed by the scratch memory of what multiplies panels.
    """
    rows = step.wanted if op.wanted_only else step.tokens
    source = step.buffers[op.source] + op.begin * variant.active_bytes
    steps = op.inputs // variant.weights.step
    stride, panel_bytes = row_and_panel_bytes(variant, op)
    tiles = count_tiles(variant, rows)
    shared = count_shared(step, op, tiles)
    panel, end = end_of_share(rank - 1, step, op), end_of_share(rank, step, op) - shared
    most = count_delta_rows(variant, op)
    if variant.weights.amx and not op.multiply:
        prepare_registers(rows)
    group, group_end = panel, panel  # panels whose deltas have been computed
    together = count_near_panels(variant, op, rows * stride, panel_bytes)
    at_once = count_rows_at_once(op)
    if together > 1:
        at_once = np.int64(ROWS)
    while True:
        if panel >= end:
            panel = take_shared(step, op, counter, shared)
            if panel < 0:
                break
            end = np.int64(0)  # the thread's own panels are done
        near = lesser(greater(1, end - panel), together)
        ahead, pace = op.weights + panel * panel_bytes + bytes_ahead(rows), _STEP_BYTES
        if tiles > 1:
            ahead, pace = op.weights + (panel + near) * panel_bytes, _STEP_BYTES // tiles
        turn = np.int64(0)  # a literal 0 has a separate type: everything would be compiled twice
        row = np.int64(0)
        while row < rows:
            own = panel + turn
            weights = op.weights + own * panel_bytes
            inputs, deltas = source + row * stride, np.int64(0)
            if op.expand:
                deltas, group, group_end = find_deltas(
                    step, op, own, end, row, rows, most, group, group_end, sums
                )
            if op.multiply:
                taken = multiply_quantised(op, rows, row, at_once, inputs, stride, weights, sums)
            else:
                taken = multiply_rows(
                    variant, rows - row, rows <= variant.product_rows, inputs, stride, weights,
                    steps, ahead, pace, sums,
                )  # fmt: skip
            finish(variant, step, op, own, row, taken, sums, deltas)
            if taken == variant.rows and not variant.weights.amx:  # in one or two halves
                ahead += steps * pace * (2 // variant.columns - 1)
            ahead += steps * pace
            turn += 1
            if turn == near:
                turn = np.int64(0)
                row += taken
        panel += near
    if variant.weights.amx and not op.multiply:
        release_registers()


@kernel
def find_deltas(step, op, panel, end, row, rows, most, group, group_end, sums):
    """Return where a panel's deltas for the rows from `row` on are, and the panels from `group` to
    before `group_end` whose deltas have been computed, after these.

    Those of `most` rows, or of all rows for several panels, are computed at once.
    """
    if row % most == 0 and (rows > most or panel < group or panel >= group_end):
        group, group_end = panel, panel + 1
        if rows <= most:
            group_end = greater(group_end, lesser(end, panel + DELTAS // rows))
        runs, run_of, _ = find_runs(step, op)
        call_adapter_kernel(
            op.expand, runs, run_of, op.site, op.offset // PANEL + panel, group_end - group, row,
            lesser(rows - row, most), step.buffers[LOW], step.low_stride,
            sums + ROWS * 4 * PANEL, 0,
        )  # fmt: skip
    place = (panel - group) * lesser(rows, most) + row % most
    return sums + (ROWS + place) * 4 * PANEL, group, group_end


@kernel
def count_shared(step, op, tiles):
    """Return how many panels at the end of every share any thread may take."""
    if tiles <= 1 and step.threads > 1:
        return op.outputs // PANEL // step.threads // _SHARED
    return np.int64(0)


@kernel
def count_delta_rows(variant, op):
    """Return how many rows' deltas are computed together.

    Only whole tiles: otherwise a tile of six rows would begin in one group of 64 and end in the
    next.
    """
    if op.multiply:
        return np.int64(ROWS)
    return np.int64(ROWS // variant.product_rows * variant.product_rows)


@kernel
def count_near_panels(variant, op, active_bytes, panel_bytes):
    """Return how many panels a block of rows is multiplied with, before the next rows are.

    Several, where not all rows, of `active_bytes`, stay in the cache: the matrix unit multiplies
    faster than they can be read from a farther one, and what it multiplies need not be unpacked.
    Deltas are computed for the rows of one panel after the other.
    """
    if op.expand or active_bytes <= _NEAR_BYTES:
        return np.int64(1)
    if op.facts_bytes or (variant.weights.amx and not op.multiply):
        return greater(1, lesser(_MOST_NEAR, _NEAR_BYTES // panel_bytes))
    return np.int64(1)


@kernel
def row_and_panel_bytes(variant, op):
    """Return the bytes of an input row of a linear layer, and of a panel of its weights."""
    if op.multiply:
        return op.inputs // BLOCK_INPUTS * op.active_bytes + op.facts_bytes, op.panel_bytes
    inputs = op.inputs
    if op.span:
        inputs = op.span
    return inputs * variant.active_bytes, op.inputs // variant.weights.step * _STEP_BYTES


@kernel
def take_shared(step, op, counter, shared):
    """Take one of the shared panels, of which each thread has `shared`; -1: none is left.

    `counter`: address of the number taken.
    """
    item = np.int64(0)
    if shared:
        item = atomic_add(counter, 1)
    if item >= shared * step.threads:
        return np.int64(-1)
    return end_of_share(item % step.threads, step, op) - shared + item // step.threads


@kernel
def count_tiles(variant, rows):
    """Return how many tiles prefetch their part of the next panel; where tiles have many rows, that
    of the last rows does not.
    """
    if variant.weights.amx:
        return (rows + variant.product_rows - 1) // variant.product_rows
    if variant.rows >= 8:
        return rows // variant.rows
    return rows // variant.rows * 2 + rows % variant.rows // 2


@kernel
def count_rows_at_once(op):
    """Return how many rows are multiplied with a panel as stored at once: without adapters, their
    room is free as well. Units begin and end anew for every call.
    """
    if op.expand:
        return np.int64(ROWS)
    return np.int64(ROWS + DELTAS)


@kernel
def multiply_quantised(op, rows, row, at_once, inputs, stride, weights, sums):
    """Multiply `at_once` of the `rows` from `row` on with a panel as stored; return how many."""
    taken = lesser(rows - row, at_once)
    mode = np.int64(UNPACK_FOR_MANY)
    if row:  # the panel has been unpacked for the first rows
        mode = np.int64(UNPACKED)
    room = sums + (ROWS + DELTAS) * 4 * PANEL
    call_panel_kernel(
        op.multiply, taken, inputs, stride, weights, op.inputs // BLOCK_INPUTS, op.span_blocks,
        op.panel_bytes, mode, room, sums,
    )  # fmt: skip
    return taken


@kernel
def bytes_ahead(rows):
    """Return how many bytes a single tile prefetches."""
    if rows > 1:
        return np.int64(_FURTHER_AHEAD)
    return np.int64(_AHEAD)


@kernel
def multiply_rows(variant, rows, alone, inputs, stride, weights, steps, ahead, pace, sums):
    """Multiply as many of the `rows` as fit into one tile; return how many.

    `alone`: these are all rows that are multiplied with this panel. If a tile is larger than the
    rows that are left, rows beyond the last are read and multiplied, and their results ignored.

    Tiles of all sizes sum a row's products in the same order, so its sums are the same to the bit
    for any number of other rows (batch invariance).
    """
    if variant.weights.amx:
        return multiply_rows_as_matrix(
            variant, rows, alone, inputs, stride, weights, steps, ahead, pace, sums
        )
    both, one, some = count(2), count(1), count(4)
    full = np.int64(variant.least_behind)
    least = np.int64(3)  # rows that a tile of four needs
    if alone:
        full = np.int64(variant.least_alone)
        least = np.int64(2)  # bound by memory
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
    """sums[rows, 16 * columns] = inputs[rows, K] x one panel, or half of it. See the module.

    `at_once`: the unrolling of the loop, whose steps are short if a tile has few rows. Unrolled
    steps share their sums: the order in which a row is summed must not depend on the number of
    rows.
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
    """Apply the epilogue of `op` to the sums of one panel, and write the result.

    `deltas`: float32 [rows, 32], what adapters add; 0: nothing.
    """
    target = step.buffers[op.target]
    scale = fill(op.scale)
    runs, run_of, _ = find_runs(step, op)
    run, gains, offsets = np.int64(-1), np.int64(0), np.int64(0)
    for i in range(rows):
        first, second = load(sums + i * 4 * PANEL), load(sums + i * 4 * PANEL + 4 * LANES)
        if op.scales:
            first = multiply(first, load(op.scales + panel * 4 * PANEL))
            second = multiply(second, load(op.scales + panel * 4 * PANEL + 4 * LANES))
        if op.bias:
            first = add(first, load(op.bias + panel * 4 * PANEL))
            second = add(second, load(op.bias + panel * 4 * PANEL + 4 * LANES))
        if deltas:
            if step.factors:
                of_row = load_int(run_of + 4 * (row + i))
                if of_row != run:
                    run = of_row
                    gains, offsets = find_factors(runs, run, op.site, op.offset // PANEL + panel)
                if gains:
                    first = fma(first, load(gains), first)
                    second = fma(second, load(gains + 4 * LANES), second)
                if offsets:
                    first = add(first, load(offsets))
                    second = add(second, load(offsets + 4 * LANES))
            first = add(first, load(deltas + i * 4 * PANEL))
            second = add(second, load(deltas + i * 4 * PANEL + 4 * LANES))
        begin = target + ((row + i) * op.width + op.offset + panel * PANEL) * 4
        if op.epilogue == ADD:
            first = fma(first, scale, load(begin))
            second = fma(second, scale, load(begin + 4 * LANES))
            store(begin, apply_soft_cap(first, op.cap))
            store(begin + 4 * LANES, apply_soft_cap(second, op.cap))
        elif op.epilogue == GATE:
            place = (row + i) * op.width + panel * LANES
            gate, second = multiply(first, scale), cut(second, op.clip)
            if op.clip > 0.0 and not op.bounds_opened:
                gate = minimum(gate, fill(op.clip))
            opened = activate(op.activation, gate, op.learned)
            if op.clip > 0.0 and op.bounds_opened:
                opened = minimum(opened, fill(op.clip))
            if op.clip > 0.0 and op.raised:
                second = add(second, fill(1.0))
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
