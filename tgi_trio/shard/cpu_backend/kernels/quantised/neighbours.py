"""Floating-point codes without AVX512: two neighbouring inputs of an output in neighbouring lanes.

With 16 registers of 32 bytes a number is best made beside its neighbour: a vector has the numbers
of two inputs for each of four outputs, and a pair of activations is broadcast to be multiplied with
it. Sums of the first inputs of pairs and those of the second ones are added at the end of a block,
which is the order of `floats.py`, so sums are the same to the bit.

The bits of an e4m3 number (sign, four of exponent, three of fraction) are those of a float16 number
whose first exponent bit is 0. F16C makes float32 of it, subnormal ones included, at 1/256 of its
size, and the scale is multiplied by 256. Codes of 4 bits look up each byte of their float32 number
in a register of 16; those of e2m1 look up the upper byte of a float16 number, whose lower one is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import llvmlite.ir as ir
import numpy as np

from tgi_trio.shard.cpu_backend.kernels.emit import (
    FLOAT,
    I32,
    I64,
    call,
    floats,
    load_as,
    store_as,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.codes import BYTE, SHORT, in_column, join, offset
from tgi_trio.shard.cpu_backend.kernels.quantised.dots import settle
from tgi_trio.shard.cpu_backend.kernels.vectors import fma_of
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS
from tgi_trio.shard.cpu_backend.multiplier import Multiplier
from tgi_trio.shard.cpu_backend.weight_layout import LANES, PANEL

_OUTPUTS: Final = 8  # of a register of words
_HALVES: Final = LANES // _OUTPUTS
_BYTES: Final = ir.VectorType(BYTE, 4 * _OUTPUTS)
_SHORTS: Final = ir.VectorType(SHORT, 2 * _OUTPUTS)
_HALF_OF_SHORTS: Final = ir.VectorType(ir.HalfType(), _OUTPUTS)
_NUMBERS: Final = ir.VectorType(FLOAT, _OUTPUTS)
_STORED: Final = 4 * PANEL  # bytes of four inputs, or eight of 4 bits, of a panel
_KEPT_OF_E4M3: Final = 0xBF80  # sign, exponent and fraction where float16 has them
_E4M3_IS_SMALLER: Final = 256.0  # 2 to the power of 15 - 7
_FOUR_BYTES: Final = 4  # of a float32 number
_PAIRS: Final = BLOCK_INPUTS // 2
_QUARTERS: Final = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
_COLUMN_BYTES: Final = BLOCK_INPUTS * 4 * LANES  # of unpacked numbers


def makes_neighbours(way: Multiplier) -> bool:
    """Return whether codes become numbers beside their neighbours."""
    return way.dots == "avx2" and way.half and way.kind.floating in ("e4m3", "table")


def add_neighbours(
    builder: Any,
    way: Multiplier,
    sums: list[Any],
    table: Any,
    codes_at: Any,
    column: Any,
    scale: Any,
    rows_at: list[Any],
) -> list[Any]:
    """Return what `add_floats` returns.

    Registers hold the sums of four rows and eight outputs; or of one row and sixteen, which wait
    less for each other, beside numbers that take few registers to make.
    """
    read = _find_reader(builder, way, table, codes_at, column)
    halves: list[Sequence[int]] = [[half] for half in range(_HALVES)]
    if len(rows_at) == 1 and _widens(way):
        halves = [range(_HALVES)]
    found: list[list[Any]] = [[] for _ in rows_at]
    for own in halves:
        sums_of_rows = _sum_halves(builder, read, own, rows_at)
        # Else LLVM mixes halves, and columns, and puts into memory what registers do not hold.
        settled = iter(settle(builder, list(itertools.chain(*sums_of_rows))))
        for row in found:
            row += itertools.islice(settled, len(own))
    scale = scale_neighbours(builder, way, scale)
    return [
        fma_of(builder, join(builder, own), scale, total)
        for own, total in zip(found, sums, strict=True)
    ]


def _widens(way: Multiplier) -> bool:
    """Return whether numbers are made of those of 16 bits."""
    return way.kind.floating == "e4m3" or bool(way.kind.numbers)


def scale_neighbours(builder: Any, way: Multiplier, scale: Any) -> Any:
    """Return the scale of numbers as they are made."""
    if makes_neighbours(way) and way.kind.floating == "e4m3":
        return builder.fmul(scale, floats(_E4M3_IS_SMALLER))
    return scale


def store_neighbours(
    builder: Any,
    way: Multiplier,
    table: Any,
    codes_at: Any,
    column: int,
    numbers: Iterator[Any],
    target: Any,
) -> None:
    """Write a column of a block as unpacked numbers.

    `numbers`: those of each input as `read_floats` makes them, for codes that are no neighbours.
    `target`: where the unpacked numbers of a block begin.
    """
    stored = _Stored(builder, offset(builder, target, column * _COLUMN_BYTES))
    read = _find_reader(builder, way, table, codes_at, I64(column))
    for pair in range(_PAIRS):
        both = [] if makes_neighbours(way) else [next(numbers), next(numbers)]
        for half in range(_HALVES):
            own = _interleave(builder, *both, half) if both else read.pair(half, pair)
            for place, each in enumerate(own):
                store_as(builder, each, stored.where(half, pair, place))


def _interleave(builder: Any, first: Any, second: Any, half: int) -> list[Any]:
    """Return a half's pairs of two inputs as `_Reader.pair` does, from 16 outputs of each."""
    made = []
    for begin in (half * _OUTPUTS, half * _OUTPUTS + 4):
        lanes = [lane for output in range(begin, begin + 4) for lane in (output, LANES + output)]
        made.append(builder.shuffle_vector(first, second, _lanes(lanes)))
    return made


def _sum_halves(
    builder: Any, read: _Reader, halves: Sequence[int], rows_at: list[Any]
) -> list[list[Any]]:
    """Return for each row the unscaled sums of some halves of a column, eight outputs each."""
    nothing = ir.Constant(_NUMBERS, [0.0] * _OUTPUTS)
    parts = [{half: [nothing, nothing] for half in halves} for _ in rows_at]
    for pair in range(_PAIRS):
        for half in halves:
            numbers = read.pair(half, pair)
            for own, x in zip(parts, rows_at, strict=True):
                active = _pair_everywhere(builder, offset(builder, x, 8 * pair))
                own[half] = [
                    _multiply_add(builder, a, active, b)
                    for a, b in zip(numbers, own[half], strict=True)
                ]
    return [[_fold(builder, *own[half]) for half in halves] for own in parts]


def _pair_everywhere(builder: Any, where: Any) -> Any:
    """Return two neighbouring activations, in every two lanes."""
    kind = ir.VectorType(I64, _OUTPUTS // 2)
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, load_as(builder, where, I64), I32(0))
    lanes = ir.Constant(ir.VectorType(I32, _OUTPUTS // 2), [0] * (_OUTPUTS // 2))
    return builder.bitcast(builder.shuffle_vector(one, nothing, lanes), _NUMBERS)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{_OUTPUTS}f32", _NUMBERS, a, b, c)


def _fold(builder: Any, low: Any, high: Any) -> Any:
    """Return the sums of eight outputs, whose pairs are in vectors as `_Reader.pair` has them."""
    parts = [
        builder.shuffle_vector(low, high, _lanes(range(second, 2 * _OUTPUTS, 2)))
        for second in range(2)
    ]
    return builder.fadd(*parts)


class _Reader(Protocol):
    """Makes the numbers of a column of a block, a few at a time."""

    def pair(self, half: int, number: int) -> list[Any]:
        """Return two vectors with a pair of inputs: of outputs 0 to 3 of a half, and 4 to 7.

        Pairs are asked for in their order.
        """
        ...


def _find_reader(builder: Any, way: Multiplier, table: Any, codes_at: Any, column: Any) -> _Reader:
    if way.kind.floating == "float32":
        return _Stored(builder, in_column(builder, codes_at, column, _COLUMN_BYTES))
    return _Made(builder, way, table, in_column(builder, codes_at, column, 4 * LANES))


class _Stored:
    """Unpacked numbers, as `store_neighbours` writes them."""

    def __init__(self, builder: Any, first: Any) -> None:
        self._builder, self._first = builder, first

    def where(self, half: int, number: int, place: int) -> Any:
        """Return the address of one of a pair's vectors."""
        return offset(
            self._builder, self._first, ((half * _PAIRS + number) * 2 + place) * _BYTES.count
        )

    def pair(self, half: int, number: int) -> list[Any]:
        places = [self.where(half, number, place) for place in range(2)]
        return [load_as(self._builder, place, _NUMBERS) for place in places]


class _Made:
    """Numbers of codes."""

    def __init__(self, builder: Any, way: Multiplier, table: Any, first: Any) -> None:
        self._builder, self._way, self._first = builder, way, first
        self._made: dict[tuple[int, int], list[list[Any]]] = {}  # of four inputs: both pairs
        self._tables: list[Any] = []
        if way.kind.floating == "table":
            self._tables = [_upper_bytes(way)] if _widens(way) else list(self._read_tables(table))
        if _widens(way):
            with builder.goto_entry_block():
                room = builder.alloca(_SHORTS)
            self._room = builder.ptrtoint(room, I64)

    def pair(self, half: int, number: int) -> list[Any]:
        four, place = divmod(number, 2)
        if place == 0:
            make = self._of_e4m3 if self._way.kind.floating == "e4m3" else self._of_table
            self._made[half, four] = make(half, four)
            return self._made[half, four][0]
        return self._made.pop((half, four))[1]

    def _load(self, half: int, number: int) -> Any:
        """Return words of four bytes, each with those of one output."""
        where = offset(self._builder, self._first, number * _STORED + half * 4 * _OUTPUTS)
        return load_as(self._builder, where, _SHORTS)

    def _of_e4m3(self, half: int, four: int) -> list[list[Any]]:
        """The lower bytes of shorts are the first two inputs, the upper ones the others."""
        builder, shorts = self._builder, self._load(half, four)
        lower = builder.shl(shorts, _shorts(8))
        made = []
        for each in (lower, shorts):
            bits = builder.and_(builder.ashr(each, _shorts(1)), _shorts(_KEPT_OF_E4M3))
            made.append(self._widen(bits))
        return made

    def _widen(self, bits: Any) -> list[Any]:
        """Return float32 numbers of float16's bits."""
        builder = self._builder
        halves = builder.bitcast(bits, ir.VectorType(ir.HalfType(), 2 * _OUTPUTS))
        lower = builder.shuffle_vector(halves, halves, _lanes(range(_OUTPUTS)))
        store_as(builder, halves, self._room)
        return [builder.fpext(lower, _NUMBERS), self._widen_upper()]

    def _widen_upper(self) -> Any:
        """Return the upper half of what is in the room: reading it is faster than extracting it.

        An empty instruction hides from LLVM what is there.
        """
        kind = ir.FunctionType(I64, [I64])
        builder = self._builder
        where = builder.asm(kind, "", "=r,0,~{memory}", [self._room], side_effect=True)
        upper = load_as(builder, offset(builder, where, 16), _HALF_OF_SHORTS, 2)
        return builder.fpext(upper, _NUMBERS)

    def _read_tables(self, table: Any) -> Iterator[Any]:
        """Yield each byte of 16 float32 numbers, twice."""
        numbers = load_as(self._builder, table, ir.VectorType(BYTE, 64), 1)
        for byte in range(_FOUR_BYTES):
            lanes = [_FOUR_BYTES * number + byte for number in range(16)] * 2
            yield self._builder.shuffle_vector(numbers, numbers, _lanes(lanes))

    def _of_table(self, half: int, four: int) -> list[list[Any]]:
        builder = self._builder
        upper, place = divmod(four, BLOCK_INPUTS // 8)
        shorts = self._load(half, place)
        if not _widens(self._way):
            # What is put together within 128 bits shall be outputs that follow each other.
            shorts = builder.shuffle_vector(shorts, shorts, _lanes(_QUARTERS))
        if upper:
            shorts = builder.lshr(shorts, _shorts(4))
        codes = builder.bitcast(builder.and_(shorts, _shorts(0x0F0F)), _BYTES)
        name = "llvm.x86.avx2.pshuf.b"
        found = [call(builder, name, _BYTES, each, codes) for each in self._tables]
        if _widens(self._way):
            bits = builder.bitcast(found[0], _SHORTS)
            first = builder.shl(bits, _shorts(8))
            return [self._widen(each) for each in (first, builder.and_(bits, _shorts(0xFF00)))]
        low, high = (self._pair_bytes(*found[i : i + 2]) for i in (0, 2))
        return [self._interleave(a, b) for a, b in zip(low, high, strict=True)]

    def _pair_bytes(self, low: Any, high: Any) -> list[Any]:
        """Return shorts of two bytes each: of the lower bytes of shorts, then of the upper ones."""
        builder = self._builder
        a, b = (builder.bitcast(each, _SHORTS) for each in (low, high))
        first = self._choose(a, builder.shl(b, _shorts(8)))
        second = self._choose(builder.lshr(a, _shorts(8)), b)
        return [first, second]

    def _choose(self, low: Any, high: Any) -> Any:
        """Return the lower bytes of some shorts with the upper ones of others."""
        builder = self._builder
        places = [32 + i if i % 2 else i for i in range(32)]
        both = [builder.bitcast(each, _BYTES) for each in (low, high)]
        return builder.bitcast(builder.shuffle_vector(*both, _lanes(places)), _SHORTS)

    def _interleave(self, low: Any, high: Any) -> list[Any]:
        """Return float32 numbers of their lower and upper halves."""
        builder, made = self._builder, []
        for begin in (0, 4):
            lanes = []
            for start in (begin, begin + 8):
                for lane in range(start, start + 4):
                    lanes += [lane, 16 + lane]
            both = builder.shuffle_vector(low, high, _lanes(lanes))
            made.append(builder.bitcast(both, _NUMBERS))
        return made


def _upper_bytes(way: Multiplier) -> ir.Constant:
    """Return the upper bytes of a kind's 16 numbers in float16, twice."""
    halves = np.array(way.kind.numbers, "<f2").view(np.uint8)
    return ir.Constant(_BYTES, halves[1::2].tolist() * 2)


def _shorts(value: int) -> ir.Constant:
    return ir.Constant(_SHORTS, [value] * _SHORTS.count)


def _lanes(places: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(I32, len(places)), list(places))
