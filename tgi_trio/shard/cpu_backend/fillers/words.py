"""Codes in LLVM vectors of 4-byte words: eight words are the codes of 32 inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import llvmlite.ir as ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
POINTER: Final = ir.PointerType()
WORDS: Final = 8  # of a group of 32 inputs


@dataclass(frozen=True, slots=True)
class Source:
    """A block of a file, at an address that the compiled program computes."""

    builder: Any
    where: Any  # a pointer

    def words(self, first: int, count: int = WORDS) -> Any:
        """Return `count` words from byte `first` on, as a vector of int32."""
        return self._load(first, ir.VectorType(I32, count))

    def half(self, first: int) -> Any:
        """Return two bytes as int16: the bits of a float16."""
        return self._load(first, I16)

    def byte(self, first: int) -> Any:
        return self._load(first, I8)

    def _load(self, first: int, kind: ir.Type) -> Any:
        where = self.builder.gep(self.where, [I64(first)], source_etype=I8)
        value = self.builder.load(where, typ=kind)
        value.align = 1  # blocks of 17, 18 or 34 bytes are not aligned
        return value


def every_byte(vector: Any, value: int) -> ir.Constant:
    """Return a vector like `vector` with `value` in each byte."""
    return ir.Constant(vector.type, [value * 0x01010101] * vector.type.count)


def masked(builder: Any, words: Any, right: int, mask: int) -> Any:
    """Return each byte masked by `mask` after a shift right by `right` bits (left if negative)."""
    moved = words
    if right:
        by = ir.Constant(words.type, [abs(right)] * words.type.count)
        moved = builder.lshr(words, by) if right > 0 else builder.shl(words, by)
    return builder.and_(moved, every_byte(words, mask))


def nibbles(builder: Any, words: Any) -> Any:
    """Return the low nibbles of all bytes, then the high ones: twice as many words."""
    return join(builder, masked(builder, words, 0, 15), masked(builder, words, 4, 15))


def join(builder: Any, first: Any, second: Any) -> Any:
    """Return two vectors of the same size as one."""
    lanes = list(range(2 * first.type.count))
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def part(builder: Any, words: Any, lanes: Sequence[int]) -> Any:
    """Return some lanes of a vector."""
    chosen = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(words, ir.Constant(words.type, ir.Undefined), chosen)


def bytes_of(builder: Any, words: Any) -> list[Any]:
    """Return the bytes of a vector of words, one by one."""
    count = 4 * words.type.count
    vector = builder.bitcast(words, ir.VectorType(I8, count))
    return [builder.extract_element(vector, I32(place)) for place in range(count)]


def any_of(builder: Any, words: Any) -> Any:
    """Return the bitwise OR of a vector's words."""
    kind = ir.FunctionType(I32, [words.type])
    name = f"llvm.vector.reduce.or.v{words.type.count}i32"
    found = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(found, [words])


def digits_of(builder: Any, words: Any, place: int) -> Any:
    """Return the ternary digit at a place of every byte, a fraction of 243 parts, as bytes."""
    count = 4 * words.type.count
    kind, wide = ir.VectorType(I8, count), ir.VectorType(I16, count)
    digits = builder.bitcast(words, kind)
    digits = builder.mul(digits, ir.Constant(kind, [3**place] * count))  # it wraps around
    digits = builder.mul(builder.zext(digits, wide), ir.Constant(wide, [3] * count))
    digits = builder.trunc(builder.lshr(digits, ir.Constant(wide, [8] * count)), kind)
    return builder.bitcast(digits, words.type)
