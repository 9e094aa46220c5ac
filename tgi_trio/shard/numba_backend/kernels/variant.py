"""Compile-time choices in kernels.

A `Variant` is an argument of every kernel, but carries no value at run time. All of it is in its
numba *type*, so numba compiles each kernel once per variant, and `variant.weights.step` is a
constant in a kernel. `Count` does the same for one number, such as the rows of a tile.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    intrinsic,
    models,
    register_model,
    typeof_impl,
    unbox,
)

from tgi_trio.shard.numba_backend.variant import Variant
from tgi_trio.shard.numba_backend.weight_layout import Storage


class VariantType(types.Type):
    """The numba type that carries a Variant."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        super().__init__(name=repr(variant))


class StorageType(types.Type):
    """The numba type that carries a Storage, a part of a Variant."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        super().__init__(name=repr(storage))


class CountType(types.Type):
    """The numba type that carries a number."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(name=f"Count({value})")


register_model(VariantType)(models.OpaqueModel)
register_model(StorageType)(models.OpaqueModel)
register_model(CountType)(models.OpaqueModel)


@typeof_impl.register(Variant)
def _type_of(value: Variant, context: Any) -> VariantType:
    return VariantType(value)


@unbox(VariantType)
def _unbox(kind: VariantType, value: Any, context: Any) -> NativeValue:
    return NativeValue(context.context.get_dummy_value())


@infer_getattr
class _VariantAttributes(AttributeTemplate):
    key = VariantType

    def generic_resolve(self, kind: VariantType, name: str) -> types.Type | None:
        return _constant_type(getattr(kind.variant, name, None))


@infer_getattr
class _StorageAttributes(AttributeTemplate):
    key = StorageType

    def generic_resolve(self, kind: StorageType, name: str) -> types.Type | None:
        return _constant_type(getattr(kind.storage, name, None))


def _constant_type(value: Storage | int | None) -> types.Type | None:
    if isinstance(value, Storage):
        return StorageType(value)
    return None if value is None else types.literal(int(value))


@lower_getattr_generic(VariantType)
def _variant_attribute(context: Any, builder: Any, kind: VariantType, value: Any, name: str) -> Any:
    return _constant(context, getattr(kind.variant, name))


@lower_getattr_generic(StorageType)
def _storage_attribute(context: Any, builder: Any, kind: StorageType, value: Any, name: str) -> Any:
    return _constant(context, getattr(kind.storage, name))


def _constant(context: Any, value: Storage | int) -> Any:
    if isinstance(value, Storage):
        return context.get_dummy_value()
    return ir.Constant(ir.IntType(64), int(value))


@intrinsic(prefer_literal=True)
def count(context: Any, value: types.IntegerLiteral) -> Any:
    """Return a compile-time constant as a type."""
    if not isinstance(value, types.IntegerLiteral):
        return None
    return CountType(value.literal_value)(
        value
    ), lambda ctx, builder, signature, arguments: ctx.get_dummy_value()


@intrinsic
def number(context: Any, value: CountType) -> Any:
    """Return a Count as an ordinary number."""
    constant = ir.Constant(ir.IntType(64), value.value)
    return types.int64(value), lambda ctx, builder, signature, arguments: constant
