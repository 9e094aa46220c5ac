"""What LoRA adapters add to the rows of a linear layer: B (A x), between its product and `finish`.

A step's tokens lie in *runs* that have one adapter, or none. `shrink` computes V = A x of every run
before the layer, `expand` adds B V to the sums of a panel. Both multiply halves of panels: 16
outputs, 64 bytes a step. However many rows a product has, a row's numbers are added in the same
order, so a row gets the same bits whatever adapters the others have.

Compiled apart from the step, which calls them by their addresses: a server without adapters does
not wait for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import typeof, types
from numba.extending import intrinsic

from tgi_trio.shard.numba_backend.kernels import entry, kernel
from tgi_trio.shard.numba_backend.kernels.arrays import ints_at, lesser
from tgi_trio.shard.numba_backend.kernels.emit import I32, I64, POINTER, none
from tgi_trio.shard.numba_backend.kernels.tiles import (
    add_tile,
    fold,
    multiply_add,
    store_tile,
    zeros,
)
from tgi_trio.shard.numba_backend.kernels.variant import Variant, count, number
from tgi_trio.shard.numba_backend.kernels.vectors import (
    load,
    load_int,
    multiply,
    prefetch,
    store,
    store_active,
)
from tgi_trio.shard.numba_backend.weight_layout import LANES, PANEL

_ARGUMENTS = 11  # integers, behind the variant
_HALF = 64  # bytes of a step of half a panel
_AHEAD = 2048  # bytes that are fetched ahead
_AT_ONCE = 32  # rows of a piece of work of `shrink`
# Records, in int64: of a run, of a site of an adapter, of half a panel of its outputs.
RUN, SITE, HALF = 3, 3, 3


@entry
def shrink(
    variant, rank, threads, runs, run_count, site, source, stride, steps, low, low_stride, sums
):
    """Write V of every run that has an adapter, as activations; every thread takes its share.

    `runs`: see `RUN`: first token, tokens, the adapter's sites or 0. A site's A: its address, how
    many halves of panels it has, and the address of its outputs' halves. `source`: activations,
    rows `stride` bytes apart; `steps` of them. `sums`: float32 [32, 16] of this thread's own.
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
                        variant, 0, rows, source + row * stride, stride, weights, steps, sums, _HALF
                    )
                    target = low + row * low_stride + half * LANES * variant.active_bytes
                    for j in range(rows):
                        store_active(variant, target + j * low_stride, load(sums + j * _HALF))
                item += 1


@entry
def expand(variant, runs, run_of, site, half, row, rows, low, low_stride, scales, sums, unused):
    """Add B V to sums[rows, 32] of a panel, whose first half is number `half` of the layer.

    `run_of`: int32, the run of each token; `row`: the first token. `scales`: what the sums are
    multiplied with first, float32 [32], or 0. A half of the outputs: the address of its B, where
    its V begins, and its steps.
    """
    if scales:
        for i in range(rows):
            place = sums + i * 4 * PANEL
            store(place, multiply(load(place), load(scales)))
            place += 4 * LANES
            store(place, multiply(load(place), load(scales + 4 * LANES)))
    i = np.int64(0)
    while i < rows:
        run = ints_at(runs + load_int(run_of + 4 * (row + i)) * 8 * RUN, RUN)
        own = lesser(rows - i, run[0] + run[1] - row - i)
        if run[2]:
            outputs = ints_at(run[2] + site * 8 * SITE, SITE)[2]
            inputs = low + (row + i) * low_stride
            for column in range(2):
                if outputs:
                    facts = ints_at(outputs + (half + column) * 8 * HALF, HALF)
                    if facts[2]:
                        multiply_half(
                            variant, 1, own, inputs + facts[1] * variant.active_bytes, low_stride,
                            facts[0], facts[2], sums + i * 4 * PANEL + column * _HALF, 4 * PANEL,
                        )  # fmt: skip
        i += own


@kernel
def multiply_half(variant, adds, rows, inputs, stride, weights, steps, sums, sums_stride):
    """sums[rows, 16] = inputs x half a panel, or (`adds`) more by that; rows of both lie apart."""
    row = np.int64(0)
    while row < rows:
        x, target, left = inputs + row * stride, sums + row * sums_stride, rows - row
        if left >= 4 and variant.rows >= 8:
            row += half_product(
                variant, count(4), adds, x, stride, weights, steps, target, sums_stride
            )
        elif left >= 2:
            row += half_product(
                variant, count(2), adds, x, stride, weights, steps, target, sums_stride
            )
        else:
            row += half_product(
                variant, count(1), adds, x, stride, weights, steps, target, sums_stride
            )


@kernel
def half_product(variant, rows, adds, inputs, stride, weights, steps, sums, sums_stride):
    """Multiply some rows with half a panel; return how many.

    Four steps at a time have sums of their own, for one row as for four: a lone row's
    multiply-adds need not wait for each other, and all rows are added up in the same order.
    """
    one, four = count(1), count(4)
    tile = zeros(rows, four)
    for _ in range(steps // 4):
        for i in range(4):
            prefetch(weights + _AHEAD + i * _HALF)
        tile = multiply_add(variant.kv, rows, one, four, tile, weights, inputs, stride)
        weights += 4 * _HALF
        inputs += 4 * variant.kv.step_bytes
    whole = fold(rows, one, four, tile)
    for _ in range(steps % 4):
        whole = multiply_add(variant.kv, rows, one, one, whole, weights, inputs, stride)
        weights += _HALF
        inputs += variant.kv.step_bytes
    if adds:
        add_tile(rows, one, whole, sums, sums_stride)
    else:
        store_tile(rows, one, whole, sums, sums_stride)
    return number(rows)


@dataclass(frozen=True, slots=True)
class AdapterKernels:
    """Both, compiled for a variant: their addresses."""

    shrink: int
    expand: int


def compile_adapter_kernels(variant: Variant) -> AdapterKernels:
    """Compile, or take from the cache; raises what the compiler raises without instructions."""
    signature = (typeof(variant), *[types.int64] * _ARGUMENTS)
    addresses = []
    for function in (shrink, expand):
        function.compile(signature)
        made = function.overloads[signature]
        addresses.append(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))
    return AdapterKernels(*addresses)


def _caller() -> Any:
    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        where, *numbers = values
        kind = ir.FunctionType(I32, [POINTER] * 3 + [I64] * _ARGUMENTS)
        result, problem = builder.alloca(POINTER), builder.alloca(POINTER)
        function = builder.inttoptr(where, ir.PointerType(kind))
        builder.call(function, [result, problem, ir.Constant(POINTER, None), *numbers])
        return none()

    return emit


@intrinsic
def call_adapter_kernel(context: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any,
                        f: Any, g: Any, h: Any, i: Any, j: Any, k: Any) -> Any:  # fmt: skip
    """Call `shrink` or `expand` at an address, as `call_panel_kernel` does."""
    return types.none(*[types.int64] * (_ARGUMENTS + 1)), _caller()
