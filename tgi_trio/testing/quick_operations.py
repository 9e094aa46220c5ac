"""Computes the commonest operations of Triton's interpreter at once, after it has shown how.

The interpreter finds the type of a result anew for each operation: it compares and converts types,
brings both operands to one shape, and checks what it has made, in ten times the time that numpy
takes. Here it does so once for the types of an operation's operands, and beside it numpy computes
the same. If type and bits are equal, numpy alone computes what follows with operands of these
types; otherwise Triton always does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tgi_trio.testing.quick_accesses import quicken_load, quicken_store
from tgi_trio.testing.quick_memory import MOST, WHOLE, Kind, Memory, identify

FUNCTIONS: Final = frozenset(
    ("where", "load", "store", "arange", "full", "zeros", "minimum", "maximum", "trans")
)


def _divide(one: Any, other: Any) -> Any:
    """Divide whole numbers as Triton does, towards zero."""
    return (one - np.fmod(one, other)) // other


_PAIRS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__rsub__": lambda one, other: np.subtract(other, one),
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    "__truediv__": np.divide,
    "__rtruediv__": lambda one, other: np.divide(other, one),
    "__floordiv__": _divide,
    "__mod__": np.fmod,
    "__lshift__": np.left_shift,
    "__rshift__": np.right_shift,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
    "minimum": np.minimum,
    "maximum": np.maximum,
}
_OF_BITS: Final = frozenset(("__and__", "__or__", "__xor__", "__eq__", "__ne__"))
# Numbers that numpy computes with as Triton says; those of 16 and 8 bits are converted around it.
_EXACT: Final = WHOLE | {"int1", "int8", "uint8", "int16", "uint32", "uint64", "fp32", "fp64"}
_COUNTED: Final = WHOLE | {"int1", "int8", "uint8", "int16", "uint32"}
_FRACTIONS: Final = frozenset(("fp32", "fp64"))


def quicken(memory: Memory, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of tensors, or a function, that computes at once where it can."""
    if (pair := _PAIRS.get(name)) is not None:
        quick = _pair(memory, name, plain, pair)
        return quick if name.startswith("__") else _of_tensors(memory, plain, quick)
    makers = {
        **{"__getitem__": _expand, "where": _where, "to": _convert},
        **{"__neg__": _negate, "trans": _turn, "load": quicken_load, "store": quicken_store},
        **{"arange": _keep, "full": _keep, "zeros": _keep},
    }
    return makers[name](memory, plain) if name in makers else plain


def _pair(
    memory: Memory, name: str, plain: Callable[..., Any], compute: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    tensor, constant, result = memory.tensor, memory.constant, memory.result
    # By operands' types: what computes the array, and the kind of result.
    known: dict[Any, tuple[Callable[[Any, Any], Any], Kind] | None] = {}
    unknown = object()

    def call(one: Any, other: Any) -> Any:
        key: tuple[Any, ...]
        if type(other) is tensor:
            key = (one.type.name, other.type.name)
        else:
            if type(other) is constant:
                other = other.value
            key = (one.type.name, type(other), identify(other))
        try:
            found: Any = known.get(key, unknown)
        except TypeError:  # what cannot be a part of a key
            return plain(one, other)
        if found is None:
            return plain(one, other)
        if found is unknown:
            return learn(key, one, other)
        data = found[0](one.handle.data, other)
        return result(data, found[1]) if data.shape == found[1].sizes else plain(one, other)

    def learn(key: Any, one: Any, other: Any) -> Any:
        if len(known) >= MOST:
            known.clear()
        quick, told = _find(memory, name, compute, one, other), plain(one, other)
        kind = None if quick is None else memory.agree(told, quick(one.handle.data, other))
        known[key] = None if quick is None or kind is None else (quick, kind)
        return told

    return call


def _find(
    memory: Memory, name: str, compute: Callable[[Any, Any], Any], one: Any, other: Any
) -> Callable[[Any, Any], Any] | None:
    """Return what computes from an array and another operand as Triton does, None for nothing."""
    element = one.dtype.name
    if one.dtype.is_ptr():
        width = max(1, one.dtype.element_ty.primitive_bitwidth // 8)
        return _find_move(memory, width, other) if name == "__add__" else None
    if type(other) is not memory.tensor:
        number = memory.number(other, element, one.handle.data.dtype)
        return None if number is None else lambda data, _: compute(data, number)
    kinds = {element, other.dtype.name}
    alike = len(kinds) == 1 and element in _EXACT
    if not (kinds <= WHOLE or alike) or (element == "int1" and name not in _OF_BITS):
        return None
    return lambda data, other: compute(data, other.handle.data)


def _find_move(memory: Memory, width: int, other: Any) -> Callable[[Any, Any], Any] | None:
    """Return what adds an offset, in numbers of `width` bytes, to pointers."""
    if type(other) is not memory.tensor:
        number = memory.number(other, "int32", np.int64)
        if number is None:
            return None
        moved = number.astype(np.uint64) * width
        return lambda data, _: data + moved
    if other.dtype.name not in WHOLE:
        return None
    return lambda data, other: data + other.handle.data.astype(np.uint64) * width


def _of_tensors(
    memory: Memory, plain: Callable[..., Any], quick: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """Return a function that is `quick` where its first operand is a tensor, without options."""
    tensor = memory.tensor

    def call(one: Any, other: Any, *rest: Any, **options: Any) -> Any:
        if rest or options or type(one) is not tensor:
            return plain(one, other, *rest, **options)
        return quick(one, other)

    return call


def _negate(memory: Memory, plain: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return `__neg__`, which subtracts from zero, as Triton does."""
    known, unknown = memory.known, object()

    def call(x: Any) -> Any:
        key = ("__neg__", x.type.name)
        kind: Any = known.get(key, unknown)
        if kind is None or x.dtype.name not in _EXACT:
            return plain(x)
        data = x.handle.data
        if kind is unknown:
            return memory.learn(key, plain(x), lambda: data.dtype.type(0) - data)
        return memory.result(data.dtype.type(0) - data, kind)

    return call


def _turn(memory: Memory, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `trans`, which is numpy's where no order of dimensions is given."""
    known, tensor, unknown = memory.known, memory.tensor, object()

    def call(x: Any, *order: Any, **options: Any) -> Any:
        if order or options or type(x) is not tensor:
            return plain(x, *order, **options)
        key = ("trans", x.type.name)
        kind: Any = known.get(key, unknown)
        if kind is None:
            return plain(x)
        data = x.handle.data
        if kind is unknown:
            return memory.learn(key, plain(x), lambda: data.T)
        return memory.result(data.T, kind) if data.T.shape == kind.sizes else plain(x)

    return call


def _expand(memory: Memory, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `__getitem__`, which is numpy's where dimensions are added to a tensor."""
    known, constant = memory.known, memory.constant
    every, unknown = slice(None), object()

    def call(x: Any, index: Any) -> Any:
        if type(index) is not tuple:
            return plain(x, index)
        parts = [part.value if type(part) is constant else part for part in index]
        form = tuple([part is None for part in parts])
        if not all(added or part == every for added, part in zip(form, parts, strict=True)):
            return plain(x, index)
        key = ("__getitem__", x.type.name, form)
        kind: Any = known.get(key, unknown)
        if kind is None:
            return plain(x, index)
        view = tuple(parts)
        if kind is unknown:
            return memory.learn(key, plain(x, index), lambda: x.handle.data[view])
        data = x.handle.data[view]
        return memory.result(data, kind) if data.shape == kind.sizes else plain(x, index)

    return call


def _where(memory: Memory, plain: Callable[..., Any]) -> Callable[..., Any]:
    known, tensor, constant = memory.known, memory.tensor, memory.constant
    unknown = object()

    def values(one: Any, other: Any) -> tuple[Any, Any] | None:
        """Return the arrays of two results, of which one may be a number."""
        if type(one) is tensor and type(other) is tensor:
            alike = one.dtype.name == other.dtype.name
            return (one.handle.data, other.handle.data) if alike else None
        if type(one) is tensor:
            number = memory.number(other, one.dtype.name, one.handle.data.dtype)
            return None if number is None else (one.handle.data, number)
        if type(other) is tensor:
            number = memory.number(one, other.dtype.name, other.handle.data.dtype)
            return None if number is None else (number, other.handle.data)
        return None

    def call(condition: Any, x: Any, y: Any) -> Any:
        x, y = (part.value if type(part) is constant else part for part in (x, y))
        if type(condition) is not tensor or condition.dtype.name != "int1":
            return plain(condition, x, y)
        names = [
            each.type.name if type(each) is tensor else (type(each), identify(each))
            for each in (x, y)
        ]
        key = ("where", condition.type.name, *names)
        kind: Any = known.get(key, unknown)
        if kind is None:
            return plain(condition, x, y)
        if (both := values(x, y)) is None:
            known[key] = None
            return plain(condition, x, y)
        if kind is unknown:
            chosen = condition.handle.data
            return memory.learn(key, plain(condition, x, y), lambda: np.where(chosen, *both))
        data = np.where(condition.handle.data, *both)
        return memory.result(data, kind) if data.shape == kind.sizes else plain(condition, x, y)

    return call


def _convert(memory: Memory, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `to`, which is numpy's where neither a fraction nor a half is involved."""
    known, constant = memory.known, memory.constant
    unknown = object()

    def call(x: Any, dtype: Any, *rest: Any, **options: Any) -> Any:
        if type(dtype) is constant:
            dtype = dtype.value
        if rest or options or dtype is None:
            return plain(x, dtype, *rest, **options)
        if x.dtype is dtype:
            return x
        key = ("to", x.type.name, dtype.name)
        kind: Any = known.get(key, unknown)
        if kind is None:
            return plain(x, dtype)
        if kind is unknown:
            if x.dtype.name not in _COUNTED or dtype.name not in _COUNTED - {"int1"} | _FRACTIONS:
                known[key] = None
                return plain(x, dtype)
            numbers = memory.dtype(dtype)
            return memory.learn(key, plain(x, dtype), lambda: x.handle.data.astype(numbers))
        return memory.result(x.handle.data.astype(kind.numbers), kind)

    return call


def _keep(memory: Memory, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of constants that keeps its results, which nobody can change."""
    kept: dict[Any, Any] = {}
    tensor, constant = memory.tensor, memory.constant

    def told(x: Any) -> Any:
        if type(x) is constant:
            x = x.value
        if type(x) is list or isinstance(x, tuple):
            return tuple([told(part) for part in x])
        if type(x) is tensor:
            raise TypeError
        return type(x), identify(x)

    def call(*given: Any, **options: Any) -> Any:
        try:
            key = (*map(told, given), *sorted(options), *map(told, options.values()))
            found = kept.get(key)
        except TypeError:
            return plain(*given, **options)
        if found is None:
            if len(kept) >= MOST:
                kept.clear()
            found = kept[key] = plain(*given, **options)
            found.handle.data.flags.writeable = False
        return memory.result(found.handle.data, Kind.of(found))

    return call
