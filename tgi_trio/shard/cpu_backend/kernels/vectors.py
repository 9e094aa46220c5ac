"""Vectors of sixteen float32 numbers; `tiles.py` has products of many.

LLVM lowers these to AVX512, AVX2 or NEON; only the bfloat16 dot product is a specific instruction.
bfloat16 is the upper half of a float32, so widening it is a shift.
"""

from __future__ import annotations

import math
from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.eight_bits import load_bytes, round_to_bytes
from tgi_trio.shard.cpu_backend.kernels.emit import (
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
    declared,
    floats,
    ints,
    load_as,
    none,
    operation,
    splat,
    store_as,
    vector,
)
from tgi_trio.shard.cpu_backend.kernels.variant import StorageType, VariantType
from tgi_trio.shard.cpu_backend.weight_layout import LANES

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


@operation(types.none, address, vector)
def store_aside(builder: Any, where: Any, value: Any) -> Any:
    """Write 16 float32 to a cache line, bypassing the caches (non-temporal store)."""
    stored = builder.store(value, at(builder, where))
    stored.align = 64
    stored.set_metadata("nontemporal", builder.module.add_metadata([I32(1)]))
    return none()


@operation(f32, address)
def load_float(builder: Any, where: Any) -> Any:
    """Read one float32."""
    return load_as(builder, where, FLOAT)


@operation(i64, address)
def load_int(builder: Any, where: Any) -> Any:
    """Read one int32."""
    return builder.sext(load_as(builder, where, I32), I64)


@operation(i64, address)
def load_byte(builder: Any, where: Any) -> Any:
    """Read one unsigned byte."""
    return builder.zext(load_as(builder, where, ir.IntType(8), 1), I64)


@operation(types.none, address, f32)
def store_float(builder: Any, where: Any, value: Any) -> Any:
    """Write one float32."""
    return store_as(builder, value, where)


@operation(types.none, address, i64)
def store_int(builder: Any, where: Any, value: Any) -> Any:
    """Write one int32."""
    return store_as(builder, builder.trunc(value, I32), where)


@operation(types.none, address, address)
def copy_word(builder: Any, target: Any, source: Any) -> Any:
    """Copy four bytes: one float32, or a pair of bfloat16."""
    return store_as(builder, load_as(builder, source, I32), target)


@operation(types.none, address)
def prefetch(builder: Any, where: Any) -> Any:
    """Prefetch a cache line into the second-level cache."""
    return _prefetch(builder, where, 2)


@operation(types.none, address)
def prefetch_near(builder: Any, where: Any) -> Any:
    """Prefetch a cache line that is needed soon into the first-level cache."""
    return _prefetch(builder, where, 3)


def _prefetch(builder: Any, where: Any, locality: int) -> Any:
    kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
    function = declared(builder, kind, "llvm.prefetch.p0")
    builder.call(function, [at(builder, where), I32(0), I32(locality), I32(1)])
    return none()


@operation(vector, address)
def load_half(builder: Any, where: Any) -> Any:
    """Read 16 bfloat16 numbers."""
    return widen(builder, load_as(builder, where, HALVES, 2))


@operation(types.none, address, vector)
def store_half(builder: Any, where: Any, value: Any) -> Any:
    """Write 16 numbers as bfloat16."""
    return store_as(builder, _narrow(builder, value), where, 2)


def widen(builder: Any, halves: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(halves, INTS), ints(16)), FLOATS)


def _narrow(builder: Any, value: Any) -> Any:
    """Round to bfloat16, ties to even."""
    bits = builder.bitcast(value, INTS)
    odd = builder.and_(builder.lshr(bits, ints(16)), ints(1))
    rounded = builder.add(bits, builder.add(ints(0x7FFF), odd))
    return builder.trunc(builder.lshr(rounded, ints(16)), HALVES)


@intrinsic
def load_stored(storage: StorageType, where: types.Integer) -> Any:
    """Read 16 numbers of an embedding, or of a cache."""
    kind = storage.storage

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        if kind.eight:
            return load_bytes(builder, values[1], kind)
        if kind.bf16:
            return widen(builder, load_as(builder, values[1], HALVES, 2))
        return load_as(builder, values[1], FLOATS)

    return vector(storage, i64), emit


def _storing(half: bool) -> Any:
    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, where, value = values
        if half:
            return store_as(builder, _narrow(builder, value), where, 2)
        return store_as(builder, value, where)

    return emit


@intrinsic
def store_stored(storage: StorageType, where: types.Integer, value: Any) -> Any:
    """Write 16 numbers of K or V."""
    kind = storage.storage
    if not kind.eight:
        return types.none(storage, i64, vector), _storing(kind.bf16)

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        return store_as(builder, round_to_bytes(builder, values[2], kind), values[1], 1)

    return types.none(storage, i64, vector), emit


@intrinsic
def store_query(variant: VariantType, where: types.Integer, value: Any) -> Any:
    """Write 16 numbers of a query."""
    return types.none(variant, i64, vector), _storing(variant.variant.cache.dot)


@intrinsic
def store_active(variant: VariantType, where: types.Integer, value: Any) -> Any:
    """Write 16 activations, as products read them."""
    return types.none(variant, i64, vector), _storing(variant.variant.dot)


# ---- arithmetic ----------------------------------------------------------------------------


@operation(vector, f32)
def fill(builder: Any, value: Any) -> Any:
    """Return a vector with the given number in every lane."""
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


@operation(vector, vector)
def square_root(builder: Any, a: Any) -> Any:
    """Return the square root of a."""
    return call(builder, f"llvm.sqrt.v{LANES}f32", FLOATS, a)


@operation(vector, vector, vector)
def divide(builder: Any, a: Any, b: Any) -> Any:
    """Return a / b."""
    return builder.fdiv(a, b)


def fma_of(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, a, b, c)


@operation(vector, vector, vector, vector)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    return fma_of(builder, a, b, c)


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(vector, vector, vector)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger in each lane; b where a is NaN."""
    return _maximum(builder, a, b)


@operation(vector, vector, vector)
def minimum(builder: Any, a: Any, b: Any) -> Any:
    """Return the smaller in each lane; b where a is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


@intrinsic(prefer_literal=True)
def every_other(a: Any, b: Any, first: types.IntegerLiteral) -> Any:
    """Return every second lane of a, then of b, from lane `first` on, which is 0 or 1."""
    lanes = ir.Constant(INTS, [2 * i + first.literal_value for i in range(LANES)])

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        return builder.shuffle_vector(values[0], values[1], lanes)

    return vector(vector, vector, first), emit


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
    """Return a bit per lane, the lowest for the first: set where `tested` is at least `limit`."""
    found = builder.fcmp_ordered(">=", tested, splat(builder, limit, FLOATS))
    return builder.zext(builder.bitcast(found, ir.IntType(LANES)), I64)


@operation(i64, i64)
def first_lane(builder: Any, bits: Any) -> Any:
    """Return the lane of the lowest set bit."""
    return call(builder, "llvm.cttz.i64", I64, bits, ir.IntType(1)(1))


@operation(f32, vector)
def total(builder: Any, a: Any) -> Any:
    """Return the sum of all lanes, added pairwise."""
    kind = ir.FunctionType(FLOAT, [FLOAT, FLOATS])
    name = f"llvm.vector.reduce.fadd.v{LANES}f32"
    function = declared(builder, kind, name)
    return builder.call(function, [ir.Constant(FLOAT, 0.0), a], fastmath=("reassoc",))


@operation(f32, vector)
def largest(builder: Any, a: Any) -> Any:
    """Return the largest lane; LLVM's own reduction tests for NaN at every step."""
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


@operation(vector, i64)
def count_from(builder: Any, first: Any) -> Any:
    """Return first, first + 1, ..., as float32."""
    lanes = ir.Constant(INTS, list(range(LANES)))
    return builder.sitofp(
        builder.add(splat(builder, builder.trunc(first, I32), INTS), lanes), FLOATS
    )


@operation(vector, i64, vector, vector)
def first_lanes(builder: Any, wanted: Any, a: Any, b: Any) -> Any:
    """Return the first `wanted` lanes of a, the others of b."""
    lanes = ir.Constant(INTS, list(range(LANES)))
    limit = splat(builder, builder.trunc(wanted, I32), INTS)
    return builder.select(builder.icmp_signed("<", lanes, limit), a, b)


# 2^x on [-0.5, 0.5], highest power first: the polynomial of degree 5 with value 1 at 0 that has the
# least relative error (9e-8, found by weighted least squares).
_POWERS_OF_TWO = (0.00132647272, 0.00967151269, 0.0555073374, 0.240222421, 0.693146978, 1.0)
# Adding it leaves a number's integer part, with the exponent's bias, in the lowest bits.
_ROUNDER = 1.5 * 2.0**23 + 127.0


def _exp(builder: Any, x: Any) -> Any:
    """Return e^x for x from -87 to 88: 2^(integer part) by its bits, 2^(rest) by a polynomial."""
    per_two, rounder = floats(1.0 / math.log(2.0)), floats(_ROUNDER)
    shifted = fma_of(builder, x, per_two, rounder)
    rest = fma_of(builder, x, per_two, builder.fneg(builder.fsub(shifted, rounder)))
    power = floats(_POWERS_OF_TWO[0])
    for coefficient in _POWERS_OF_TWO[1:]:
        power = fma_of(builder, power, rest, floats(coefficient))
    whole = builder.shl(builder.bitcast(shifted, INTS), ints(23))
    return builder.fmul(power, builder.bitcast(whole, FLOATS))


@operation(vector, vector)
def exp(builder: Any, x: Any) -> Any:
    """Return e^x, with x clipped to [-87, 88], which keeps it within float32."""
    low, high = floats(-87.0), floats(88.0)
    x = builder.select(builder.fcmp_unordered("<", x, low), low, x)
    return _exp(builder, builder.select(builder.fcmp_ordered(">", x, high), high, x))


@operation(vector, vector)
def weight(builder: Any, x: Any) -> Any:
    """Return e^x for x at most 0; 0 below -87, where it would be subnormal."""
    possible = builder.fcmp_ordered(">=", x, floats(-87.0))
    return builder.select(possible, _exp(builder, x), floats(0.0))
