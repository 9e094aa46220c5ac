"""Tiles: rows x columns vectors that stay in registers while a product is summed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.eight_bits import load_bytes, widen_byte
from tgi_trio.shard.cpu_backend.kernels.emit import (
    BYTES,
    FLOAT,
    FLOATS,
    HALVES,
    I32,
    I64,
    INTS,
    call,
    floats,
    ints,
    load_as,
    none,
    pack,
    splat,
    store_as,
    unpack,
    vector,
)
from tgi_trio.shard.cpu_backend.kernels.variant import CountType, StorageType
from tgi_trio.shard.cpu_backend.kernels.vectors import fma_of, widen
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL, Storage

i64 = types.int64


def _tile(rows: CountType, columns: CountType) -> types.UniTuple:
    return types.UniTuple(vector, rows.value * columns.value)


@intrinsic
def zeros(rows: CountType, columns: CountType) -> Any:
    """Return a tile of zeros."""
    tile = _tile(rows, columns)

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        return pack(builder, [floats(0.0)] * tile.count)

    return tile(rows, columns), emit


@intrinsic
def multiply_add(
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

    `weights`: 64 packed bytes per step and column. `inputs`: activations of the first row; further
    rows are `stride` bytes apart. Every unrolled step has its own sums, so that steps do not wait
    for each other; `fold` adds them up. `tile` is rows x (steps * columns).
    """
    kind = storage.storage

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        tile_value, where, activations, step_between = values[4:]
        sums = unpack(builder, tile_value, tile.count)
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
                    sums[i] = multiply_pairs(builder, packed[column], x, sums[i])
        return pack(builder, sums)

    return tile(storage, rows, columns, steps, tile, i64, i64, i64), emit


@intrinsic
def fold(rows: CountType, columns: CountType, steps: CountType, tile: types.UniTuple) -> Any:
    """Return the sums of all steps added up: a tile of rows x columns."""
    result = _tile(rows, columns)

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        parts = unpack(builder, values[3], tile.count)
        sums = []
        for i in range(result.count):
            row, column = divmod(i, columns.value)
            first = row * steps.value * columns.value + column
            own = [parts[first + step * columns.value] for step in range(steps.value)]
            sums.append(functools.reduce(builder.fadd, own))
        return pack(builder, sums)

    return result(rows, columns, steps, tile), emit


def _weights(builder: Any, step: Any, feature: int, columns: int, storage: Storage) -> list[Any]:
    """Return the weights of one feature of the packed step at `step`, a vector per column.

    For the dot product they are vectors of pairs.
    """
    if storage.int8:
        first = PANEL * feature  # the same if the address is that of the panel's second half
        places = [builder.add(step, I64(first + LANES * column)) for column in range(columns)]
        return [builder.sitofp(load_as(builder, place, BYTES, 1), FLOATS) for place in places]
    places = [builder.add(step, I64(64 * column)) for column in range(columns)]
    packed = [load_as(builder, place, INTS) for place in places]
    if storage.dot:
        return packed
    if storage.eight:
        return [widen_byte(builder, four, feature, storage) for four in packed]
    if storage.bf16 and feature == 0:
        packed = [builder.shl(pair, ints(16)) for pair in packed]
    elif storage.bf16:
        packed = [builder.and_(pair, ints(-65536)) for pair in packed]
    return [builder.bitcast(each, FLOATS) for each in packed]


def _activation(builder: Any, where: Any, storage: Storage) -> Any:
    """Return one activation, or a pair for the dot product, in every lane."""
    if storage.dot:
        return splat(builder, load_as(builder, where, I32), INTS)
    return splat(builder, load_as(builder, where, FLOAT), FLOATS)


class _Bfloat(ir.Type):
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


_PAIRS = ir.VectorType(_Bfloat(), 2 * LANES)


def multiply_pairs(builder: Any, weight: Any, x: Any, total: Any) -> Any:
    """Return weight * x + total; integer vectors are multiplied as pairs of bfloat16."""
    if weight.type == FLOATS:
        return fma_of(builder, weight, x, total)
    pairs = [builder.bitcast(v, _PAIRS) for v in (weight, x)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, *pairs)


@intrinsic
def add_weighted(
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
    kind = storage.storage

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        tile_value, where, first, step = values[3:]
        sums = unpack(builder, tile_value, tile.count)
        loaded = []
        for column in range(columns.value):
            place = builder.add(where, I64(column * LANES * kind.bytes))
            if kind.eight:
                loaded.append(load_bytes(builder, place, kind))
            elif kind.bf16:
                loaded.append(widen(builder, load_as(builder, place, HALVES, 2)))
            else:
                loaded.append(load_as(builder, place, FLOATS))
        for row in range(rows.value):
            place = builder.add(first, builder.mul(step, I64(row)))
            factor = splat(builder, load_as(builder, place, FLOAT), FLOATS)
            for column, value in enumerate(loaded):
                i = row * columns.value + column
                sums[i] = fma_of(builder, factor, value, sums[i])
        return pack(builder, sums)

    return tile(storage, rows, columns, tile, i64, i64, i64), emit


def _places(
    builder: Any, tile: types.UniTuple, columns: CountType, value: Any, target: Any, step: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a tile's vectors, and where each lies: from `target` on, rows `step` bytes apart."""
    for i, each in enumerate(unpack(builder, value, tile.count)):
        row, column = divmod(i, columns.value)
        place = builder.add(target, builder.mul(step, I64(row)))
        yield each, builder.add(place, I64(64 * column))


@intrinsic
def add_tile(
    rows: CountType,
    columns: CountType,
    tile: types.UniTuple,
    where: types.Integer,
    stride: types.Integer,
) -> Any:
    """Add a tile to float32 numbers in memory, whose rows are `stride` bytes apart."""

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, _, tile_value, target, step = values
        for value, place in _places(builder, tile, columns, tile_value, target, step):
            store_as(builder, builder.fadd(load_as(builder, place, FLOATS), value), place)
        return none()

    return types.none(rows, columns, tile, i64, i64), emit


@intrinsic
def load_tile(
    rows: CountType, columns: CountType, where: types.Integer, stride: types.Integer
) -> Any:
    """Return a tile that `store_tile` has written."""
    tile = _tile(rows, columns)

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, _, source, step = values
        made = []
        for i in range(tile.count):
            row, column = divmod(i, columns.value)
            place = builder.add(source, builder.mul(step, I64(row)))
            made.append(load_as(builder, builder.add(place, I64(64 * column)), FLOATS))
        return pack(builder, made)

    return tile(rows, columns, i64, i64), emit


@intrinsic
def store_tile(
    rows: CountType,
    columns: CountType,
    tile: types.UniTuple,
    where: types.Integer,
    stride: types.Integer,
) -> Any:
    """Write a tile as float32, with rows `stride` bytes apart."""

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        _, _, tile_value, target, step = values
        for value, place in _places(builder, tile, columns, tile_value, target, step):
            store_as(builder, value, place)
        return none()

    return types.none(rows, columns, tile, i64, i64), emit
