"""Unpacked panels of codes times many rows, by a matrix unit (AMX) that multiplies bytes.

Half a block of weights is a register as it is: eight rows of 64 bytes, four inputs of 16 outputs in
each. Activations are read where they lie, 32 bytes of 16 rows. One instruction multiplies both and
leaves 16 x 16 sums of 32 products, the very integers that dot products of bytes come to. They go
through memory into vectors, and are scaled and added as those of `blocks.py` are, block by block.
So a row's results are the same to the bit by either way, and few rows need no matrix unit.

Where a block has two parts with a scale each, there are two such products of 16 inputs.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np

from tgi_trio.shard.cpu_backend.kernels import entry, kernel
from tgi_trio.shard.cpu_backend.kernels.arrays import greater
from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.emit import (
    I64,
    INTS,
    at,
    load_as,
    none,
    pack,
    unpack,
)
from tgi_trio.shard.cpu_backend.kernels.matrix_unit import (
    ACTIVATIONS,
    HEIGHT,
    SUMS,
    WEIGHTS,
    call_unit,
    describe_registers,
    keep_constant,
    load_register,
    release_registers,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.blocks import add_scaled
from tgi_trio.shard.cpu_backend.kernels.quantised.codes import (
    in_column,
    offset,
    read_lows,
    read_scales,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.multiplier import MultiplierType
from tgi_trio.shard.cpu_backend.kernels.quantised.panels import choose_mode, multiply_tiles
from tgi_trio.shard.cpu_backend.kernels.quantised.unpacking import unpack_panel
from tgi_trio.shard.cpu_backend.kernels.tiles import store_tile, zeros
from tgi_trio.shard.cpu_backend.kernels.variant import CountType, count
from tgi_trio.shard.cpu_backend.kernels.vectors import prefetch
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS
from tgi_trio.shard.cpu_backend.tables import DIRECT, UNPACK, UNPACKED
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

i64 = types.int64
_I8 = ir.IntType(8)
_LINE = 64
_TILE_BYTES = 4 * LANES * HEIGHT  # of the sums of one part


@intrinsic
def configure_for_codes(multiplier: MultiplierType) -> Any:
    """Let registers have the sizes of a part of a block; `release_registers` follows."""
    width = BLOCK_INPUTS // multiplier.multiplier.kind.parts

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        told = describe_registers(HEIGHT, width, width // 4)
        place = keep_constant(builder, f"matrix_registers_of_{width}_bytes", told)
        return call_unit(builder, "llvm.x86.ldtilecfg", at(builder, place))

    return types.none(multiplier), emit


@intrinsic
def begin_products(
    multiplier: MultiplierType,
    later: CountType,
    column: types.Integer,
    panel: types.Integer,
    inputs: types.Integer,
    stride: types.Integer,
) -> Any:
    """Multiply 16 rows with a block's half, part by part; the sums stay in the block's registers.

    `panel`, `inputs`: where a block is and what it is multiplied with; the one that is meant is
    `later` blocks after it. Rows are `stride` bytes apart.
    """
    way = multiplier.multiplier
    name = "llvm.x86.tdpbssd" if way.signed else "llvm.x86.tdpbsud"
    parts, ahead = way.kind.parts, later.value
    width = BLOCK_INPUTS // parts

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, _, half, block, rows, between = values
        block = offset(builder, block, ahead * way.block_bytes + way.head_bytes)
        codes = in_column(builder, block, half, _LINE)
        for part in range(parts):
            own = ahead % way.slots * parts + part
            registers = SUMS + own, ACTIVATIONS + own % 2, WEIGHTS + own % 2
            place = offset(builder, codes, part * width * PANEL)
            load_register(builder, registers[2], place, I64(4 * PANEL))
            place = offset(builder, rows, ahead * way.active_bytes + part * width)
            load_register(builder, registers[1], place, between)
            call_unit(builder, "llvm.x86.tilezero", _I8(registers[0]))
            call_unit(builder, name, *map(_I8, registers))
        return none()

    return types.none(multiplier, later, *[i64] * 4), emit


@intrinsic
def store_products(multiplier: MultiplierType, later: CountType, products: types.Integer) -> Any:
    """Write the sums of a block to its place in `products`: int32 [2, parts, rows, 16].

    Two places are enough, and more would be in the way of loads with like addresses.
    """
    way = multiplier.multiplier
    parts = way.kind.parts

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        for part in range(parts):
            place = (later.value % 2 * parts + part) * _TILE_BYTES
            place = at(builder, offset(builder, values[2], place))
            register = _I8(SUMS + later.value % way.slots * parts + part)
            call_unit(builder, "llvm.x86.tilestored64", register, place, I64(_LINE))
        return none()

    return types.none(multiplier, later, i64), emit


@intrinsic
def add_products(
    multiplier: MultiplierType,
    later: CountType,
    tile: types.UniTuple,
    products: types.Integer,
    column: types.Integer,
    panel: types.Integer,
    inputs: types.Integer,
    stride: types.Integer,
) -> Any:
    """Return tile + what `store_products` has written of a block, scaled."""
    way = multiplier.multiplier
    begin = later.value % 2 * way.kind.parts * _TILE_BYTES

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, _, tile_value, where, half, block, first, between = values
        head = offset(builder, block, later.value * way.block_bytes)
        scales = read_scales(builder, way, head, head, half)
        lows = read_lows(builder, way, head, head, half)
        sums = []
        for row, total in enumerate(unpack(builder, tile_value, tile.count)):
            facts = builder.add(first, builder.mul(between, I64(row)))
            facts = offset(builder, facts, later.value * way.active_bytes + BLOCK_INPUTS)
            places = [begin + part * _TILE_BYTES + _LINE * row for part in range(len(scales))]
            wholes = [load_as(builder, offset(builder, where, each), INTS) for each in places]
            sums.append(add_scaled(builder, total, wholes, scales, lows, facts))
        return pack(builder, sums)

    return tile(multiplier, later, tile, *[i64] * 5), emit


@entry
def multiply_codes(
    way, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes, mode, room, sums
):
    """sums[rows, 32] = inputs[rows, 32 * blocks] x one panel at `weights`.

    The arguments are those of `multiply_by_vectors`, which multiplies few rows. Behind an unpacked
    panel there is `room` for products.
    """
    if rows == 0:  # a look-up wants unsigned codes
        unpack_panel(way, weights, blocks, span_blocks, np.int64(0), room)
        return
    mode = choose_mode(way, rows, mode)
    bytes_ahead = np.int64(0)
    if mode == UNPACK:
        unpack_panel(way, weights, blocks, span_blocks, np.int64(way.signs), room)
        bytes_ahead = panel_bytes
    if mode == DIRECT or (mode == UNPACKED and rows <= way.rows):  # a unit takes the time of 16
        multiply_tiles(
            way, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes,
            np.int64(DIRECT), room, sums,
        )  # fmt: skip
    else:
        multiply_as_matrix(
            way.unpacked, rows, inputs, stride, room, blocks, weights + panel_bytes, bytes_ahead,
            sums,
        )  # fmt: skip


@kernel
def multiply_as_matrix(way, rows, inputs, stride, panel, blocks, ahead, bytes_ahead, sums):
    """sums[rows, 32] = inputs x an unpacked panel, 16 rows at a time, read and written as such.

    Behind the panel there is room for products. `bytes_ahead` are prefetched from `ahead` on.
    """
    configure_for_codes(way)
    passes = greater(1, (rows + HEIGHT - 1) // HEIGHT * 2)
    pace = (bytes_ahead // (passes * blocks) + _LINE - 1) // _LINE * _LINE
    end = ahead + bytes_ahead
    for row in range(0, rows, HEIGHT):
        for column in range(2):
            sum_column(
                way, column, panel, blocks, inputs + row * stride, stride, ahead, pace,
                sums + row * 4 * PANEL,
            )  # fmt: skip
            ahead += blocks * pace
            if ahead >= end:
                pace = np.int64(0)
    release_registers()


@kernel
def sum_column(way, column, panel, blocks, inputs, stride, ahead, pace, sums):
    """sums[16, 16] of a half of a panel; with every block `pace` bytes are prefetched.

    The unit works in order: what waits for a product keeps the next ones waiting. So products are
    stored when others have been begun, and are read later still. Blocks take turns in the slots;
    those that are left over, which fill no round, are multiplied one by one.
    """
    zero, one, two, three = count(0), count(1), count(2), count(3)
    products = panel + blocks * way.block_bytes
    rounds = blocks // way.slots
    tile = zeros(count(16), one)
    if rounds:
        begin_products(way, zero, column, panel, inputs, stride)
        if way.slots == 4:
            begin_products(way, one, column, panel, inputs, stride)
            begin_products(way, two, column, panel, inputs, stride)
        store_products(way, zero, products)
    for left in range(rounds, 0, -1):
        for i in range(0, way.slots * pace, _LINE):
            prefetch(ahead + i)
        ahead += way.slots * pace
        if way.slots == 4:
            begin_products(way, three, column, panel, inputs, stride)
            store_products(way, one, products)
            tile = add_products(way, zero, tile, products, column, panel, inputs, stride)
            if left > 1:
                begin_products(way, count(4), column, panel, inputs, stride)
            store_products(way, two, products)
            tile = add_products(way, one, tile, products, column, panel, inputs, stride)
            if left > 1:
                begin_products(way, count(5), column, panel, inputs, stride)
            store_products(way, three, products)
            tile = add_products(way, two, tile, products, column, panel, inputs, stride)
            if left > 1:
                begin_products(way, count(6), column, panel, inputs, stride)
            store_products(way, zero, products)
            tile = add_products(way, three, tile, products, column, panel, inputs, stride)
        else:
            begin_products(way, one, column, panel, inputs, stride)
            tile = add_products(way, zero, tile, products, column, panel, inputs, stride)
            store_products(way, one, products)
            if left > 1:
                begin_products(way, two, column, panel, inputs, stride)
            tile = add_products(way, one, tile, products, column, panel, inputs, stride)
            store_products(way, two, products)
        inputs += way.slots * way.active_bytes
        panel += way.slots * way.block_bytes
    for _ in range(blocks % way.slots):
        begin_products(way, zero, column, panel, inputs, stride)
        store_products(way, zero, products)
        tile = add_products(way, zero, tile, products, column, panel, inputs, stride)
        inputs += way.active_bytes
        panel += way.block_bytes
    store_tile(count(16), one, tile, sums + column * 4 * LANES, 4 * PANEL)
