"""Compile-time choices in kernels.

A `Variant` is an argument of every kernel, but carries no value at run time. All of it is in its
*type*, so a kernel is compiled once per variant, and `variant.weights.step` is a constant in it.
`Count` does the same for one number, such as the rows of a tile.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.variant import Variant
from tgi_trio.shard.cpu_backend.weight_layout import Storage


class VariantType(types.Type):
    """The type that carries a Variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        super().__init__(name=repr(variant))

    def attribute(self, name: str) -> types.Type | int | None:
        """Return a constant of the variant, or one of its storages."""
        return _constant(getattr(self.variant, name, None))


class StorageType(types.Type):
    """The type that carries a Storage, a part of a Variant."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        super().__init__(name=repr(storage))

    def attribute(self, name: str) -> types.Type | int | None:
        """Return a constant of the storage."""
        return _constant(getattr(self.storage, name, None))


class CountType(types.Type):
    """The type that carries a number."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(name=f"Count({value})")


def _constant(value: Storage | int | None) -> types.Type | int | None:
    if isinstance(value, Storage):
        return StorageType(value)
    return None if value is None else int(value)


@intrinsic(prefer_literal=True)
def count(value: types.IntegerLiteral) -> Any:
    """Return a compile-time constant as a type."""
    if not isinstance(value, types.IntegerLiteral):
        return None
    return CountType(value.literal_value)(value), lambda builder, signature, arguments: None


@intrinsic
def number(value: CountType) -> Any:
    """Return a Count as an ordinary number."""
    constant = ir.Constant(ir.IntType(64), value.value)
    return types.int64(value), lambda builder, signature, arguments: constant
