"""LLVM instructions that read a block of quantised weights; see `kinds/kind.py` for its layout."""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.emit import (
    FLOATS,
    I32,
    I64,
    INTS,
    call,
    floats,
    ints,
    load_as,
)
from tgi_trio.shard.cpu_backend.kinds.kind import Field
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

BYTE, SHORT = ir.IntType(8), ir.IntType(16)
CODES = ir.VectorType(BYTE, 4 * LANES)  # 4 inputs of 16 outputs
PAIRS = ir.VectorType(SHORT, 2 * LANES)  # 2 inputs of 16 outputs
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_VECTOR = 4 * LANES  # bytes
_COLUMNS = PANEL // LANES
VECTORS = 8  # vectors of codes in a column of a block, for four inputs each


def constant(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def offset(builder: Any, where: Any, bytes_: int) -> Any:
    return builder.add(where, I64(bytes_)) if bytes_ else where


def in_column(builder: Any, where: Any, column: Any, bytes_: int) -> Any:
    """Return an address in `column`, a run-time value; columns are `bytes_` apart."""
    return builder.add(where, builder.mul(column, I64(bytes_)))


def read_codes(builder: Any, way: Multiplier, where: Any, column: Any) -> list[Any]:
    """Return the 8 vectors of codes of one column; `where`: the address after the head.

    They are unsigned bytes, shifted left by `way.raised` bits.
    """
    return [read_code(builder, way, where, column, place) for place in range(VECTORS)]


def read_code(builder: Any, way: Multiplier, where: Any, column: Any, place: int) -> Any:
    """Return one of the 8 vectors of `read_codes`; LLVM merges repeated loads."""
    bits, raised = way.kind.bits, way.raised
    first = in_column(builder, where, column, _VECTOR)

    def vector(at: int) -> Any:
        return load_as(builder, offset(builder, first, at * _COLUMNS * _VECTOR), CODES)

    if bits == 8:
        return vector(place)
    if bits == 2:
        upper, packed = divmod(place, VECTORS // 4)
        two = constant(CODES, 3 << raised)
        return builder.and_(_shift(builder, vector(packed), 2 * upper - raised), two)
    upper, packed = divmod(place, VECTORS // 2)
    four = constant(CODES, 15 << raised)
    code = builder.and_(_shift(builder, vector(packed), 4 * upper - raised), four)
    if way.kind.table:
        return look_up(builder, way, code)
    if bits > 4:
        each = bits - 4
        plane, shift = divmod(place, VECTORS // each)
        more = _shift(builder, vector(VECTORS // 2 + plane), shift * each - 4 - raised)
        mask = constant(CODES, ((1 << each) - 1) << (4 + raised))
        code = builder.or_(code, builder.and_(more, mask))
    return code


def look_up(builder: Any, way: Multiplier, codes: Any) -> Any:
    """Return the values of 4-bit codes, plus the zero code."""
    values = [value + way.zero_code for value in way.kind.table]
    if way.dots in ("vnni", "avx512"):
        table = ir.Constant(CODES, values * (CODES.count // 16))
        return call(builder, "llvm.x86.avx512.pshuf.b.512", CODES, table, codes)
    parts = []
    kind = ir.VectorType(BYTE, 32 if way.dots == "avx2" else 16)
    for begin in range(0, CODES.count, kind.count):
        lanes = ir.Constant(ir.VectorType(I32, kind.count), list(range(begin, begin + kind.count)))
        part = builder.shuffle_vector(codes, ir.Constant(CODES, ir.Undefined), lanes)
        parts.append(_look_up_part(builder, way, values, part, kind))
    return join(builder, parts)


def _look_up_part(builder: Any, way: Multiplier, values: list[int], codes: Any, kind: Any) -> Any:
    table = ir.Constant(kind, values * (kind.count // 16))
    if way.dots == "avx2":
        return call(builder, "llvm.x86.avx2.pshuf.b", kind, table, codes)
    if way.dots == "neon":
        return call(builder, "llvm.aarch64.neon.tbl1.v16i8", kind, table, codes)
    found = constant(kind, values[0])
    for code, value in enumerate(values[1:], 1):
        same = builder.icmp_unsigned("==", codes, constant(kind, code))
        found = builder.select(same, constant(kind, value), found)
    return found


def join(builder: Any, parts: list[Any]) -> Any:
    """Concatenate vectors; their number is a power of two."""
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        lanes = ir.Constant(ir.VectorType(I32, size), list(range(size)))
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [builder.shuffle_vector(a, b, lanes) for a, b in pairs]
    return parts[0]


def _shift(builder: Any, codes: Any, right: int) -> Any:
    """Shift whole 32-bit words; the caller masks bits that come from a neighbouring byte."""
    words = builder.bitcast(codes, INTS)
    if right > 0:
        words = builder.lshr(words, ints(right))
    elif right < 0:
        words = builder.shl(words, ints(-right))
    return builder.bitcast(words, CODES)


def read_scales(builder: Any, way: Multiplier, head: Any, span_head: Any, column: Any) -> list[Any]:
    """Return one column's scales as float32, for each part of a block's inputs."""
    kind = way.kind
    scales = [
        _product(builder, way, kind.scale, head, span_head, column, part)
        for part in range(kind.parts)
    ]
    if way.raised:
        scales = [builder.fmul(scale, floats(2.0**-way.raised)) for scale in scales]
    return scales


def read_lows(builder: Any, way: Multiplier, head: Any, span_head: Any, column: Any) -> list[Any]:
    """Return one column's lows, to be subtracted, as float32: for the block or each part."""
    return [
        _product(builder, way, way.kind.low, head, span_head, column, part)
        for part in range(way.kind.low_parts)
    ]


def _product(
    builder: Any,
    way: Multiplier,
    names: tuple[str, ...],
    head: Any,
    span_head: Any,
    column: Any,
    part: int,
) -> Any:
    factors = []
    for name in names:
        for fields, where in ((way.kind.head, head), (way.kind.span_head, span_head)):
            begin = 0
            for field in fields:
                if field.name == name:
                    place = offset(builder, where, begin)
                    factors.append(_read(builder, way, field, place, column, part))
                begin += field.bytes
    return functools.reduce(builder.fmul, factors)


def _read(builder: Any, way: Multiplier, field: Field, where: Any, column: Any, part: int) -> Any:
    """Return a field of one column and part as float32."""
    each = field.bytes // (field.parts * _COLUMNS)
    begin = 0 if field.parts == 1 else part * _COLUMNS * each
    place = in_column(builder, offset(builder, where, begin), column, each)
    if field.number == "f4":
        return load_as(builder, place, FLOATS)
    if field.number == "f2":
        if way.half:
            return builder.fpext(load_as(builder, place, _HALVES, 2), FLOATS)
        return _widen(builder, load_as(builder, place, ir.VectorType(SHORT, LANES), 2))
    stored = load_as(builder, place, ir.VectorType(BYTE, LANES), 1)
    if field.number == "i1":
        return builder.sitofp(stored, FLOATS)
    wide = builder.zext(stored, INTS)
    if field.number == "u1":
        return builder.uitofp(wide, FLOATS)
    return builder.bitcast(builder.shl(wide, ints(23)), FLOATS)


def _widen(builder: Any, halves: Any) -> Any:
    """Convert finite float16 bits to float32: move them into place, then multiply by 2^112."""
    bits = builder.zext(halves, INTS)
    size = builder.shl(builder.and_(bits, ints(0x7FFF)), ints(13))
    value = builder.fmul(builder.bitcast(size, FLOATS), floats(2.0**112))
    sign = builder.shl(builder.and_(bits, ints(0x8000)), ints(16))
    return builder.bitcast(builder.or_(builder.bitcast(value, INTS), sign), FLOATS)
