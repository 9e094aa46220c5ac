"""Reads and writes memory in Triton's interpreter at once, after it has shown how.

See `quick_operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tgi_trio.testing.quick_memory import MOST, Memory, identify


def quicken_load(memory: Memory, plain: Callable[..., Any]) -> Callable[..., Any]:
    known, tensor, constant = memory.known, memory.tensor, memory.constant
    unknown = object()

    @lru_cache(MOST)
    def fill(value: Any, _: Any, element: Any, sizes: tuple[int, ...]) -> Any:
        number = memory.number(value, element.name, memory.dtype(element))
        return None if number is None else memory.handle(np.broadcast_to(number, sizes), element)

    spread = memory.spread

    def operands(pointer: Any, mask: Any, other: Any) -> tuple[Any, Any] | None:
        """Return handles of a mask and of what is loaded elsewhere, None for nothing."""
        element, sizes = pointer.dtype.element_ty, pointer.handle.data.shape
        chosen = memory.ones(sizes) if mask is None else spread(mask, sizes)
        if other is None:
            return chosen, None
        if type(other) is tensor:
            return (chosen, spread(other, sizes)) if other.dtype.name == element.name else None
        filled = fill(other, (type(other), identify(other)), element, sizes)
        return None if filled is None else (chosen, filled)

    def call(pointer: Any, mask: Any = None, other: Any = None, *rest: Any, **options: Any) -> Any:
        if type(other) is constant:
            other = other.value
        ours = type(pointer) is tensor and pointer.dtype.is_ptr() and not rest and not options
        if not ours or not (mask is None or (type(mask) is tensor and mask.dtype.name == "int1")):
            return plain(pointer, mask, other, *rest, **options)
        names = (
            None if mask is None else mask.type.name,
            other.type.name if type(other) is tensor else (type(other), identify(other)),
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


def quicken_store(memory: Memory, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return `store`, which writes at once where nothing is converted or refused."""
    tensor = memory.tensor
    nothing: dict[Any, Any] = {}  # what Triton has returned, by types

    def fits(x: Any, pointer: Any) -> bool:
        if not pointer.type.is_block():
            return not x.type.is_block()
        own, sizes = x.handle.data.shape, pointer.handle.data.shape
        if not x.type.is_block():
            return True
        return len(own) == len(sizes) and all(
            one in (1, size) for one, size in zip(own, sizes, strict=True)
        )

    def call(pointer: Any, value: Any, mask: Any = None, *rest: Any, **options: Any) -> Any:
        given = rest or options or type(pointer) is not tensor or type(value) is not tensor
        if given or not (mask is None or type(mask) is tensor):
            return plain(pointer, value, mask, *rest, **options)
        key = (pointer.type.name, value.type.name, None if mask is None else mask.type.name)
        if key not in nothing:
            if len(nothing) >= MOST:
                nothing.clear()
            told = plain(pointer, value, mask)  # which refuses what cannot be
            element = pointer.dtype.element_ty.name
            same = element == value.dtype.name != "int1" and fits(value, pointer)
            same &= mask is None or (mask.dtype.name == "int1" and fits(mask, pointer))
            nothing[key] = told if same else None
            return told
        if (told := nothing[key]) is None:
            return plain(pointer, value, mask)
        sizes = pointer.handle.data.shape
        chosen = memory.ones(sizes) if mask is None else memory.spread(mask, sizes)
        spread = memory.spread(value, sizes)
        memory.builder.create_masked_store(pointer.handle, spread, chosen, None, None)
        return told

    return call
