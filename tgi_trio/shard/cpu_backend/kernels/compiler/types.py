"""The types of values in kernels, and how an operation states what it takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.ir as ir
import numpy as np

POINTER = ir.PointerType()


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operation returns, and the types to which its arguments are converted."""

    return_type: Type
    args: tuple[Type, ...]


class Type:
    """A type; two are the same if their names are.

    Values of a type without an `llvm` type have nothing to store: all of them is in the type.
    """

    def __init__(self, name: str, llvm: ir.Type | None = None) -> None:
        self.name, self.llvm = name, llvm

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Type) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *arguments: Type) -> Signature:
        """Return the signature of what makes this type of `arguments`."""
        return Signature(self, arguments)

    def attribute(self, name: str) -> Type | int | None:
        """Return an attribute that is known when a kernel is compiled; None: there is none."""
        return None


class Integer(Type):
    """A whole number of some bits; one bit is a truth value."""

    def __init__(self, name: str, bits: int, *, signed: bool = True) -> None:
        super().__init__(name, ir.IntType(bits))
        self.bits, self.signed = bits, signed


class Float(Type):
    """A floating-point number."""

    def __init__(self, name: str, bits: int) -> None:
        super().__init__(name, ir.FloatType() if bits == 32 else ir.DoubleType())
        self.bits = bits


class IntegerLiteral(Integer):
    """A whole number that is known when a kernel is compiled."""

    def __init__(self, value: int) -> None:
        super().__init__(f"literal {value}", 64)
        self.literal_value = value


class UniTuple(Type):
    """So many values of one type, held as one."""

    def __init__(self, item: Type, count: int) -> None:
        super().__init__(f"{item} x {count}", ir.ArrayType(item.llvm, count))
        self.item, self.count = item, count


class Tuple(Type):
    """Several values of any types."""

    def __init__(self, items: tuple[Type, ...]) -> None:
        kept = [each.llvm for each in items if each.llvm is not None]
        super().__init__(f"({', '.join(map(repr, items))})", ir.LiteralStructType(kept))
        self.items = items


class Array(Type):
    """Numbers at an address, and how many."""

    def __init__(self, item: Type) -> None:
        pair = ir.LiteralStructType([POINTER, ir.IntType(64)])
        super().__init__(f"array of {item}", pair)
        self.item = item


class Record(Type):
    """A record of numpy's at an address."""

    def __init__(self, layout: np.dtype[np.void]) -> None:
        super().__init__(f"record {layout.descr}", POINTER)
        self.layout = layout


boolean = Integer("boolean", 1, signed=False)
int32, int64 = Integer("int32", 32), Integer("int64", 64)
uint64 = Integer("uint64", 64, signed=False)
float32, float64 = Float("float32", 32), Float("float64", 64)
none = Type("none")

_NUMBERS = {"i4": int32, "i8": int64, "u8": uint64, "f4": float32, "f8": float64}


@cache
def of_number(name: str) -> Type:
    """Return the type of a number by numpy's name for it, such as `i8`; raises KeyError."""
    return _NUMBERS[name.lstrip("<=")]


class Intrinsic:
    """An operation that writes its own instructions.

    `define` gets the arguments' types. It returns a signature and `emit(builder, signature,
    values)`, or None where it does not take such arguments.
    """

    def __init__(self, define: Callable[..., Any], *, literal: bool) -> None:
        self.define, self.literal = define, literal
        self.name, self.__doc__ = define.__name__, define.__doc__


def intrinsic(define: Any = None, *, prefer_literal: bool = False) -> Any:
    """Make an operation of what defines it.

    `prefer_literal`: numbers that are known have types of their own.
    """
    if define is None:
        return lambda given: Intrinsic(given, literal=prefer_literal)
    return Intrinsic(define, literal=prefer_literal)


class Kernel:
    """A function that is compiled into its callers, or as an entry."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name, self.__doc__ = function.__name__, function.__doc__
