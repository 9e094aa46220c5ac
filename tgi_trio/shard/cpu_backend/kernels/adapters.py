"""LoRA adapters: B (A x), added to a linear layer's sums before `finish`.

A step's tokens form *runs* with one adapter, or none. `shrink` computes V = A x of every run
before the layer. `expand` computes B V for some panels, and `finish` adds that to their sums. Both
multiply half panels: 16 outputs, 64 bytes a step. However many rows a product has, each row is
summed in the same order, so a row's result is the same to the bit whatever adapters other rows
have. Adapters with DoRA or biases also have gains and offsets, which `finish` applies.

If eight rows have eight adapters, every product has one row, and all of it is as fast as A and B
can be read from memory. So an adapter is stored in the order in which it is read, layer by
layer, and is read in long stretches: B for many panels at a time, and the prefetch beyond the end
of an A is the beginning of its B.

Compiled apart from the step, which calls these kernels by address: a server without adapters does
not wait for their compilation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import greater, ints_at, lesser
from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.emit import call_address
from tgi_trio.shard.cpu_backend.kernels.tiles import fold, multiply_add, store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    fill,
    load,
    load_int,
    prefetch,
    store,
    store_active,
)
from tgi_trio.shard.cpu_backend.tables import FACTORS, PIECE, RUN, SITE, Buffer
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

MEMBER_RUNS, MEMBER_RUN_OF = int(Buffer.MEMBER_RUNS), int(Buffer.MEMBER_RUN_OF)
_ARGUMENTS = 11  # integer arguments after the variant
_HALF = 64  # bytes of one step of half a panel
_AHEAD = 4096  # bytes to prefetch
_PANELS_AHEAD = 2  # of gains and offsets
_PANELS = 32  # panels that are multiplied with all rows before the next panels are
_AT_ONCE = 32  # rows of a work item of `shrink`


@entry
def shrink(
    variant, rank, threads, runs, run_count, site, source, stride, steps, low, low_stride, sums
):
    """Write V of every run with an adapter, as activations; each thread does its share.

    `runs`: see `RUN`: first token, tokens, address of the adapter's sites or 0. A site: the address
    of its A, the number of its half panels, the address of its outputs' pieces, and their number;
    the addresses of its gains and of its offsets, float32 [outputs], 0 for zeros.
    `source`: activations, rows `stride` bytes apart, of `steps` steps. `sums`: float32 [32, 16], of
    this thread.
    """
    item = np.int64(0)
    for i in range(run_count):
        run = ints_at(runs + i * 8 * RUN, RUN)
        if run[2] == 0:
            continue
        facts = ints_at(run[2] + site * 8 * SITE, SITE)
        for half in range(facts[1]):
            weights = facts[0] + half * steps * _HALF
            for begin in range(0, run[1], _AT_ONCE):
                if item % threads == rank:
                    row, rows = run[0] + begin, lesser(run[1] - begin, _AT_ONCE)
                    multiply_half(
                        variant, rows, source + row * stride, stride, weights, steps, sums, _HALF
                    )
                    target = low + row * low_stride + half * LANES * variant.active_bytes
                    for j in range(rows):
                        store_active(variant, target + j * low_stride, load(sums + j * _HALF))
                item += 1


@entry
def expand(variant, runs, run_of, site, panel, panels, row, rows, low, low_stride, deltas, unused):
    """Write what adapters add to some panels of a layer: deltas[panels, rows, 32], float32.

    `panel`: the first panel, `row`: the first token; `run_of`: int32, the run of each token. Where
    nothing is added deltas are -0, which changes no number that it is added to.
    """
    i = np.int64(0)
    while i < rows:
        run = ints_at(runs + load_int(run_of + 4 * (row + i)) * 8 * RUN, RUN)
        own = lesser(rows - i, run[0] + run[1] - row - i)
        inputs, target = low + (row + i) * low_stride, deltas + i * 4 * PANEL
        at, count_left = panel, np.int64(0)
        pieces = np.int64(0)
        if run[2]:
            facts = ints_at(run[2] + site * 8 * SITE, SITE)
            pieces, count_left = facts[2], facts[3]
        while at < panel + panels:
            until = panel + panels
            if count_left:
                piece = ints_at(pieces, PIECE)
                pieces += 8 * PIECE
                count_left -= 1
                if piece[1] <= at:
                    continue
                begin = greater(at, lesser(piece[0], until))
                until = lesser(piece[1], until)
                clear(at, begin, panel, own, rows, target)
                expand_piece(
                    variant, piece, begin, until, panel, own, rows, inputs, low_stride, target
                )
            else:
                clear(at, until, panel, own, rows, target)
            at = until
        i += own


@kernel
def find_runs(step, op):
    """Return the runs of the rows that an operation has, the run of each, and their number."""
    if op.by_member:
        runs = step.buffers[MEMBER_RUNS]
        return runs + 8, step.buffers[MEMBER_RUN_OF], ints_at(runs, 1)[0]
    if op.wanted_only:
        return step.wanted_runs, step.wanted_run_of, step.wanted_run_count
    return step.runs, step.run_of, step.run_count


@kernel
def find_factors(runs, number, site, panel):
    """Return the addresses of gains and offsets of a run's adapter for a panel; 0 for zeros."""
    run = ints_at(runs + number * 8 * RUN, RUN)
    gains, offsets = np.int64(0), np.int64(0)
    if run[2]:
        facts = ints_at(run[2] + site * 8 * SITE, SITE)
        if facts[FACTORS]:
            gains = facts[FACTORS] + panel * 4 * PANEL
            prefetch(gains + _PANELS_AHEAD * 4 * PANEL)
            prefetch(gains + _PANELS_AHEAD * 4 * PANEL + _HALF)
        if facts[FACTORS + 1]:
            offsets = facts[FACTORS + 1] + panel * 4 * PANEL
            prefetch(offsets + _PANELS_AHEAD * 4 * PANEL)
            prefetch(offsets + _PANELS_AHEAD * 4 * PANEL + _HALF)
    return gains, offsets


@kernel
def clear(begin, end, panel, own, rows, deltas):
    """Write -0 to the panels from `begin` to `end`, to which nothing is added."""
    nothing = fill(-0.0)
    for at in range(begin, end):
        target = deltas + (at - panel) * rows * 4 * PANEL
        for j in range(2 * own):
            store(target + j * _HALF, nothing)


@kernel
def expand_piece(variant, piece, begin, end, panel, own, rows, inputs, low_stride, deltas):
    """Multiply rows of V with a piece's panels from `begin` to `end`.

    A piece: its first panel and the one after its last; the address of B; for the first half of its
    panels, where in V its inputs begin, and steps; the same for the second half.
    """
    first = inputs + piece[3] * variant.active_bytes
    second = inputs + piece[5] * variant.active_bytes
    weights = piece[2] + (begin - piece[0]) * (piece[4] + piece[6]) * _HALF
    apart = rows * 4 * PANEL
    while begin < end:  # some panels at a time, so that they are in the cache for the other tiles
        panels = lesser(end - begin, _PANELS)
        row = np.int64(0)
        while row < own:
            target = deltas + (begin - panel) * apart + row * 4 * PANEL
            x, y, left = first + row * low_stride, second + row * low_stride, own - row
            if left >= 4 and variant.rows >= 8:
                row += expand_rows(
                    variant, count(4), x, y, low_stride, weights, piece[4], piece[6], panels,
                    target, apart,
                )  # fmt: skip
            elif left >= 2:
                row += expand_rows(
                    variant, count(2), x, y, low_stride, weights, piece[4], piece[6], panels,
                    target, apart,
                )  # fmt: skip
            else:
                row += expand_rows(
                    variant, count(1), x, y, low_stride, weights, piece[4], piece[6], panels,
                    target, apart,
                )  # fmt: skip
        weights += panels * (piece[4] + piece[6]) * _HALF
        begin += panels


@kernel
def expand_rows(
    variant, rows, first, second, stride, weights, first_steps, second_steps, panels, sums, apart
):
    """Multiply a tile of rows with both halves of some panels; return the number of rows.

    `first`, `second`: V for each half. `apart`: bytes between the sums of two panels.
    """
    for _ in range(panels):
        half_product(variant, rows, first, stride, weights, first_steps, sums, 4 * PANEL)
        weights += first_steps * _HALF
        half_product(variant, rows, second, stride, weights, second_steps, sums + _HALF, 4 * PANEL)
        weights += second_steps * _HALF
        sums += apart
    return number(rows)


@kernel
def multiply_half(variant, rows, inputs, stride, weights, steps, sums, sums_stride):
    """sums[rows, 16] = inputs x half a panel, in tiles; strides are in bytes."""
    row = np.int64(0)
    while row < rows:
        x, target, left = inputs + row * stride, sums + row * sums_stride, rows - row
        if left >= 4 and variant.rows >= 8:
            row += half_product(variant, count(4), x, stride, weights, steps, target, sums_stride)
        elif left >= 2:
            row += half_product(variant, count(2), x, stride, weights, steps, target, sums_stride)
        else:
            row += half_product(variant, count(1), x, stride, weights, steps, target, sums_stride)


@kernel
def half_product(variant, rows, inputs, stride, weights, steps, sums, sums_stride):
    """Multiply some rows with half a panel; return the number of rows.

    The loop is unrolled with separate sums, for one row as for four: a single row's multiply-adds
    do not wait for each other, and all rows are summed in the same order.
    """
    one, some = count(1), count(variant.adapter_unroll)
    tile = zeros(rows, some)
    for _ in range(steps // number(some)):
        for i in range(number(some)):
            prefetch(weights + _AHEAD + i * _HALF)
        tile = multiply_add(variant.kv, rows, one, some, tile, weights, inputs, stride)
        weights += number(some) * _HALF
        inputs += number(some) * variant.kv.step_bytes
    whole = fold(rows, one, some, tile)
    for _ in range(steps % number(some)):
        whole = multiply_add(variant.kv, rows, one, one, whole, weights, inputs, stride)
        weights += _HALF
        inputs += variant.kv.step_bytes
    store_tile(rows, one, whole, sums, sums_stride)
    return number(rows)


def _caller() -> Any:
    def emit(builder: Any, signature: Any, values: Any) -> Any:
        where, *numbers = values
        return call_address(builder, where, numbers)

    return emit


@intrinsic
def call_adapter_kernel(function: Any, a: Any, b: Any, c: Any, d: Any, e: Any,
                        f: Any, g: Any, h: Any, i: Any, j: Any, k: Any) -> Any:  # fmt: skip
    """Call `shrink` or `expand` at an address, as `call_panel_kernel` does."""
    return types.none(*[types.int64] * (_ARGUMENTS + 1)), _caller()
