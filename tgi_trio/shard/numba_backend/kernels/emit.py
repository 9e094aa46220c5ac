"""Adding an operation that numba lacks: a Python function that writes its LLVM instructions.

`@operation(result, *arguments)` turns `emit(builder, *values)` into a function for kernels. The
function runs once per call site, when a kernel is compiled; what it returns is the value of the
call in the generated code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from tgi_trio.shard.numba_backend.weight_layout import LANES

FLOAT, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
POINTER = ir.PointerType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
HALVES = ir.VectorType(I16, LANES)  # bits of bfloat16 numbers
BYTES = ir.VectorType(ir.IntType(8), LANES)


class VectorType(types.Type):
    """Sixteen float32 numbers."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: VectorType) -> None:
        super().__init__(manager, kind, FLOATS)


vector = VectorType()
address = types.int64  # of a byte in memory; kernels do their own address arithmetic


def operation(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes an operation of an emitter; see the module."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            return result(*arguments), lambda ctx, builder, signature, values: emit(
                builder, *values
            )

        # numba reads the signature: the typing context, then one parameter per argument.
        names = ["context", *(f"argument{i}" for i in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_ONLY
        typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in names]
        )
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typed)

    return decorate


def call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Call an LLVM intrinsic or a function of the C library by name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def at(builder: Any, where: Any) -> Any:
    """Return an address as a pointer."""
    return builder.inttoptr(where, POINTER)


def load_as(builder: Any, where: Any, kind: ir.Type, align: int = 4) -> Any:
    """Read a value of `kind`, with the alignment of its elements."""
    value = builder.load(at(builder, where), typ=kind)
    value.align = align
    return value


def store_as(builder: Any, value: Any, where: Any, align: int = 4) -> Any:
    """Write a value; return numba's None."""
    builder.store(value, at(builder, where)).align = align
    return none()


def none() -> Any:
    """Return numba's None."""
    return ir.Constant(POINTER, None)


def splat(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    """Return a vector with `value` in every lane."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, value, I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(INTS, [0] * LANES))


def floats(value: float) -> ir.Constant:
    """Return a constant vector."""
    return ir.Constant(FLOATS, [value] * LANES)


def ints(value: int) -> ir.Constant:
    """Return a constant vector of integers."""
    return ir.Constant(INTS, [value] * LANES)
