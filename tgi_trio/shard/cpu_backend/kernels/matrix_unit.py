"""Products of panels and of keys by the matrix unit (AMX): registers of 16 rows of 64 bytes.

A register of activations is 16 rows of 32 bfloat16 features; one of weights is 16 steps of half a
panel, 64 bytes of each. One instruction multiplies both and adds 16 x 16 products of 32 features to
a register of float32 sums. Two registers of activations and both halves of a panel give four of
sums: 32 rows of 32 outputs, and all eight registers are in use.

Up to 16 rows the registers of activations and sums have as many rows. From 17 on they have all 16,
some of which may lie beyond the last row: they are multiplied, and their results ignored.

The unit adds up the products of the first feature of each pair, in order, and those of the second;
then it adds the sum of both to the register of sums. It does so for each row by itself, so a row's
sums are the same to the bit whatever other rows there are. There is one way to the sums for any
number of rows: AVX512's dot product would add them up in another order.

K of a block of 16 tokens is laid out as a register of weights, so scores of attention are such
products, of queries with the keys of two blocks at a time.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import greater, lesser
from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.emit import I64, address, at, none, operation
from tgi_trio.shard.cpu_backend.kernels.tiles import add_tile, multiply_add, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import CountType, count, number
from tgi_trio.shard.cpu_backend.kernels.vectors import prefetch, prefetch_near
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

HEIGHT = 16  # rows of a register; steps of a panel that one of weights holds
_LINE = 64  # bytes of a row of a register
_STEP_BYTES = 4 * PANEL
_WEIGHTS_BYTES = HEIGHT * _STEP_BYTES  # what two registers of weights are read from
# Bytes that a lone block prefetches, into both caches: with one of them alone memory is read a
# sixth slower.
_AHEAD = 3072
SUMS, ACTIVATIONS, WEIGHTS = 0, 4, 6  # the first register of each: 4, 2 and 2
_I8 = ir.IntType(8)
_PALETTE = 1  # the only one: 8 registers


def call_unit(builder: Any, name: str, *values: Any) -> Any:
    """Call an intrinsic of LLVM that returns nothing."""
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    found = builder.module.globals.get(name)
    builder.call(found or ir.Function(builder.module, kind, name), values)
    return none()


def describe_registers(activations: int, width: int, height: int = HEIGHT) -> NDArray[np.uint8]:
    """Return the 64 bytes that tell the unit the sizes of its registers.

    `activations`: rows of activations and sums, 1 to 16; `width`: bytes of a row of activations,
    which are multiplied with `height` rows of weights.
    """
    told = np.zeros(64, np.uint8)
    told[0] = _PALETTE
    widths, heights = told[16:32].view("<u2"), told[48:56]
    widths[:] = _LINE
    widths[ACTIVATIONS:WEIGHTS] = width
    heights[:] = activations
    heights[WEIGHTS:] = height
    return told


def keep_constant(builder: Any, name: str, told: NDArray[np.uint8]) -> Any:
    """Return the address of constant bytes, which a module has once by this name."""
    made = builder.module.globals.get(name)
    if made is None:
        kind = ir.ArrayType(_I8, told.size)
        made = ir.GlobalVariable(builder.module, kind, name)
        made.initializer = ir.Constant(kind, bytearray(told.tobytes()))
        made.global_constant, made.linkage, made.align = True, "internal", 64
    return builder.ptrtoint(made, I64)


@operation(types.none, address)
def configure_registers(builder: Any, rows: Any) -> Any:
    """Let registers of activations and sums have so many rows, 1 to 16."""
    layouts = np.stack([describe_registers(each, _LINE) for each in range(1, HEIGHT + 1)])
    first = keep_constant(builder, "layouts_of_matrix_registers", layouts)
    place = builder.add(first, builder.mul(builder.sub(rows, I64(1)), I64(64)))
    return call_unit(builder, "llvm.x86.ldtilecfg", at(builder, place))


@operation(types.none)
def release_registers(builder: Any) -> Any:
    """Leave nothing in the registers that the system would have to save for this thread."""
    return call_unit(builder, "llvm.x86.tilerelease")


@intrinsic
def clear_sums(blocks: CountType) -> Any:
    """Set the sums of 16 times `blocks` rows to 0."""

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        for register in range(2 * blocks.value):
            call_unit(builder, "llvm.x86.tilezero", _I8(SUMS + register))
        return none()

    return types.none(blocks), emit


@intrinsic
def add_products(
    blocks: CountType,
    inputs: types.Integer,
    stride: types.Integer,
    weights: types.Integer,
) -> Any:
    """Add the products of 32 features of 16 times `blocks` rows with 16 steps of a panel.

    `inputs`: bfloat16 activations of the first row, whose rows are `stride` bytes apart.
    """

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, rows, between, panel = values
        for half in range(2):
            place = builder.add(panel, I64(_LINE * half))
            load_register(builder, WEIGHTS + half, place, I64(_STEP_BYTES))
        for block in range(blocks.value):
            place = builder.add(rows, builder.mul(between, I64(HEIGHT * block)))
            load_register(builder, ACTIVATIONS + block, place, between)
            for half in range(2):
                registers = SUMS + 2 * block + half, ACTIVATIONS + block, WEIGHTS + half
                call_unit(builder, "llvm.x86.tdpbf16ps", *map(_I8, registers))
        return none()

    return types.none(blocks, types.int64, types.int64, types.int64), emit


def load_register(builder: Any, register: int, place: Any, stride: Any) -> None:
    """Read the rows of a register, `stride` bytes apart."""
    call_unit(builder, "llvm.x86.tileloadd64", _I8(register), at(builder, place), stride)


@intrinsic
def store_sums(blocks: CountType, where: types.Integer) -> Any:
    """Write the sums of 16 times `blocks` rows: float32 [rows, 32]."""

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        for block in range(blocks.value):
            for half in range(2):
                place = HEIGHT * block * _STEP_BYTES + 4 * LANES * half
                place = at(builder, builder.add(values[1], I64(place)))
                register = _I8(SUMS + 2 * block + half)
                call_unit(builder, "llvm.x86.tilestored64", register, place, I64(_STEP_BYTES))
        return none()

    return types.none(blocks, types.int64), emit


@intrinsic
def add_scores(
    queries: types.Integer, stride: types.Integer, a: types.Integer, b: types.Integer
) -> Any:
    """Add the products of 32 numbers of queries with those of the keys of two blocks of tokens.

    `queries`: bfloat16, rows `stride` bytes apart. `a`, `b`: 16 steps of 16 tokens, 64 bytes each.
    """

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        rows, between, *keys = values
        load_register(builder, ACTIVATIONS, rows, between)
        for block, place in enumerate(keys):
            load_register(builder, WEIGHTS + block, place, I64(_LINE))
            registers = SUMS + block, ACTIVATIONS, WEIGHTS + block
            call_unit(builder, "llvm.x86.tdpbf16ps", *map(_I8, registers))
        return none()

    return types.none(*[types.int64] * 4), emit


@intrinsic
def store_scores(where: types.Integer, stride: types.Integer) -> Any:
    """Write the scores of two blocks, float32 [rows, 32], with rows `stride` bytes apart."""

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        for block in range(2):
            place = at(builder, builder.add(values[0], I64(_LINE * block)))
            call_unit(builder, "llvm.x86.tilestored64", _I8(SUMS + block), place, values[1])
        return none()

    return types.none(types.int64, types.int64), emit


@kernel
def score_two_blocks(queries, stride, a, b, size, scores, scores_stride):
    """scores[row, 32] = query of the row . keys of the tokens of two blocks, of `size` bytes each.

    The registers have as many rows as there are queries.
    """
    clear_sums(count(1))
    for i in range(0, size, HEIGHT * _LINE):
        add_scores(queries, stride, a + i, b + i)
        queries += _LINE
    store_scores(scores, scores_stride)


@kernel
def prepare_registers(rows):
    """Prepare for products of so many rows, or of none; `release_registers` follows them."""
    configure_registers(greater(1, lesser(rows, HEIGHT)))


@kernel
def multiply_rows_as_matrix(
    variant, rows, alone, inputs, stride, weights, steps, ahead, pace, sums
):
    """Multiply as many of the `rows` as fit into the registers; return how many.

    The arguments are those of `linear.multiply_rows`. The registers have been prepared.
    """
    if rows > HEIGHT:
        return multiply_blocks(
            variant, count(2), rows, alone, inputs, stride, weights, steps, ahead, pace, sums
        )
    return multiply_blocks(
        variant, count(1), rows, alone, inputs, stride, weights, steps, ahead, pace, sums
    )


@kernel
def multiply_blocks(
    variant, blocks, rows, alone, inputs, stride, weights, steps, ahead, pace, sums
):
    """sums[rows, 32] = inputs x a panel, for up to 16 times `blocks` rows; return how many."""
    if alone:
        ahead, pace = weights + _AHEAD, np.int64(_STEP_BYTES)
    clear_sums(blocks)
    for _ in range(steps // HEIGHT):
        if alone:
            for i in range(0, _WEIGHTS_BYTES, _LINE):
                prefetch(ahead + i)
            for i in range(0, _WEIGHTS_BYTES, _LINE):
                prefetch_near(ahead + i)
        else:
            for i in range(0, HEIGHT * pace, _LINE):
                prefetch(ahead + i)
        ahead += HEIGHT * pace
        add_products(blocks, inputs, stride, weights)
        inputs += _LINE
        weights += _WEIGHTS_BYTES
    store_sums(blocks, sums)
    taken = lesser(rows, HEIGHT * number(blocks))
    if steps % HEIGHT:
        add_rest(variant, taken, inputs, stride, weights, steps % HEIGHT, sums)
    return taken


@kernel
def add_rest(variant, rows, inputs, stride, weights, steps, sums):
    """Add the products of the last steps, which fill no register, row by row."""
    one, both = count(1), count(2)
    for row in range(rows):
        tile, x, w = zeros(one, both), inputs + row * stride, weights
        for _ in range(steps):
            tile = multiply_add(variant.weights, one, both, one, tile, w, x, stride)
            x += variant.weights.step_bytes
            w += _STEP_BYTES
        add_tile(one, both, tile, sums + row * _STEP_BYTES, _STEP_BYTES)
