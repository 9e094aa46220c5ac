"""Floating-point codes, or codes that stand for such numbers, multiplied in float32 or bfloat16.

An 8-bit number (e4m3: sign, four exponent bits, three fraction bits) as bfloat16 is looked up, in
tables of both bytes of the 128 codes without their sign; so it becomes float32. Without VBMI, which
looks up so many, its bits are moved to their place among float32's, and the bias of the exponent is
added. A subnormal code, which counts from 0, then has a leading 1 too many, and half of its size:
twice the number less the smallest normal one is right, and for any other code it is no smaller than
what is right already. No number is subnormal on the way, of which processors multiply one in the
time of a hundred others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llvmlite.ir as ir
import numpy as np

from tgi_trio.shard.checkpoint.formats.fp8 import E4M3_NUMBERS
from tgi_trio.shard.checkpoint.numbers import to_bfloat16
from tgi_trio.shard.cpu_backend.kernels.emit import (
    BYTES,
    FLOAT,
    FLOATS,
    I32,
    INTS,
    call,
    floats,
    ints,
    load_as,
    splat,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.codes import (
    BYTE,
    CODES,
    PAIRS,
    constant,
    in_column,
    join,
    offset,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.neighbours import add_neighbours, makes_neighbours
from tgi_trio.shard.cpu_backend.kernels.quantised.trellis import read_trellis
from tgi_trio.shard.cpu_backend.kernels.tiles import multiply_pairs
from tgi_trio.shard.cpu_backend.kernels.vectors import fma_of
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, FLOATING_ORDER
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

_VECTOR = 4 * LANES  # bytes
_COLUMNS = PANEL // LANES
_BIAS_OF_E4M3 = 127 - 7
_LEAST_NORMAL = 2.0**-6  # of e4m3
# The upper bytes, and the lower ones, of the 128 numbers without sign, as bfloat16.
_E4M3_BYTES = (
    np.ascontiguousarray(to_bfloat16(np.nan_to_num(E4M3_NUMBERS[:128])))
    .view(np.uint8)
    .reshape(2, 64, 2)
    .transpose(2, 0, 1)[::-1]
)
_ROUNDED = 64, 80  # where in a table the upper bytes of bfloat16 are, and the lower ones
# Accumulators of a row and column, since a multiply-add waits for the one before it. As many as a
# matrix unit has: one for the first features of pairs, one for the second ones.
_CHAINS = 2


def read_numbers(
    builder: Any, way: Multiplier, table: Any, where: Any, column: Any
) -> Iterator[Any]:
    """Yield a block's unscaled weights as they are multiplied: 16 outputs' for an input, or a pair.

    A few are made at a time, so that few are alive at once. `where`: the address after the block's
    head.
    """
    read = read_floats if way.active_bits == 32 else read_pairs
    return read(builder, way, table, where, column)


def read_pairs(builder: Any, way: Multiplier, table: Any, where: Any, column: Any) -> Iterator[Any]:
    """Yield pairs of bfloat16 numbers, each pair as a word."""
    first = in_column(builder, where, column, _VECTOR)

    def codes(place: int) -> Any:
        return load_as(builder, offset(builder, first, place * _COLUMNS * _VECTOR), CODES)

    if way.kind.floating == "bfloat16":
        for i in range(BLOCK_INPUTS // 2):
            yield builder.bitcast(codes(i), INTS)
    elif way.kind.floating == "e4m3":
        tables = [[ir.Constant(CODES, part.tolist()) for part in each] for each in _E4M3_BYTES]
        for place in range(8):
            four = codes(place)
            high, low = (_look_up_128(builder, each, four) for each in tables)
            high = builder.or_(high, builder.and_(four, constant(CODES, 128)))
            yield from _pair(builder, high, low)
    else:
        tables = [_four_times(builder, offset(builder, table, at)) for at in _ROUNDED]
        packed, four_bits = [codes(place) for place in range(4)], constant(CODES, 15)
        for place in range(8):
            own = packed[place % 4]
            if place >= 4:
                own = builder.bitcast(builder.lshr(builder.bitcast(own, INTS), ints(4)), CODES)
            own = builder.and_(own, four_bits)
            name = "llvm.x86.avx512.pshuf.b.512"
            high, low = (call(builder, name, CODES, each, own) for each in tables)
            yield from _pair(builder, high, low)


def _look_up_128(builder: Any, table: list[Any], codes: Any) -> Any:
    """Look up bytes in a table of two vectors, by the lower seven bits of codes."""
    name = "llvm.x86.avx512.vpermi2var.qi.512"
    return call(builder, name, CODES, table[0], codes, table[1])


def _four_times(builder: Any, where: Any) -> Any:
    sixteen = load_as(builder, where, ir.VectorType(BYTE, 16), 1)
    lanes = ir.Constant(ir.VectorType(I32, CODES.count), list(range(16)) * (CODES.count // 16))
    return builder.shuffle_vector(sixteen, sixteen, lanes)


def _pair(builder: Any, high: Any, low: Any) -> Iterator[Any]:
    """Combine high and low bytes to pairs of bfloat16: of the even bytes, then of the odd ones."""
    high, low = builder.bitcast(high, PAIRS), builder.bitcast(low, PAIRS)
    eight = constant(PAIRS, 8)
    up, down = (_keep(builder, x) for x in (builder.shl(high, eight), builder.lshr(low, eight)))
    even = builder.or_(up, builder.and_(low, constant(PAIRS, 255)))
    odd = builder.or_(builder.and_(high, constant(PAIRS, -256)), down)
    yield builder.bitcast(even, INTS)
    yield builder.bitcast(odd, INTS)


def _keep(builder: Any, value: Any) -> Any:
    """Return a vector of which LLVM does not know how it was made.

    It would turn shifts of bytes into look-ups, which only one port of the processor computes.
    """
    kind = ir.FunctionType(value.type, [value.type])
    return builder.asm(kind, "", "=v,0", [value], side_effect=False)


def read_floats(
    builder: Any, way: Multiplier, table: Any, where: Any, column: Any
) -> Iterator[Any]:
    """Yield the weights of each of the 32 inputs as float32."""
    first = in_column(builder, where, column, _VECTOR)

    def words(place: int) -> Any:
        return load_as(builder, offset(builder, first, place * _COLUMNS * _VECTOR), INTS)

    if way.kind.turned:
        yield from read_trellis(builder, way, words)
    elif way.kind.floating == "float32":
        for i in range(BLOCK_INPUTS):
            yield builder.bitcast(words(i), FLOATS)
    elif way.kind.floating == "e4m3" and way.looks_up:
        for pair in read_pairs(builder, way, table, where, column):
            yield builder.bitcast(builder.shl(pair, ints(16)), FLOATS)
            yield builder.bitcast(builder.and_(pair, ints(-65536)), FLOATS)
    elif way.kind.floating == "e4m3":
        for i in range(BLOCK_INPUTS):
            if i % 4 == 0:
                four = words(i // 4)
            yield _widen_e4m3(builder, four, FLOATING_ORDER[i % 4])
    else:
        packed = [words(place) for place in range(4)]
        for i in range(BLOCK_INPUTS):
            half, place = divmod(i, BLOCK_INPUTS // 2)
            bits = 8 * FLOATING_ORDER[place % 4] + 4 * half
            codes = _shift_right(builder, packed[place // 4], bits)
            yield _look_up(builder, way, table, codes)


def _shift_right(builder: Any, words: Any, bits: int) -> Any:
    return builder.lshr(words, ints(bits)) if bits else words


def _widen_e4m3(builder: Any, four: Any, byte: int) -> Any:
    """Return one of the four bytes of each word, an e4m3 number, as float32."""
    high = 24 - 8 * byte
    bits = builder.shl(four, ints(high)) if high else four
    sign = builder.and_(bits, ints(-(1 << 31)))
    size = builder.and_(builder.lshr(bits, ints(4)), ints(0x07F00000))
    size = builder.bitcast(builder.add(size, ints(_BIAS_OF_E4M3 << 23)), FLOATS)
    twice = fma_of(builder, size, floats(2.0), floats(-_LEAST_NORMAL))
    size = builder.select(builder.fcmp_ordered("<", twice, size), twice, size)
    return builder.bitcast(builder.or_(builder.bitcast(size, INTS), sign), FLOATS)


def _read_rounded(builder: Any, table: Any) -> Any:
    """Return a table's 16 numbers as rounded to bfloat16."""
    parts = [
        builder.zext(load_as(builder, offset(builder, table, at), BYTES, 1), INTS)
        for at in _ROUNDED
    ]
    words = [builder.shl(part, ints(bits)) for part, bits in zip(parts, (24, 16), strict=True)]
    return builder.bitcast(builder.or_(*words), FLOATS)


def _look_up(builder: Any, way: Multiplier, table: Any, codes: Any) -> Any:
    """Look up numbers by the lowest four bits of each word."""
    if way.pairs:
        values = _read_rounded(builder, table)
        return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, values, codes)
    if way.dots in ("vnni", "avx512"):
        values = load_as(builder, table, FLOATS)
        return call(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, values, codes)
    if way.dots == "avx2":
        return _look_up_halves(builder, table, codes)
    values = load_as(builder, table, FLOATS)
    codes = builder.and_(codes, ints(15))
    found = splat(builder, builder.extract_element(values, I32(0)), FLOATS)
    for code in range(1, 16):
        value = splat(builder, builder.extract_element(values, I32(code)), FLOATS)
        same = builder.icmp_unsigned("==", codes, ints(code))
        found = builder.select(same, value, found)
    return found


def _look_up_halves(builder: Any, table: Any, codes: Any) -> Any:
    """Look up 8 numbers by three bits (AVX2); the fourth, the sign, chooses between two results."""
    half, whole = ir.VectorType(FLOAT, 8), ir.VectorType(I32, 8)
    low, high = (load_as(builder, offset(builder, table, 32 * i), half) for i in range(2))
    nothing = ir.Constant(INTS, ir.Undefined)
    parts = []
    for begin in (0, 8):
        lanes = ir.Constant(whole, list(range(begin, begin + 8)))
        own = builder.shuffle_vector(codes, nothing, lanes)
        signs = builder.bitcast(builder.shl(own, ir.Constant(whole, [28] * 8)), half)
        a, b = (call(builder, "llvm.x86.avx2.permps", half, values, own) for values in (low, high))
        parts.append(call(builder, "llvm.x86.avx.blendv.ps.256", half, a, b, signs))
    return join(builder, parts)


def add_floats(
    builder: Any,
    way: Multiplier,
    sums: list[Any],
    table: Any,
    codes_at: Any,
    column: Any,
    scale: Any,
    rows_at: list[Any],
) -> list[Any]:
    """Return for each row `sums` + scale * (its 32 activations x a column of a block).

    A row's products are added in the same order, however many rows there are.
    """
    if makes_neighbours(way) or (way.keeps_neighbours and way.kind.floating == "float32"):
        return add_neighbours(builder, way, sums, table, codes_at, column, scale, rows_at)
    parts: list[list[Any]] = [[floats(0.0)] * _CHAINS for _ in rows_at]
    for i, weights in enumerate(read_numbers(builder, way, table, codes_at, column)):
        for own, x in zip(parts, rows_at, strict=True):
            active = load_as(builder, offset(builder, x, 4 * i), I32)  # one number, or a pair
            active = splat(builder, active, INTS)
            if way.active_bits == 32:
                active = builder.bitcast(active, FLOATS)
            own[i % _CHAINS] = multiply_pairs(builder, weights, active, own[i % _CHAINS])
    return [
        fma_of(builder, builder.fadd(*own), scale, total)
        for own, total in zip(parts, sums, strict=True)
    ]
