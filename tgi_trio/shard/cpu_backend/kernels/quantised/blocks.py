"""A block of quantised weights: multiplied with a tile's rows, or unpacked for many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.emit import (
    FLOAT,
    FLOATS,
    I32,
    I64,
    INTS,
    floats,
    ints,
    load_as,
    none,
    pack,
    splat,
    store_as,
    unpack,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.codes import (
    CODES,
    PAIRS,
    VECTORS,
    constant,
    offset,
    read_code,
    read_codes,
    read_lows,
    read_scales,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.dots import Operands, sum_products
from tgi_trio.shard.cpu_backend.kernels.quantised.floats import add_floats, read_numbers
from tgi_trio.shard.cpu_backend.kernels.quantised.multiplier import MultiplierType
from tgi_trio.shard.cpu_backend.kernels.quantised.neighbours import (
    scale_neighbours,
    store_neighbours,
)
from tgi_trio.shard.cpu_backend.kernels.variant import CountType
from tgi_trio.shard.cpu_backend.kernels.vectors import fma_of
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, MOST_ZERO
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

i64 = types.int64
_COLUMNS = PANEL // LANES


@intrinsic
def add_block(
    multiplier: MultiplierType,
    rows: CountType,
    columns: CountType,
    tile: types.UniTuple,
    column: types.Integer,
    table: types.Integer,
    span_head: types.Integer,
    block: types.Integer,
    inputs: types.Integer,
    stride: types.Integer,
) -> Any:
    """Return tile + inputs x a block of weights.

    `table`: address of the values of 4-bit codes, for kinds with such a table. `inputs`:
    activations of the first row, see `activations.py`; further rows are `stride` bytes apart.
    `tile`: rows x columns vectors, from `column` on. Blocks are added in the same order in tiles of
    all sizes, so a row's results do not depend on other rows.
    """
    way = multiplier.multiplier

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        tile_value, first_column, table_at, head_at, block_at, first, step = values[3:]
        sums = unpack(builder, tile_value, tile.count)
        codes_at = offset(builder, block_at, way.kind.head_bytes)
        rows_at = [builder.add(first, builder.mul(step, I64(row))) for row in range(rows.value)]
        for number in range(columns.value):
            column = builder.add(first_column, I64(number))
            scales = read_scales(builder, way, block_at, head_at, column)
            if way.kind.floating:
                own = slice(number, None, columns.value)
                sums[own] = add_floats(
                    builder, way, sums[own], table_at, codes_at, column, scales[0], rows_at
                )
                continue
            lows = read_lows(builder, way, block_at, head_at, column)
            own = slice(number, None, columns.value)
            code = partial(_read_code, builder, way, codes_at, column)
            sums[own] = _add_rows(builder, way, sums[own], code, scales, lows, rows_at)
        return pack(builder, sums)

    return tile(multiplier, rows, columns, tile, i64, i64, i64, i64, i64, i64), emit


@intrinsic
def add_unscaled(
    multiplier: MultiplierType,
    tile: types.UniTuple,
    table: types.Integer,
    block: types.Integer,
    inputs: types.Integer,
) -> Any:
    """Return a row's tile + 32 float32 activations x a block's numbers, without their scales.

    The order is that of a matrix unit that multiplies pairs.
    """
    way = replace(multiplier.multiplier, active_bits=32)

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, tile_value, table_at, block_at, x = values
        codes_at, one = offset(builder, block_at, way.kind.head_bytes), floats(1.0)
        sums = unpack(builder, tile_value, tile.count)
        for column in range(tile.count):
            own = slice(column, column + 1)
            sums[own] = add_floats(
                builder, way, sums[own], table_at, codes_at, I64(column), one, [x]
            )
        return pack(builder, sums)

    return tile(multiplier, tile, i64, i64, i64), emit


@intrinsic
def add_span(
    multiplier: MultiplierType,
    tile: types.UniTuple,
    span: types.UniTuple,
    span_head: types.Integer,
) -> Any:
    """Return a row's tile + the sums of a span times their scales."""
    way = multiplier.multiplier

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, tile_value, span_value, head = values
        totals, sums = (unpack(builder, each, tile.count) for each in (tile_value, span_value))
        for column, own in enumerate(sums):
            scale = read_scales(builder, way, head, head, I64(column))[0]
            totals[column] = fma_of(builder, own, scale, totals[column])
        return pack(builder, totals)

    return tile(multiplier, tile, span, i64), emit


def _add_rows(
    builder: Any,
    way: Multiplier,
    totals: list[Any],
    code: Callable[[int], Any],
    scales: list[Any],
    lows: list[Any],
    rows_at: list[Any],
) -> list[Any]:
    """Return totals + the activations of each row times a column of a block."""
    bits = way.active_bits
    facts = [offset(builder, x, BLOCK_INPUTS * bits // 8) for x in rows_at]
    weighted: list[Any] = [None] * len(rows_at)
    kind = CODES if bits == 8 else PAIRS

    def read(row: int, place: int) -> Any:
        return _everywhere(builder, offset(builder, rows_at[row], 4 * place), kind)

    operands = Operands(code, read, way.kind.largest_code if bits == 8 else None)
    each = VECTORS * bits // 8 // len(scales)
    for part, scale in enumerate(scales):
        places = range(part * each, (part + 1) * each)
        starts = [_minus_zero(builder, way, fact, part) for fact in facts]
        wholes = sum_products(builder, way.dots, operands, places, starts)
        for row, whole in enumerate(wholes):
            weighted[row] = _weigh(builder, weighted[row], whole, scale)
    return [
        _add_lows(builder, total, more, fact, lows)
        for total, more, fact in zip(totals, weighted, facts, strict=True)
    ]


def add_scaled(
    builder: Any, total: Any, wholes: Sequence[Any], scales: list[Any], lows: list[Any], facts: Any
) -> Any:
    """Return total + a row's sums of products, one for each of the scales, scaled, less the lows.

    `facts`: the address after the row's activations. The order is that of `add_block`.
    """
    weighted = None
    for whole, scale in zip(wholes, scales, strict=True):
        weighted = _weigh(builder, weighted, whole, scale)
    return _add_lows(builder, total, weighted, facts, lows)


def _weigh(builder: Any, weighted: Any, whole: Any, scale: Any) -> Any:
    """Return a row's scaled products with a part of a block added to those before it, or None."""
    number = builder.sitofp(whole, FLOATS)
    if weighted is None:
        return builder.fmul(number, scale)
    return fma_of(builder, number, scale, weighted)


def _read_code(builder: Any, way: Multiplier, where: Any, column: Any, place: int) -> Any:
    """Return codes as wide as activations, for one place: four bytes for each output."""
    if way.active_bits == 8:
        return read_code(builder, way, where, column, place)
    vector, half = divmod(place, 2)
    return _widen(builder, read_code(builder, way, where, column, vector))[half]


def _add_lows(builder: Any, total: Any, weighted: Any, facts: Any, lows: list[Any]) -> Any:
    """Return total + a row's scaled products, less the lows times the sums of its activations."""
    if len(lows) > 1:
        for part, low in enumerate(lows):
            weighted = fma_of(builder, low, _minus_sum(builder, facts, part), weighted)
    total = fma_of(builder, weighted, _float(builder, facts), total)
    if len(lows) == 1:
        sum_ = _float(builder, offset(builder, facts, 4))
        total = fma_of(builder, builder.fneg(lows[0]), sum_, total)
    return total


def _minus_sum(builder: Any, facts: Any, part: int) -> Any:
    """Return minus the sum of the integer activations of a half, in every lane."""
    whole = load_as(builder, offset(builder, facts, 12 + 4 * part), I32)
    exact = builder.fmul(builder.sitofp(whole, FLOAT), FLOAT(1.0 / MOST_ZERO))
    return splat(builder, exact, FLOATS)


def _minus_zero(builder: Any, way: Multiplier, facts: Any, part: int) -> Any:
    """Return -zero times the sum of a part's activations, in every lane; None for a zero of 0."""
    zero = way.zero_code
    if not zero:
        return None
    place = offset(builder, facts, 8 if way.kind.parts == 1 else 12 + 4 * part)
    start = splat(builder, load_as(builder, place, I32), INTS)
    less = (MOST_ZERO // zero).bit_length() - 1
    return builder.ashr(start, ints(less)) if less else start


def _float(builder: Any, where: Any) -> Any:
    return splat(builder, load_as(builder, where, FLOAT), FLOATS)


def _everywhere(builder: Any, where: Any, kind: Any) -> Any:
    """Return four bytes of activations, broadcast to every output."""
    return builder.bitcast(splat(builder, load_as(builder, where, I32), INTS), kind)


def _widen(builder: Any, codes: Any) -> list[Any]:
    """Return codes widened to 16 bits: of inputs 0 and 2, then of 1 and 3."""
    pairs = builder.bitcast(codes, PAIRS)
    return [
        builder.and_(pairs, constant(PAIRS, 255)),
        builder.lshr(pairs, constant(PAIRS, 8)),
    ]


@intrinsic
def unpack_block(
    multiplier: MultiplierType,
    table: types.Integer,
    span_head: types.Integer,
    block: types.Integer,
    flipped: types.Integer,
    target: types.Integer,
) -> Any:
    """Write a block of `multiplier` to `target`, as a block of `multiplier.unpacked`.

    `flipped`: bits of each four codes that are flipped, see `Multiplier.signs`.
    """
    way = multiplier.multiplier

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, table_at, head_at, block_at, flipped_bits, to = values
        kind = way.unpacked.kind
        signs = builder.bitcast(splat(builder, builder.trunc(flipped_bits, I32), INTS), CODES)
        codes_at = offset(builder, block_at, way.kind.head_bytes)
        for column in range(_COLUMNS):
            at = I64(column)
            scales = read_scales(builder, way, block_at, head_at, at)
            scales = [scale_neighbours(builder, way, scale) for scale in scales]
            lows = read_lows(builder, way, block_at, head_at, at)
            for part, value in enumerate([*scales, *lows]):
                store_as(builder, value, offset(builder, to, 4 * (part * PANEL + column * LANES)))
            if way.kind.floating:
                codes_or_numbers = read_numbers(builder, way, table_at, codes_at, at)
            else:
                codes_or_numbers = iter(read_codes(builder, way, codes_at, at))
            first = offset(builder, to, kind.head_bytes)
            if way.keeps_neighbours:
                store_neighbours(builder, way, table_at, codes_at, column, codes_or_numbers, first)
                continue
            for v, codes in enumerate(codes_or_numbers):
                if way.signs:
                    codes = builder.xor(codes, signs)
                store_as(
                    builder, codes, offset(builder, first, (v * _COLUMNS + column) * 4 * LANES)
                )
        return none()

    return types.none(multiplier, *[i64] * 5), emit
