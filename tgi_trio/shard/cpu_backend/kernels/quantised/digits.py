"""Codes of 8 bits times activations that share a scale in each row, by a matrix unit (AMX).

The unit multiplies bytes and adds up whole numbers, which are exact. Where all inputs of an output
have one scale, and all activations of a row another, nothing but the last sum needs scaling: the
unit adds up a panel as it does for bfloat16, which it reads at half the speed.

8 bits are few for all activations of a row: one that is far larger than the others costs them their
digits. So an activation has two, by default: 16 bits, of which the upper byte and the lower one are
multiplied one after the other, and the sums of the upper ones count 256 times. That is as much work
as bfloat16 is, and closer than it by two orders.

    x = scale * (256 * upper + lower - 32768)          upper, lower: unsigned bytes
    x = scale * (upper - 128)                          one digit

A row of activations is all upper bytes, all lower ones, and `FACTS_BYTES` with the scale. Weights
are signed bytes. What the zeros of activations come to does not depend on them: it is -128 times
the sum of a span's weights, from which sums of upper digits start.

A register of activations is 64 inputs of 16 rows, one of weights 64 inputs of half a panel, as
packed: blocks of 32 inputs lie one after the other. For one digit, two registers of activations are
32 rows; for two they are both digits of 16 rows. A single row is multiplied by vectors, which come
to the same whole numbers. Sums of spans are scaled and added in order, so a
row's results are the same to the bit among any others.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import lesser
from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import float32 as f32
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.emit import (
    FLOAT,
    FLOATS,
    I32,
    I64,
    INTS,
    address,
    call,
    floats,
    ints,
    load_as,
    none,
    operation,
    pack,
    splat,
    store_as,
    unpack,
    vector,
)
from tgi_trio.shard.cpu_backend.kernels.matrix_unit import (
    ACTIVATIONS,
    HEIGHT,
    SUMS,
    WEIGHTS,
    call_unit,
    clear_sums,
    load_register,
    prepare_registers,
    release_registers,
    store_sums,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.codes import CODES
from tgi_trio.shard.cpu_backend.kernels.quantised.fetching import fetch_for_one
from tgi_trio.shard.cpu_backend.kernels.quantised.multiplier import MultiplierType
from tgi_trio.shard.cpu_backend.kernels.quantised.unpacking import unpack_panel
from tgi_trio.shard.cpu_backend.kernels.tiles import store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import CountType, count
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    fill,
    fma,
    fma_of,
    load,
    load_float,
    multiply,
    prefetch,
    prefetch_near,
    store,
    store_float,
)
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, DIGIT_ZERO, FACTS_BYTES
from tgi_trio.shard.cpu_backend.tables import UNPACKED, Buffer, Form
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

_I8 = ir.IntType(8)
_LINE = 64  # bytes: of a cache line, and of a row of a register
_STEP_BYTES = 4 * PANEL  # of four inputs of a panel, and of a row of sums
_WEIGHTS_BYTES = HEIGHT * _STEP_BYTES  # what two registers of weights are read from
_BASE = 256  # what an upper digit counts
_SHIFTING = 1.5 * 2**23  # the sum with it is rounded to an integer, in the lowest bits
_BLOCK_BYTES = 4 * BLOCK_INPUTS  # of float32
# Bytes that are prefetched ahead while memory sets the pace.
_AHEAD = 8192
DIGITS, DIGITS_16 = int(Buffer.DIGITS), int(Form.DIGITS_16)


def _write_digits(builder: Any, where: Any, halves: list[Any], inverse: Any, digits: int) -> Any:
    """Write one block, two vectors of float32, as bytes: `where` has an address for each digit.

    A sum with so large a number has the integer, rounded to nearest, in its lowest bits.
    """
    zero = float(DIGIT_ZERO * _BASE ** (digits - 1))
    sums = [fma_of(builder, half, inverse, floats(_SHIFTING + zero)) for half in halves]
    first, second = (builder.bitcast(each, CODES) for each in sums)
    for digit, place in enumerate(where):
        lowest = digits - 1 - digit
        lanes = ir.Constant(ir.VectorType(I32, BLOCK_INPUTS), list(range(lowest, 128, 4)))
        stored = store_as(builder, builder.shuffle_vector(first, second, lanes), place, 1)
    return stored


@operation(types.none, address, address, vector, vector, vector)
def store_both_digits(
    builder: Any, where: Any, apart: Any, first: Any, second: Any, inverse: Any
) -> Any:
    """Write both bytes of 32 activations, the lower ones `apart` bytes behind the upper ones."""
    places = [where, builder.add(where, apart)]
    return _write_digits(builder, places, [first, second], inverse, 2)


@operation(types.none, address, vector, vector, vector)
def store_digit(builder: Any, where: Any, first: Any, second: Any, inverse: Any) -> Any:
    """Write 32 activations of one byte."""
    return _write_digits(builder, [where], [first, second], inverse, 1)


@operation(vector, vector, vector)
def larger_size(builder: Any, x: Any, most: Any) -> Any:
    """Return the larger of |x| and `most`, which has no sign, in each lane; NaN is the largest."""
    size = builder.and_(builder.bitcast(x, INTS), ints(0x7FFFFFFF))
    most = builder.bitcast(most, INTS)
    return builder.bitcast(call(builder, f"llvm.umax.v{LANES}i32", INTS, size, most), FLOATS)


@operation(f32, vector)
def largest_size(builder: Any, sizes: Any) -> Any:
    """Return the largest lane of numbers without sign; NaN is the largest."""
    name = f"llvm.vector.reduce.umax.v{LANES}i32"
    return builder.bitcast(call(builder, name, I32, builder.bitcast(sizes, INTS)), FLOAT)


@kernel
def store_rows(step, op, source, first, end):
    """Write blocks of rows of float32 to DIGITS, from block `first` to before `end`.

    Rows have `op.width` numbers: those of an expert are several to a token. A thread computes the
    scales of all rows of which it writes a part, as others do.
    """
    inputs = op.width
    each, digits, limit = inputs // BLOCK_INPUTS, np.int64(1), np.float32(127)
    if op.forms & DIGITS_16:
        digits, limit = np.int64(2), np.float32(32767)
    block = first
    while block < end:
        row = block // each
        x = source + row * inputs * 4
        target = step.buffers[DIGITS] + row * (digits * inputs + FACTS_BYTES)
        even, odd = fill(0.0), fill(0.0)
        for i in range(0, 4 * inputs, _BLOCK_BYTES):
            even = larger_size(load(x + i), even)
            odd = larger_size(load(x + i + 4 * LANES), odd)
        size, inverse = largest_size(larger_size(even, odd)), np.float32(0)
        if size > 0.0:
            inverse = limit / size
        store_float(target + digits * inputs, size / limit)
        factor, after = fill(inverse), lesser((row + 1) * each, end)
        before = row * each
        for own in range(block - before, after - before):
            i = own * BLOCK_INPUTS
            a, b = load(x + 4 * i), load(x + 4 * i + 4 * LANES)
            if digits == 2:
                store_both_digits(target + i, inputs, a, b, factor)
            else:
                store_digit(target + i, a, b, factor)
        block = after


@entry
def multiply_digits(
    way, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes, mode, room, sums
):
    """sums[rows, 32] = inputs[rows, 32 * blocks] x one panel at `weights`.

    `inputs`: digits. The arguments are those of `multiply_by_vectors`; nothing is unpacked but for
    look-ups, and `room` is for the products of a span.
    """
    if rows == 0:
        unpack_panel(way, weights, blocks, span_blocks, np.int64(way.signs), room)
        return
    if rows == 1:
        sum_row(way, inputs, weights, blocks, span_blocks, room, sums)
        return
    at_once = np.int64(2 * HEIGHT // way.digits)
    # A single pass waits for memory; during several the next panel is read.
    ahead, pace = weights + _AHEAD, np.int64(_WEIGHTS_BYTES)
    alone = rows <= at_once
    if not alone:
        ahead, pace = weights + panel_bytes, np.int64(0)
        if mode != UNPACKED:
            passes = (rows + at_once - 1) // at_once
            pace = (panel_bytes // (passes * blocks // 2) + _LINE - 1) // _LINE * _LINE
    # Between what both registers of activations are read from: other digits, or other rows.
    apart = HEIGHT * stride
    if way.digits == 2:
        apart = blocks * BLOCK_INPUTS
    prepare_registers(rows)
    for row in range(0, rows, at_once):
        left = lesser(rows - row, at_once)
        x, target = inputs + row * stride, sums + row * _STEP_BYTES
        if way.digits == 2 or left > HEIGHT:
            sum_digits(
                way, count(2), left, x, apart, stride, weights, blocks, span_blocks, alone, ahead,
                pace, room, target,
            )  # fmt: skip
        else:
            sum_digits(
                way, count(1), left, x, apart, stride, weights, blocks, span_blocks, alone, ahead,
                pace, room, target,
            )  # fmt: skip
        ahead += blocks // 2 * pace
    release_registers()


@kernel
def sum_digits(
    way, registers, rows, inputs, apart, stride, weights, blocks, span_blocks, alone, ahead, pace,
    room, sums,
):  # fmt: skip
    """sums[rows, 32] = inputs x a panel, for as many rows as fit into the registers.

    `apart`: bytes between what both registers of activations are read from. With every 64 inputs
    `pace` bytes are prefetched from `ahead` on, if `alone` into both caches.
    """
    facts = inputs + way.digits * blocks * BLOCK_INPUTS
    for first in range(0, blocks, span_blocks):
        head = weights
        weights += way.span_bytes
        clear_sums(registers)
        for _ in range(lesser(span_blocks, blocks - first) // 2):
            for i in range(0, pace, _LINE):
                prefetch(ahead + i)
            if alone:
                for i in range(0, pace, _LINE):
                    prefetch_near(ahead + i)
            ahead += pace
            add_products_of_bytes(registers, inputs, apart, stride, weights)
            inputs += _LINE
            weights += _WEIGHTS_BYTES
        store_sums(registers, room)
        last = first + span_blocks >= blocks
        for row in range(rows):
            add_sums_of_span(
                way, room + row * _STEP_BYTES, head, first, last, facts + row * stride,
                sums + row * _STEP_BYTES,
            )  # fmt: skip


@kernel
def add_sums_of_span(way, products, head, first, last, facts, sums):
    """Add a row's products of a span to `sums`, of which they are the first if `first` is 0.

    `head`: of the span. The sums are complete with those of the `last` span.
    """
    scale = np.float32(1)
    if last:
        scale = load_float(facts)
    for half in range(0, _STEP_BYTES, 4 * LANES):
        before = load(sums + half) if first else fill(0.0)
        value = fma(read_product(way, products + half, head + half), load(head + half), before)
        store(sums + half, multiply(value, fill(scale)))


@kernel
def sum_row(way, inputs, weights, blocks, span_blocks, room, sums):
    """sums[32] = a row of inputs x a panel, by vectors: the unit would begin and end for nothing.

    Its sums are the same whole numbers.
    """
    apart = blocks * BLOCK_INPUTS
    facts = inputs + way.digits * apart
    for first in range(0, blocks, span_blocks):
        head, tile = weights, zeros(count(way.digits), count(2))
        weights += way.span_bytes
        for _ in range(lesser(span_blocks, blocks - first) * BLOCK_INPUTS // 4):
            fetch_for_one(way, weights + way.ahead, _STEP_BYTES)
            tile = add_four_inputs(way, tile, inputs, apart, weights)
            inputs += 4
            weights += _STEP_BYTES
        store_tile(count(way.digits), count(2), tile, room, HEIGHT * _STEP_BYTES)
        add_sums_of_span(way, room, head, first, first + span_blocks >= blocks, facts, sums)


@intrinsic
def add_products_of_bytes(
    registers: CountType,
    inputs: types.Integer,
    apart: types.Integer,
    stride: types.Integer,
    weights: types.Integer,
) -> Any:
    """Add the products of 64 inputs of one or two registers of activations with those of a panel.

    `inputs`: bytes of the first row, whose rows are `stride` apart; the second register is read
    `apart` bytes behind.
    """

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, first, between, step, panel = values
        for half in range(2):
            place = builder.add(panel, I64(_LINE * half))
            load_register(builder, WEIGHTS + half, place, I64(_STEP_BYTES))
        for register in range(registers.value):
            place = builder.add(first, between) if register else first
            load_register(builder, ACTIVATIONS + register, place, step)
            for half in range(2):
                used = SUMS + 2 * register + half, ACTIVATIONS + register, WEIGHTS + half
                call_unit(builder, "llvm.x86.tdpbusd", *map(_I8, used))
        return none()

    return types.none(registers, *[types.int64] * 4), emit


@intrinsic
def add_four_inputs(
    multiplier: MultiplierType,
    tile: types.UniTuple,
    inputs: types.Integer,
    apart: types.Integer,
    weights: types.Integer,
) -> Any:
    """Return a tile of whole numbers, a row for each digit, + four inputs x both halves of a panel.

    `apart`: bytes between the digits of an input.
    """

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, tile_value, first, between, panel = values
        sums = unpack(builder, tile_value, tile.count)
        halves = [load_as(builder, builder.add(panel, I64(_LINE * i)), INTS) for i in range(2)]
        for digit in range(multiplier.multiplier.digits):
            place = builder.add(first, between) if digit else first
            x = splat(builder, load_as(builder, place, I32, 1), INTS)
            for half, codes in enumerate(halves):
                i = 2 * digit + half
                total = builder.bitcast(sums[i], INTS)
                total = call(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, total, x, codes)
                sums[i] = builder.bitcast(total, FLOATS)
        return pack(builder, sums)

    return tile(multiplier, tile, *[types.int64] * 3), emit


@intrinsic
def read_product(multiplier: MultiplierType, sums: types.Integer, head: types.Integer) -> Any:
    """Return 16 products of integers as float32, from the sums of one digit or of both.

    `head`: where the scales of the outputs lie, before what their sums start from.
    """
    both = multiplier.multiplier.digits == 2

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, where, scales = values
        starts = load_as(builder, builder.add(scales, I64(4 * PANEL)), INTS)
        upper = builder.sitofp(builder.add(load_as(builder, where, INTS), starts), FLOATS)
        if not both:
            return upper
        lower = load_as(builder, builder.add(where, I64(HEIGHT * _STEP_BYTES)), INTS)
        return fma_of(builder, upper, floats(_BASE), builder.sitofp(lower, FLOATS))

    return vector(multiplier, types.int64, types.int64), emit
