"""Vectors of sixteen float32 numbers, and the tiles of them that matrix products accumulate in.

LLVM lowers these to AVX512, AVX2 or NEON, whatever the machine has; only the bfloat16 dot product
is one processor's own. bfloat16 is the upper half of a float32, so widening it is a shift.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tgi_trio.shard.cpu.kernels.emit import (
    BYTES,
    FLOAT,
    FLOATS,
    HALVES,
    I16,
    I32,
    I64,
    INTS,
    POINTER,
    address,
    at,
    call,
    floats,
    ints,
    load_as,
    none,
    operation,
    splat,
    store_as,
    vector,
)
from tgi_trio.shard.cpu.kernels.variant import CountType, StorageType, VariantType
from tgi_trio.shard.cpu.storage import LANES, Storage

f32, i64 = types.float32, types.int64

# ---- memory --------------------------------------------------------------------------------


@operation(vector, address)
def load(builder: Any, where: Any) -> Any:
    """Read 16 float32."""
    return load_as(builder, where, FLOATS)


@operation(types.none, address, vector)
def store(builder: Any, where: Any, value: Any) -> Any:
    """Write 16 float32."""
    return store_as(builder, value, where)


@operation(f32, address)
def load_float(builder: Any, where: Any) -> Any:
    """Read one float32."""
    return load_as(builder, where, FLOAT)


@operation(i64, address)
def load_int(builder: Any, where: Any) -> Any:
    """Read one int32."""
    return builder.sext(load_as(builder, where, I32), I64)


@operation(types.none, address, f32)
def store_float(builder: Any, where: Any, value: Any) -> Any:
    """Write one float32."""
    return store_as(builder, value, where)


@operation(types.none, address, address)
def copy_word(builder: Any, target: Any, source: Any) -> Any:
    """Copy four bytes: one float32, or a pair of bfloat16."""
    return store_as(builder, load_as(builder, source, I32), target)


@operation(types.none, address)
def prefetch(builder: Any, where: Any) -> Any:
    """Ask for a cache line, as far as the second level."""
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [at(builder, where), I32(0), I32(2), I32(1)])
    return none()


def _widened(builder: Any, halves: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), ints(16)), FLOATS)


def _narrowed(builder: Any, value: Any) -> Any:
    """Round to bfloat16, to the even neighbour from half-way."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    rounded = builder.add(bits, builder.add(ints(0x7FFF), odd))
    return builder.trunc(builder.lshr(rounded, ints(16)), HALVES)


@intrinsic
def load_stored(context: Any, storage: StorageType, where: types.Integer) -> Any:
    """Read 16 numbers of K and V, or of an embedding."""
    bf16 = storage.storage.bf16

    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        if bf16:
            return _widened(builder, load_as(builder, values[1], HALVES, 2))
        return load_as(builder, values[1], FLOATS)

    return vector(storage, i64), emit


def _storing(half: bool) -> Any:
    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, where, value = values
        if half:
            return store_as(builder, _narrowed(builder, value), where, 2)
        return store_as(builder, value, where)

    return emit


@intrinsic
def store_stored(context: Any, storage: StorageType, where: types.Integer, value: Any) -> Any:
    """Write 16 numbers of K and V."""
    return types.none(storage, i64, vector), _storing(storage.storage.bf16)


@intrinsic
def store_active(context: Any, variant: VariantType, where: types.Integer, value: Any) -> Any:
    """Write 16 numbers as activations that go into a product."""
    return types.none(variant, i64, vector), _storing(variant.variant.dot)


# ---- arithmetic ----------------------------------------------------------------------------


@operation(vector, f32)
def fill(builder: Any, value: Any) -> Any:
    """Return a vector with the same number in every lane."""
    return splat(builder, value, FLOATS)


@operation(vector, vector, vector)
def add(builder: Any, a: Any, b: Any) -> Any:
    """Return a + b."""
    return builder.fadd(a, b)


@operation(vector, vector, vector)
def subtract(builder: Any, a: Any, b: Any) -> Any:
    """Return a - b."""
    return builder.fsub(a, b)


@operation(vector, vector, vector)
def multiply(builder: Any, a: Any, b: Any) -> Any:
    """Return a * b."""
    return builder.fmul(a, b)


@operation(vector, vector, vector)
def divide(builder: Any, a: Any, b: Any) -> Any:
    """Return a / b."""
    return builder.fdiv(a, b)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, c)


@operation(vector, vector, vector, vector)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return _fma(builder, a, b, c)


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(vector, vector, vector)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger in each lane; b where a is NaN."""
    return _maximum(builder, a, b)


@operation(vector, vector)
def absolute(builder: Any, a: Any) -> Any:
    """Return |a|."""
    return call(builder, f"llvm.fabs.v{LANES}f32", FLOATS, a)


@operation(vector, f32, vector, vector, vector)
def where_at_least(builder: Any, limit: Any, tested: Any, a: Any, b: Any) -> Any:
    """Return the lanes of a where `tested` is at least `limit`, the others of b."""
    return builder.select(builder.fcmp_ordered(">=", tested, splat(builder, limit, FLOATS)), a, b)


@operation(i64, f32, vector)
def lanes_at_least(builder: Any, limit: Any, tested: Any) -> Any:
    """Return a bit per lane, the first lane's lowest: set where `tested` is at least `limit`."""
    found = builder.fcmp_ordered(">=", tested, splat(builder, limit, FLOATS))
    return builder.zext(builder.bitcast(found, ir.IntType(LANES)), I64)


@operation(i64, i64)
def first_lane(builder: Any, bits: Any) -> Any:
    """Return the lane of the lowest bit that is set."""
    return call(builder, "llvm.cttz.i64", I64, bits, ir.IntType(1)(1))


@operation(f32, vector)
def total(builder: Any, a: Any) -> Any:
    """Return the sum of all lanes, in pairs."""
    kind = ir.FunctionType(FLOAT, [FLOAT, FLOATS])
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [ir.Constant(FLOAT, 0.0), a], fastmath=("reassoc",))


@operation(f32, vector)
def largest(builder: Any, a: Any) -> Any:
    """Return the largest lane. LLVM's own reduction looks for NaN at every step."""
    width = LANES
    while width > 1:
        width //= 2
        upper = ir.Constant(INTS, [width + i % width for i in range(LANES)])
        a = _maximum(builder, builder.shuffle_vector(a, a, upper), a)
    return builder.extract_element(a, I32(0))


@operation(vector, address, vector, vector)
def where_bits(builder: Any, where: Any, a: Any, b: Any) -> Any:
    """Return the lanes of a whose bits in the two bytes at `where` are 1, the others of b."""
    bits = builder.bitcast(load_as(builder, where, I16, 1), ir.VectorType(ir.IntType(1), LANES))
    return builder.select(bits, a, b)


@operation(vector, i64, vector, vector)
def first_lanes(builder: Any, wanted: Any, a: Any, b: Any) -> Any:
    """Return the lanes below `wanted` of a, the others of b."""
    lanes = ir.Constant(INTS, list(range(LANES)))
    limit = splat(builder, builder.trunc(wanted, I32), INTS)
    return builder.select(builder.icmp_signed("<", lanes, limit), a, b)


# 2^x on [-0.5, 0.5], highest power first: of all polynomials of degree 5 that are 1 at 0, the one
# with the least relative error (9e-8, found by weighted least squares).
_POWERS_OF_TWO = (0.00132647272, 0.00967151269, 0.0555073374, 0.240222421, 0.693146978, 1.0)
# Adding it leaves a number's whole part in the lowest bits, with the exponent's bias.
_ROUNDER = 1.5 * 2.0**23 + 127.0


def _exp(builder: Any, x: Any) -> Any:
    """Return e^x for x from -87 to 88: 2^(whole part) by its bits, 2^(the rest) by a polynomial."""
    per_two, rounder = floats(1.0 / math.log(2.0)), floats(_ROUNDER)
    shifted = _fma(builder, x, per_two, rounder)
    rest = _fma(builder, x, per_two, builder.fneg(builder.fsub(shifted, rounder)))
    power = floats(_POWERS_OF_TWO[0])
    for coefficient in _POWERS_OF_TWO[1:]:
        power = _fma(builder, power, rest, floats(coefficient))
    whole = builder.shl(builder.bitcast(shifted, INTS), ints(23))
    return builder.fmul(power, builder.bitcast(whole, FLOATS))


@operation(vector, vector)
def exp(builder: Any, x: Any) -> Any:
    """Return e^x; of what is beyond float32, its limits."""
    low, high = floats(-87.0), floats(88.0)
    x = builder.select(builder.fcmp_unordered("<", x, low), low, x)
    return _exp(builder, builder.select(builder.fcmp_ordered(">", x, high), high, x))


@operation(vector, vector)
def weight(builder: Any, x: Any) -> Any:
    """Return e^x of what is at most 0; 0 below -87, where it would not be a normal number."""
    possible = builder.fcmp_ordered(">=", x, floats(-87.0))
    return builder.select(possible, _exp(builder, x), floats(0.0))


# ---- tiles ---------------------------------------------------------------------------------
# A tile is rows x columns vectors that live in registers while a product is summed up.


def _tile(rows: CountType, columns: CountType) -> types.UniTuple:
    return types.UniTuple(vector, rows.value * columns.value)


@intrinsic
def zeros(context: Any, rows: CountType, columns: CountType) -> Any:
    """Return a tile of zeros."""
    tile = _tile(rows, columns)

    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        return cgutils.pack_array(builder, [floats(0.0)] * tile.count)

    return tile(rows, columns), emit


@intrinsic
def multiply_add(
    context: Any,
    storage: StorageType,
    rows: CountType,
    columns: CountType,
    steps: CountType,
    tile: types.UniTuple,
    weights: types.Integer,
    inputs: types.Integer,
    stride: types.Integer,
) -> Any:
    """Return tile + inputs x weights over `steps` steps of input features.

    `weights`: 64 packed bytes per step and column. `inputs`: the activations of the first row, the
    other rows' follow every `stride` bytes. Every step has sums of its own, so that one need not
    wait for the other; `fold` adds them up: `tile` is rows x (steps * columns).
    """
    kind = storage.storage

    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        tile_value, where, activations, step_between = values[4:]
        sums = cgutils.unpack_tuple(builder, tile_value, tile.count)
        width = columns.value
        for step, feature in itertools.product(range(steps.value), range(kind.products)):
            place = builder.add(where, I64(64 * width * step))
            packed = _weights(builder, place, feature, width, kind)
            for row in range(rows.value):
                place = builder.add(activations, builder.mul(step_between, I64(row)))
                place = builder.add(place, I64(step * kind.step_bytes + 4 * feature))
                x = _activation(builder, place, kind)
                for column in range(width):
                    i = (row * steps.value + step) * width + column
                    sums[i] = _product(builder, packed[column], x, sums[i])
        return cgutils.pack_array(builder, sums)

    return tile(storage, rows, columns, steps, tile, i64, i64, i64), emit


@intrinsic
def fold(
    context: Any, rows: CountType, columns: CountType, steps: CountType, tile: types.UniTuple
) -> Any:
    """Return the tile with the sums of all steps added up: rows x columns."""
    result = _tile(rows, columns)

    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        parts = cgutils.unpack_tuple(builder, values[3], tile.count)
        sums = []
        for i in range(result.count):
            row, column = divmod(i, columns.value)
            first = row * steps.value * columns.value + column
            own = [parts[first + step * columns.value] for step in range(steps.value)]
            sums.append(functools.reduce(builder.fadd, own))
        return cgutils.pack_array(builder, sums)

    return result(rows, columns, steps, tile), emit


def _weights(builder: Any, step: Any, feature: int, columns: int, storage: Storage) -> list[Any]:
    """Return the weights of one feature of the packed step at `step`, a vector per column.

    For dot they are vectors of pairs.
    """
    if storage.int8:
        first = LANES * columns * feature
        places = [builder.add(step, I64(first + LANES * column)) for column in range(columns)]
        return [builder.sitofp(load_as(builder, place, BYTES, 1), FLOATS) for place in places]
    places = [builder.add(step, I64(64 * column)) for column in range(columns)]
    packed = [load_as(builder, place, INTS) for place in places]
    if storage.dot:
        return packed
    if storage.bf16 and feature == 0:
        packed = [builder.shl(pair, ints(16)) for pair in packed]
    elif storage.bf16:
        packed = [builder.and_(pair, ints(-65536)) for pair in packed]
    return [builder.bitcast(each, FLOATS) for each in packed]


def _activation(builder: Any, where: Any, storage: Storage) -> Any:
    """Return one activation, for dot a pair of them, in every lane."""
    if storage.dot:
        return splat(builder, load_as(builder, where, I32), INTS)
    return splat(builder, load_as(builder, where, FLOAT), FLOATS)


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


_PAIRS = ir.VectorType(_Bfloat(), 2 * LANES)


def _product(builder: Any, weight: Any, x: Any, total: Any) -> Any:
    """Return weight * x + total; of pairs of bfloat16 where the vectors are of integers."""
    if weight.type == FLOATS:
        return _fma(builder, weight, x, total)
    pairs = [builder.bitcast(v, _PAIRS) for v in (weight, x)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)


@intrinsic
def add_weighted(
    context: Any,
    storage: StorageType,
    rows: CountType,
    columns: CountType,
    tile: types.UniTuple,
    numbers: types.Integer,
    factors: types.Integer,
    stride: types.Integer,
) -> Any:
    """Return tile + factor x numbers.

    `numbers`: `columns` vectors of V. `factors`: a float32 per row, `stride` bytes apart.
    """
    bf16 = storage.storage.bf16

    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        tile_value, where, first, step = values[3:]
        sums = cgutils.unpack_tuple(builder, tile_value, tile.count)
        loaded = []
        for column in range(columns.value):
            place = builder.add(where, I64(column * LANES * (2 if bf16 else 4)))
            if bf16:
                loaded.append(_widened(builder, load_as(builder, place, HALVES, 2)))
            else:
                loaded.append(load_as(builder, place, FLOATS))
        for row in range(rows.value):
            place = builder.add(first, builder.mul(step, I64(row)))
            factor = splat(builder, load_as(builder, place, FLOAT), FLOATS)
            for column, value in enumerate(loaded):
                i = row * columns.value + column
                sums[i] = _fma(builder, factor, value, sums[i])
        return cgutils.pack_array(builder, sums)

    return tile(storage, rows, columns, tile, i64, i64, i64), emit


@intrinsic
def store_tile(
    context: Any,
    rows: CountType,
    columns: CountType,
    tile: types.UniTuple,
    where: types.Integer,
    stride: types.Integer,
) -> Any:
    """Write a tile as float32, its rows `stride` bytes apart."""

    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        _, _, tile_value, target, step = values
        for i, value in enumerate(cgutils.unpack_tuple(builder, tile_value, tile.count)):
            row, column = divmod(i, columns.value)
            place = builder.add(target, builder.mul(step, I64(row)))
            store_as(builder, value, builder.add(place, I64(64 * column)))
        return none()

    return types.none(rows, columns, tile, i64, i64), emit
