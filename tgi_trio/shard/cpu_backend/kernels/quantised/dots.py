"""Dot products of integers, in the instructions that a processor has for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.emit import I32, INTS, call, ints
from tgi_trio.shard.cpu_backend.kernels.quantised.codes import CODES, PAIRS, constant, join
from tgi_trio.shard.cpu_backend.multiplier import Dots, pairs_that_fit


class Operands(NamedTuple):
    """The operands: vectors of a block's codes, and each row's activations at the same places."""

    # Vectors by place: unsigned bytes, four to an output, or signed 16-bit numbers, two to one.
    code: Callable[[int], Any]
    active: Callable[[int, int], Any]  # signed activations of the same width, by row and place
    largest: int | None  # the largest of codes that are bytes; None: 16-bit codes


def sum_products(
    builder: Any, dots: Dots, operands: Operands, places: Sequence[int], starts: list[Any]
) -> list[Any]:
    """Return for each row its start + the sum of products at `places`, int32 for each output.

    `starts`: a vector for each row, None for 0.
    """
    if dots == "avx2" and len(starts) > 1:
        return _sum_by_vectors(builder, operands, places, starts)
    codes, sums = [operands.code(place) for place in places], []
    for row, start in enumerate(starts):
        x = [operands.active(row, place) for place in places]
        if operands.largest is None:
            sums.append(_sum_of_shorts(builder, dots, codes, x, start))
        else:
            sums.append(_sum_of_bytes(builder, dots, codes, x, operands.largest, start))
    return sums


def _sum_by_vectors(
    builder: Any, operands: Operands, places: Sequence[int], starts: list[Any]
) -> list[Any]:
    """Multiply each vector of codes with all rows before reading the next.

    16 registers hold the sums of a tile and one vector of codes, but not eight of them.
    """
    if operands.largest is None:
        return _add_vectors(builder, _add_neighbours, operands, places, starts)
    most = pairs_that_fit(operands.largest)
    totals = starts
    for begin in range(0, len(places), most):
        if begin:
            totals = _settle(builder, totals)
        nothing = [None] * len(starts)
        own = places[begin : begin + most]
        parts = _add_vectors(builder, _add_products, operands, own, nothing)
        ones = constant(PAIRS, 1)
        wholes = [_add_neighbours(builder, "avx2", part, ones) for part in parts]
        totals = _add_each(builder, totals, wholes)
    return totals


def _add_vectors(
    builder: Any,
    multiply: Callable[..., Any],
    operands: Operands,
    places: Sequence[int],
    sums: list[Any],
) -> list[Any]:
    for number, place in enumerate(places):
        if number:
            sums = _settle(builder, sums)
        code, rows = operands.code(place), range(len(sums))
        products = [multiply(builder, "avx2", code, operands.active(row, place)) for row in rows]
        sums = _add_each(builder, sums, products)
    return sums


def _add_each(builder: Any, sums: list[Any], more: list[Any]) -> list[Any]:
    """Return sums + `more`, row by row; None stands for a sum of 0."""
    pairs = zip(sums, more, strict=True)
    return [other if total is None else builder.add(total, other) for total, other in pairs]


def _settle(builder: Any, sums: list[Any]) -> list[Any]:
    """Settle sums of two registers each."""
    same = settle(builder, [_part(builder, each, 2, i) for each in sums for i in range(2)])
    return [join(builder, same[i : i + 2]) for i in range(0, len(same), 2)]


def settle(builder: Any, registers: list[Any]) -> list[Any]:
    """Have LLVM finish these sums before it loads more vectors, rather than load all at once."""
    kinds = [each.type for each in registers]
    places = ",".join(["=x"] * len(kinds) + [str(i) for i in range(len(kinds))] + ["~{memory}"])
    several = len(kinds) > 1  # LLVM has no structure of one
    kind = ir.FunctionType(ir.LiteralStructType(kinds) if several else kinds[0], kinds)
    settled = builder.asm(kind, "", places, registers, side_effect=True)
    if not several:
        return [settled]
    return [builder.extract_value(settled, i) for i in range(len(kinds))]


def _sum_of_bytes(
    builder: Any, dots: Dots, codes: list[Any], x: list[Any], largest: int, start: Any
) -> Any:
    if dots == "vnni":
        total = ints(0) if start is None else start
        for each, other in zip(codes, x, strict=True):
            total = call(builder, "llvm.x86.avx512.vpdpbusd.512", INTS, total, each, other)
        return total
    if dots in ("avx512", "avx2"):
        return _sum_by_pairs(builder, dots, codes, x, largest, start)
    multiply = _multiply_neon if dots == "neon" and largest < 128 else _multiply_plain
    total = start
    for each, other in zip(codes, x, strict=True):
        product = multiply(builder, each, other)
        total = product if total is None else builder.add(total, product)
    return total


def _sum_of_shorts(builder: Any, dots: Dots, codes: list[Any], x: list[Any], start: Any) -> Any:
    total = start
    for each, other in zip(codes, x, strict=True):
        if dots == "vnni":
            total = ints(0) if total is None else total
            total = call(builder, "llvm.x86.avx512.vpdpwssd.512", INTS, total, each, other)
            continue
        if dots in ("avx512", "avx2"):
            product = _add_neighbours(builder, dots, each, other)
        else:
            product = _multiply_shorts(builder, each, other)
        total = product if total is None else builder.add(total, product)
    return total


def _sum_by_pairs(
    builder: Any, dots: Dots, codes: list[Any], x: list[Any], largest: int, start: Any
) -> Any:
    most = pairs_that_fit(largest)
    total = start
    for begin in range(0, len(codes), most):
        pairs = [
            _add_products(builder, dots, each, other)
            for each, other in zip(
                codes[begin : begin + most], x[begin : begin + most], strict=True
            )
        ]
        part = functools.reduce(builder.add, pairs)
        part = _add_neighbours(builder, dots, part, constant(PAIRS, 1))
        total = part if total is None else builder.add(total, part)
    return total


def _add_products(builder: Any, dots: Dots, codes: Any, x: Any) -> Any:
    """Return int16: sums of two neighbouring products."""
    if dots == "avx512":
        return call(builder, "llvm.x86.avx512.pmaddubs.w.512", PAIRS, codes, x)
    half = ir.VectorType(PAIRS.element, PAIRS.count // 2)
    name = "llvm.x86.avx2.pmadd.ub.sw"
    return _by_halves(builder, lambda a, b: call(builder, name, half, a, b), codes, x)


def _add_neighbours(builder: Any, dots: Dots, a: Any, b: Any) -> Any:
    """Return int32: sums of two neighbouring products of 16-bit numbers."""
    if dots == "avx512":
        return call(builder, "llvm.x86.avx512.pmaddw.d.512", INTS, a, b)
    half = ir.VectorType(I32, INTS.count // 2)
    name = "llvm.x86.avx2.pmadd.wd"
    return _by_halves(builder, lambda x, y: call(builder, name, half, x, y), a, b)


def _by_halves(builder: Any, operate: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Apply an instruction to both halves of two vectors."""
    parts = [operate(_part(builder, a, 2, i), _part(builder, b, 2, i)) for i in range(2)]
    return join(builder, parts)


def _part(builder: Any, value: Any, count: int, index: int) -> Any:
    """Return one of `count` equal parts of a vector."""
    size = value.type.count // count
    lanes = ir.Constant(ir.VectorType(I32, size), list(range(index * size, (index + 1) * size)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)


def _multiply_neon(builder: Any, codes: Any, x: Any) -> Any:
    """Multiply with ARM's dot product of signed bytes; codes must be below 128."""
    kind = ir.VectorType(I32, 4)
    name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
    parts = [
        call(
            builder,
            name,
            kind,
            ir.Constant(kind, [0] * 4),
            _part(builder, codes, 4, i),
            _part(builder, x, 4, i),
        )
        for i in range(4)
    ]
    return join(builder, parts)


def _multiply_plain(builder: Any, codes: Any, x: Any) -> Any:
    wide = ir.VectorType(I32, CODES.count)
    return _add_groups(builder, builder.mul(builder.zext(codes, wide), builder.sext(x, wide)), 4)


def _multiply_shorts(builder: Any, a: Any, b: Any) -> Any:
    wide = ir.VectorType(I32, PAIRS.count)
    return _add_groups(builder, builder.mul(builder.sext(a, wide), builder.sext(b, wide)), 2)


def _add_groups(builder: Any, products: Any, size: int) -> Any:
    """Return the sums of groups of `size` neighbours."""
    nothing = ir.Constant(products.type, ir.Undefined)
    parts = []
    for place in range(size):
        lanes = ir.Constant(INTS, list(range(place, products.type.count, size)))
        parts.append(builder.shuffle_vector(products, nothing, lanes))
    return functools.reduce(builder.add, parts)
