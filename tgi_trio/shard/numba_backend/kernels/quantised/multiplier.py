"""A `Multiplier` in kernels: all of it is in its numba type, like that of a `Variant`."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    models,
    register_model,
    typeof_impl,
    unbox,
)

from tgi_trio.shard.numba_backend.multiplier import Multiplier


class MultiplierType(types.Type):
    """The numba type that carries a Multiplier."""

    def __init__(self, multiplier: Multiplier) -> None:
        self.multiplier = multiplier
        super().__init__(name=f"Multiplier({multiplier.name})")


register_model(MultiplierType)(models.OpaqueModel)


@typeof_impl.register(Multiplier)
def _type_of(value: Multiplier, context: Any) -> MultiplierType:
    return MultiplierType(value)


@unbox(MultiplierType)
def _unbox(kind: MultiplierType, value: Any, context: Any) -> NativeValue:
    return NativeValue(context.context.get_dummy_value())


@infer_getattr
class _MultiplierAttributes(AttributeTemplate):
    key = MultiplierType

    def generic_resolve(self, kind: MultiplierType, name: str) -> types.Type | None:
        value = getattr(kind.multiplier, name, None)
        if isinstance(value, Multiplier):
            return MultiplierType(value)
        return types.literal(value) if isinstance(value, int) else None


@lower_getattr_generic(MultiplierType)
def _attribute(context: Any, builder: Any, kind: MultiplierType, value: Any, name: str) -> Any:
    found = getattr(kind.multiplier, name)
    if isinstance(found, Multiplier):
        return context.get_dummy_value()
    return ir.Constant(ir.IntType(64), int(found))
