"""What is known of operations of Triton's interpreter; see `quick_operations.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

MOST: Final = 1 << 14  # operations, with their operands' types, that are remembered
WHOLE: Final = frozenset(("int32", "int64"))
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

    def spread(self, x: Any, sizes: tuple[int, ...]) -> Any:
        """Return the handle of a tensor that is repeated to `sizes`."""
        data = x.handle.data
        if data.shape == sizes:
            return x.handle
        return self.handle(np.broadcast_to(data, sizes), x.handle.dtype)

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
        key: Any = (type(value), identify(value), element, numbers)
        if (found := self.numbers.get(key)) is None:
            if not _is_taken(value, element):
                return None
            if len(self.numbers) >= MOST:
                self.numbers.clear()
            found = self.numbers[key] = np.array([value], numbers)
            found.flags.writeable = False
        return found


def identify(value: Any) -> Any:
    """Return what tells a number from all others: zeros of both signs are equal."""
    return repr(value) if type(value) is float else value


def _is_taken(value: Any, element: str) -> bool:
    """Return whether Triton takes a number for one of a tensor's type, whatever it is beside."""
    if element in WHOLE:
        return type(value) is int and -_LARGEST[element] <= value < _LARGEST[element]
    if element != "fp32":
        return False
    if type(value) is int:
        return abs(value) < 1 << 24
    if type(value) is not float:
        return False
    return value == 0 or math.isinf(value) or 1e-30 < abs(value) < 1e30
