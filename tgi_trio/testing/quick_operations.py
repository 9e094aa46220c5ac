"""Computes the commonest operations of Triton's interpreter at once, after it has shown how.

The interpreter finds the type of a result anew for each operation: it compares and converts types,
brings both operands to one shape, and checks what it has made, in ten times the time that numpy
takes. Here it does so once for the types of an operation's operands, and beside it numpy computes
the same. If type and bits are equal, numpy alone computes what follows with operands of these
types; otherwise Triton always does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

FUNCTIONS: Final = frozenset(("where", "load", "arange", "full", "zeros"))
MOST: Final = 1 << 14  # operations, with their operands' types, that are remembered

_PAIRS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__rsub__": lambda one, other: np.subtract(other, one),
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    "__truediv__": np.divide,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
}
_OF_BITS: Final = frozenset(("__and__", "__or__", "__xor__", "__eq__", "__ne__"))
_WHOLE: Final = frozenset(("int32", "int64"))
# Numbers that numpy computes with as Triton says; those of 16 and 8 bits are converted around it.
_EXACT: Final = _WHOLE | {"int1", "int8", "uint8", "int16", "uint32", "uint64", "fp32", "fp64"}
_COUNTED: Final = _WHOLE | {"int1", "int8", "uint8", "int16", "uint32"}
_FRACTIONS: Final = frozenset(("fp32", "fp64"))
_LARGEST: Final = {"int32": 1 << 31, "int64": 1 << 63}


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of a result, as Triton has found it."""

    type: Any
    element: Any  # of the result's handle
    scalar: Any
    numel: Any
    shape: Any
    sizes: tuple[int, ...]  # of the array
    numbers: Any  # the array's dtype

    @classmethod
    def of(cls, x: Any) -> Kind:
        data = x.handle.data
        return cls(x.type, x.handle.dtype, x.dtype, x.numel, x.shape, data.shape, data.dtype)


class Memory:
    """What is known of operations, by their names and the types of their operands."""

    def __init__(self) -> None:
        from triton import language
        from triton.runtime import interpreter

        self.tensor, self.handle = language.tensor, interpreter.TensorHandle
        self.constant, self.builder = language.constexpr, interpreter.interpreter_builder
        self.dtype, self._bit = interpreter._get_np_dtype, language.int1
        self.known: dict[Any, Kind | None] = {}
        self.numbers: dict[Any, Any] = {}
        self._ones: dict[tuple[int, ...], Any] = {}

    def ones(self, sizes: tuple[int, ...]) -> Any:
        """Return the handle of a mask that leaves nothing out."""
        if (found := self._ones.get(sizes)) is None:
            found = self._ones[sizes] = self.handle(np.ones(sizes, np.bool_), self._bit)
        return found

    def result(self, data: Any, kind: Kind) -> Any:
        """Return a tensor of a kind."""
        handle, made = object.__new__(self.handle), object.__new__(self.tensor)
        handle.data, handle.dtype, handle.attr = data, kind.element, {}
        made.handle, made.type, made.dtype = handle, kind.type, kind.scalar
        made.numel, made.shape = kind.numel, kind.shape
        return made

    def agree(self, plain: Any, data: Any) -> Kind | None:
        """Return the kind of Triton's result if an array equals it, and None otherwise."""
        if type(plain) is not self.tensor:
            return None
        kind = Kind.of(plain)
        same = data.dtype == kind.numbers and data.shape == kind.sizes
        return kind if same and data.tobytes() == plain.handle.data.tobytes() else None

    def learn(self, key: Any, plain: Any, quick: Callable[[], Any]) -> Any:
        """Remember whether `quick` finds what Triton has found; return that."""
        if len(self.known) >= MOST:
            self.known.clear()
        self.known[key] = self.agree(plain, quick())
        return plain

    def number(self, value: Any, element: str, numbers: Any) -> Any:
        """Return a number as an array of a dtype; None where Triton would choose another."""
        key: Any = (type(value), _name(value), element, numbers)
        if (found := self.numbers.get(key)) is None:
            if not _is_taken(value, element):
                return None
            if len(self.numbers) >= MOST:
                self.numbers.clear()
            found = self.numbers[key] = np.array([value], numbers)
            found.flags.writeable = False
        return found


def _name(value: Any) -> Any:
    """Return what tells a number from all others: zeros of both signs are equal."""
    return repr(value) if type(value) is float else value


def _is_taken(value: Any, element: str) -> bool:
    """Return whether Triton takes a number for one of a tensor's type, whatever it is beside."""
    if element in _WHOLE:
        return type(value) is int and -_LARGEST[element] <= value < _LARGEST[element]
    if element != "fp32":
        return False
    if type(value) is int:
        return abs(value) < 1 << 24
    if type(value) is not float:
        return False
    return value == 0 or math.isinf(value) or 1e-30 < abs(value) < 1e30


def quicken(memory: Memory, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of tensors, or a function, that computes at once where it can."""
    if (pair := _PAIRS.get(name)) is not None:
        return _pair(memory, name, plain, pair)
    makers = {
        **{"__getitem__": _expand, "where": _where, "load": _load, "to": _convert},
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
            key = (one.type.name, type(other), _name(other))
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
    if not (kinds <= _WHOLE or alike) or (element == "int1" and name not in _OF_BITS):
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
    if other.dtype.name not in _WHOLE:
        return None
    return lambda data, other: data + other.handle.data.astype(np.uint64) * width


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
            each.type.name if type(each) is tensor else (type(each), _name(each)) for each in (x, y)
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


def _load(memory: Memory, plain: Callable[..., Any]) -> Callable[..., Any]:
    known, tensor, constant = memory.known, memory.tensor, memory.constant
    unknown = object()

    @lru_cache(MOST)
    def fill(value: Any, _: Any, element: Any, sizes: tuple[int, ...]) -> Any:
        number = memory.number(value, element.name, memory.dtype(element))
        return None if number is None else memory.handle(np.broadcast_to(number, sizes), element)

    def spread(x: Any, sizes: tuple[int, ...]) -> Any:
        data = x.handle.data
        if data.shape == sizes:
            return x.handle
        return memory.handle(np.broadcast_to(data, sizes), x.handle.dtype)

    def operands(pointer: Any, mask: Any, other: Any) -> tuple[Any, Any] | None:
        """Return handles of a mask and of what is loaded elsewhere, None for nothing."""
        element, sizes = pointer.dtype.element_ty, pointer.handle.data.shape
        chosen = memory.ones(sizes) if mask is None else spread(mask, sizes)
        if other is None:
            return chosen, None
        if type(other) is tensor:
            return (chosen, spread(other, sizes)) if other.dtype.name == element.name else None
        filled = fill(other, (type(other), _name(other)), element, sizes)
        return None if filled is None else (chosen, filled)

    def call(pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **options: Any) -> Any:
        if type(other) is constant:
            other = other.value
        ours = type(pointer) is tensor and pointer.dtype.is_ptr() and not rest and not options
        if not ours or not (mask is None or (type(mask) is tensor and mask.dtype.name == "int1")):
            return plain(pointer, mask, other, *rest, **options)
        names = (
            None if mask is None else mask.type.name,
            other.type.name if type(other) is tensor else (type(other), _name(other)),
        )
        key = ("load", pointer.type.name, *names)
        kind: Any = known.get(key, unknown)
        if kind is None:
            return plain(pointer, mask, other)
        if (
            pointer.dtype.element_ty.name == "int1"
            or (both := operands(pointer, mask, other)) is None
        ):
            known[key] = None
            return plain(pointer, mask, other)

        def read() -> Any:
            return memory.builder.create_masked_load(pointer.handle, *both, None, None, False).data

        if kind is unknown:
            return memory.learn(key, plain(pointer, mask, other), read)
        data = read()
        return memory.result(data, kind)

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
        return type(x), _name(x)

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
