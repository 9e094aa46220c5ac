"""Variables of a kernel, records and arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.compiler.types import (
    Array,
    Integer,
    Record,
    Tuple,
    Type,
    UniTuple,
    int64,
    of_number,
)
from tgi_trio.shard.cpu_backend.kernels.compiler.values import (
    KernelError,
    Value,
    convert,
    packed,
    spread,
    tuple_of,
)

_I8, _I64 = ir.IntType(8), ir.IntType(64)


@dataclass(frozen=True, slots=True)
class Variable:
    """A name whose value may change: a place on the stack, which LLVM turns into registers."""

    type: Type
    place: Any = None
    parts: Sequence[Variable] = ()  # of a tuple


def declare(builder: Any, kind: Type, name: str) -> Variable:
    """Return a new variable; `builder` is at the function's beginning."""
    if isinstance(kind, Tuple):
        return Variable(kind, parts=[declare(builder, each, name) for each in kind.items])
    return Variable(kind, None if kind.llvm is None else builder.alloca(kind.llvm, name=name))


def write(builder: Any, variable: Variable, value: Value) -> None:
    """Assign a value of the variable's type."""
    if variable.parts:
        for part, each in zip(variable.parts, spread(builder, value), strict=True):
            write(builder, part, each)
    elif variable.place is not None:
        builder.store(packed(builder, value), variable.place)


def read(builder: Any, variable: Variable) -> Value:
    """Return a variable's value."""
    if variable.parts:
        return tuple_of([read(builder, part) for part in variable.parts])
    if variable.place is None:
        return Value(variable.type)
    return Value(variable.type, builder.load(variable.place, typ=variable.type.llvm))


def field_of(builder: Any, record: Value, name: str) -> Value:
    """Return a field of a record; one that is an array is not copied."""
    kind, count, place = _find_field(builder, record, name)
    if count is not None:
        made = ir.Constant(Array(kind).llvm, ir.Undefined)
        made = builder.insert_value(made, place, 0)
        return Value(Array(kind), builder.insert_value(made, ir.Constant(_I64, count), 1))
    return Value(kind, _load(builder, kind, place))


def set_field(builder: Any, record: Value, name: str, value: Value) -> None:
    """Assign to a field of a record."""
    kind, count, place = _find_field(builder, record, name)
    if count is not None:
        raise KernelError(f"{name} is an array")
    _store(builder, convert(builder, value, kind), place)


def _find_field(builder: Any, record: Value, name: str) -> tuple[Type, int | None, Any]:
    """Return a field's type, its numbers if it is an array, and its place."""
    assert isinstance(record.type, Record)
    fields: Mapping[str, Any] = record.type.layout.fields or {}
    if name not in fields:
        raise KernelError(f"the record has no {name}")
    layout, offset = fields[name][:2]
    count = None
    if layout.subdtype is not None:
        layout, (count,) = layout.subdtype
    where = _move(builder, record.llvm, ir.Constant(_I64, offset), _I8)
    return of_number(layout.str), count, where


def _move(builder: Any, where: Any, count: Any, kind: Any) -> Any:
    return builder.gep(where, [count], source_etype=kind)


def _load(builder: Any, kind: Type, where: Any) -> Any:
    loaded = builder.load(where, typ=kind.llvm)
    loaded.align = _bytes(kind)
    return loaded


def _store(builder: Any, value: Value, where: Any) -> None:
    builder.store(value.llvm, where).align = _bytes(value.type)


def _bytes(kind: Type) -> int:
    bits: int = getattr(kind, "bits", 64)
    return bits // 8


def _element(builder: Any, whole: Value, index: Value) -> tuple[Type, Any]:
    """Return the type and the place of an array's element."""
    if not isinstance(whole.type, Array):
        raise KernelError(f"{whole.type} has no elements")
    _check_index(index)
    if index.known is not None and index.known < 0:
        raise KernelError("arrays are not counted from their end")
    first = builder.extract_value(whole.llvm, 0)
    place = convert(builder, index, int64).llvm
    return whole.type.item, _move(builder, first, place, whole.type.item.llvm)


def _check_index(index: Value) -> None:
    if not isinstance(index.type, Integer):
        raise KernelError(f"an index is no {index.type}")


def element_at(builder: Any, whole: Value, index: Value) -> Value:
    """Return an element of an array, or of a tuple of values of one type; bounds are not tested."""
    if isinstance(whole.type, Tuple | UniTuple):
        return _item_of(builder, spread(builder, whole), index)
    kind, where = _element(builder, whole, index)
    return Value(kind, _load(builder, kind, where))


def _item_of(builder: Any, items: Sequence[Value], index: Value) -> Value:
    _check_index(index)
    if index.known is not None:
        if not -len(items) <= index.known < len(items):
            raise KernelError(f"a tuple of {len(items)} has no item {index.known}")
        chosen: Value = items[index.known]
        return chosen
    kind, found = items[0].type, packed(builder, items[-1])
    if any(each.type != kind for each in items):
        raise KernelError("the items of the tuple have several types")
    for place, item in enumerate(items[:-1]):
        own = builder.icmp_signed("==", index.llvm, ir.Constant(index.llvm.type, place))
        found = builder.select(own, packed(builder, item), found)
    return Value(kind, found)


def set_element(builder: Any, whole: Value, index: Value, value: Value) -> None:
    """Assign to an element of an array."""
    kind, where = _element(builder, whole, index)
    _store(builder, convert(builder, value, kind), where)


def size_of(builder: Any, whole: Value) -> Value:
    """Return the number of an array's elements."""
    if not isinstance(whole.type, Array):
        raise KernelError(f"{whole.type} is no array")
    return Value(int64, builder.extract_value(whole.llvm, 1))
