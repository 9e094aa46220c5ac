"""8-bit floating-point numbers, as K and V may be stored: conversion from and to float32.

Their bits are those of float32 but for the exponent's bias and the length of the fraction.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.emit import (
    BYTES,
    FLOATS,
    INTS,
    call,
    floats,
    ints,
    load_as,
)
from tgi_trio.shard.cpu_backend.weight_layout import EIGHT_BITS, LANES, EightBits, Storage

_FRACTION, _BIAS = 23, 127  # of float32


def _shift(kind: EightBits) -> int:
    """Return how many more fraction bits float32 has."""
    return _FRACTION - kind.fraction


def widen_byte(builder: Any, words: Any, byte: int, storage: Storage) -> Any:
    """Return one of the four bytes of each of 16 words as float32.

    The bits are put where they are float32's, and the bias of the exponent is added. A subnormal
    number then has a leading 1 too many, and half of its size: twice of it less the least normal
    number is right, and for all others no smaller than what is right already. A product with a
    power of two would be shorter, but a processor multiplies subnormal float32 slowly.
    """
    kind, up = EIGHT_BITS[storage.numbers], 24 - 8 * byte
    bits = builder.shl(words, ints(up)) if up else words
    sign = builder.and_(bits, ints(-(1 << 31)))
    size = builder.and_(builder.lshr(bits, ints(24 - _shift(kind))), ints(127 << _shift(kind)))
    size = builder.bitcast(builder.add(size, ints((_BIAS - kind.bias) << _FRACTION)), FLOATS)
    least = floats(-(2.0 ** (1 - kind.bias)))
    twice = call(builder, f"llvm.fma.v{LANES}f32", FLOATS, size, floats(2.0), least)
    size = builder.select(builder.fcmp_ordered("<", twice, size), twice, size)
    return builder.bitcast(builder.or_(builder.bitcast(size, INTS), sign), FLOATS)


def load_bytes(builder: Any, where: Any, storage: Storage) -> Any:
    """Load 16 numbers as float32."""
    words = builder.zext(load_as(builder, where, BYTES, 1), INTS)
    return widen_byte(builder, words, 0, storage)


def round_to_bytes(builder: Any, value: Any, storage: Storage) -> Any:
    """Round 16 float32 numbers to bytes, to nearest, ties to even.

    Numbers too large become the largest, and so does NaN, whose sequence has already failed.
    """
    kind = EIGHT_BITS[storage.numbers]
    size = call(builder, f"llvm.fabs.v{LANES}f32", FLOATS, value)
    fits = builder.fcmp_ordered("<", size, floats(kind.largest))
    size = builder.select(fits, size, floats(kind.largest))
    bits, shift = builder.bitcast(size, INTS), _shift(kind)
    odd = builder.and_(builder.lshr(bits, ints(shift)), ints(1))
    rounded = builder.add(bits, builder.add(odd, ints((1 << (shift - 1)) - 1)))
    rounded = builder.lshr(rounded, ints(shift))
    normal = builder.sub(rounded, ints((_BIAS - kind.bias) << kind.fraction))
    # Subnormal numbers are evenly spaced.
    steps = builder.fmul(size, floats(2.0 ** (kind.bias - 1 + kind.fraction)))
    steps = call(builder, f"llvm.rint.v{LANES}f32", FLOATS, steps)
    small = builder.fcmp_ordered("<", size, floats(2.0 ** (1 - kind.bias)))
    code = builder.select(small, builder.fptosi(steps, INTS), normal)
    sign = builder.lshr(builder.bitcast(value, INTS), ints(24))
    code = builder.or_(code, builder.and_(sign, ints(128)))
    return builder.trunc(code, ir.VectorType(ir.IntType(8), LANES))
