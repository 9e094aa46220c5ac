"""Values while a kernel is compiled, and their conversion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
import numpy as np

from tgi_trio.shard.cpu_backend.kernels.compiler.types import (
    Float,
    Integer,
    Tuple,
    Type,
    UniTuple,
    boolean,
    float32,
    float64,
    int64,
    none,
    uint64,
)

_OF_NUMPY = {np.float32: float32, np.float64: float64, np.int64: int64, np.uint64: uint64}


class KernelError(TypeError):
    """A kernel contains what cannot be compiled; `placed`: the message says where."""

    def __init__(self, message: str, *, placed: bool = False) -> None:
        super().__init__(message)
        self.placed = placed


@dataclass(slots=True)
class Value:
    """A value: its type, LLVM's value if it has one, and its number where that is known.

    A `parts` tuple of values has no value of LLVM until one is needed.
    """

    type: Type
    llvm: Any = None
    known: Any = None  # int, float or bool
    parts: Sequence[Value] | None = None


NONE = Value(none)


def constant(number: Any) -> Value:
    """Return the value of a number of Python or numpy: int64, float64, boolean or what it is.

    Whole numbers that int64 does not have are uint64.
    """
    kind = _OF_NUMPY.get(type(number))
    if isinstance(number, bool | np.bool_):
        kind, number = boolean, bool(number)
    elif kind is None and isinstance(number, int):  # IntEnum as well
        kind, number = int64 if number < 1 << 63 else uint64, int(number)
    elif kind is None and isinstance(number, float):
        kind = float64
    if kind is None:
        raise KernelError(f"no number: {number!r}")
    if isinstance(kind, Integer):
        number = int(number)
        if not -(1 << 63) <= number < 1 << 64:
            raise KernelError(f"{number} does not fit into 64 bits")
    else:
        number = float(number)
    return Value(kind, ir.Constant(kind.llvm, number), number)


def unify(a: Type, b: Type) -> Type:
    """Return the type in which two numbers are computed.

    float32 with float32 stays so; with a whole number or with float64 it is float64. A constant of
    Python with a fraction is float64. Raises KernelError for what has no common type.
    """
    if a == b:
        return a
    if isinstance(a, Integer) and isinstance(b, Integer):
        if {a, b} == {int64, uint64}:
            raise KernelError("signed and unsigned numbers need a conversion")
        return int64 if uint64 not in (a, b) else uint64
    if isinstance(a, Integer | Float) and isinstance(b, Integer | Float):
        return float64
    raise KernelError(f"there is no type for both {a} and {b}")


def convert(builder: Any, value: Value, kind: Type) -> Value:
    """Return a value as another type; raises KernelError where there is no conversion."""
    own = value.type
    if own == kind:
        return value
    if value.known is not None and isinstance(kind, Integer | Float):
        return _convert_known(value.known, kind)
    if isinstance(own, Integer) and isinstance(kind, Integer):
        return Value(kind, _resize(builder, value.llvm, own, kind))
    if isinstance(own, Integer) and isinstance(kind, Float):
        make = builder.sitofp if own.signed else builder.uitofp
        return Value(kind, make(value.llvm, kind.llvm))
    if isinstance(own, Float) and isinstance(kind, Integer) and kind != boolean:
        make = builder.fptosi if kind.signed else builder.fptoui
        return Value(kind, make(value.llvm, kind.llvm))
    if isinstance(own, Float) and isinstance(kind, Float):
        make = builder.fpext if kind.bits > own.bits else builder.fptrunc
        return Value(kind, make(value.llvm, kind.llvm))
    if isinstance(own, Tuple) and isinstance(kind, Tuple) and len(own.items) == len(kind.items):
        pairs = zip(spread(builder, value), kind.items, strict=True)
        return Value(kind, parts=[convert(builder, each, item) for each, item in pairs])
    raise KernelError(f"{own} is no {kind}")


def _convert_known(number: Any, kind: Type) -> Value:
    if isinstance(kind, Float):
        number = float(np.float32(number)) if kind == float32 else float(number)
    elif kind == boolean:
        number = int(number != 0)
    elif isinstance(kind, Integer):
        least = -(1 << kind.bits - 1) if kind.signed else 0
        if not least <= number < least + (1 << kind.bits):
            raise KernelError(f"{number} does not fit into {kind}")
        number = int(number)
    return Value(kind, ir.Constant(kind.llvm, number), number)


def _resize(builder: Any, value: Any, own: Integer, kind: Integer) -> Any:
    if kind == boolean:
        return builder.icmp_unsigned("!=", value, ir.Constant(value.type, 0))
    if kind.bits == own.bits:
        return value
    if kind.bits < own.bits:
        return builder.trunc(value, kind.llvm)
    return (builder.sext if own.signed else builder.zext)(value, kind.llvm)


def spread(builder: Any, value: Value) -> Sequence[Value]:
    """Return the values that a tuple consists of; raises KernelError for what is none."""
    if value.parts is not None:
        return value.parts
    if isinstance(value.type, UniTuple):
        places = range(value.type.count)
        return [Value(value.type.item, builder.extract_value(value.llvm, i)) for i in places]
    if not isinstance(value.type, Tuple):
        raise KernelError(f"{value.type} cannot be unpacked")
    found, place = [], 0
    for item in value.type.items:
        if item.llvm is None:
            found.append(Value(item))
            continue
        found.append(Value(item, builder.extract_value(value.llvm, place)))
        place += 1
    return found


def packed(builder: Any, value: Value) -> Any:
    """Return LLVM's value of any value that has one."""
    if value.parts is None:
        return value.llvm
    made, place = ir.Constant(value.type.llvm, ir.Undefined), 0
    for part in value.parts:
        if part.type.llvm is not None:
            made = builder.insert_value(made, packed(builder, part), place)
            place += 1
    return made


def tuple_of(parts: Sequence[Value]) -> Value:
    """Return a tuple of values."""
    return Value(Tuple(tuple(part.type for part in parts)), parts=parts)
