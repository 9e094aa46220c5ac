"""Adding an operation that Python lacks: a Python function that writes its LLVM instructions.

`@operation(result, *arguments)` turns `emit(builder, *values)` into a function for kernels. The
function runs once per call site, when a kernel is compiled; what it returns is the value of the
call in the generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import Intrinsic
from tgi_trio.shard.cpu_backend.weight_layout import LANES

FLOAT, I16, I32, I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
POINTER = ir.PointerType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
HALVES = ir.VectorType(I16, LANES)  # bits of bfloat16 numbers
BYTES = ir.VectorType(ir.IntType(8), LANES)


vector = types.Type("Vector", FLOATS)  # sixteen float32 numbers
address = types.int64  # of a byte in memory; kernels do their own address arithmetic


def operation(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes an operation of an emitter; see the module."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def define(*given: Any) -> Any:
            return result(*arguments), lambda builder, signature, values: emit(builder, *values)

        define.__name__, define.__doc__ = emit.__name__, emit.__doc__
        return Intrinsic(define, literal=False)

    return decorate


def call(builder: Any, name: str, result: ir.Type, *values: Any) -> Any:
    """Call an LLVM intrinsic or a function of the C library by name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(declared(builder, kind, name), values)


def declared(builder: Any, kind: ir.FunctionType, name: str) -> Any:
    """Return a function that is defined elsewhere."""
    found = builder.module.globals.get(name)
    return ir.Function(builder.module, kind, name) if found is None else found


def call_address(builder: Any, where: Any, numbers: Sequence[Any]) -> Any:
    """Call an entry at an address; return what stands for no value."""
    kind = ir.FunctionType(I32, [I64] * len(numbers))
    builder.call(builder.inttoptr(where, ir.PointerType(kind)), numbers)
    return none()


def pack(builder: Any, values: Sequence[Any]) -> Any:
    """Return values of one type as an array of LLVM."""
    made = ir.Constant(ir.ArrayType(values[0].type, len(values)), ir.Undefined)
    for place, value in enumerate(values):
        made = builder.insert_value(made, value, place)
    return made


def unpack(builder: Any, whole: Any, count: int) -> list[Any]:
    """Return the values of such an array."""
    return [builder.extract_value(whole, place) for place in range(count)]


def at(builder: Any, where: Any) -> Any:
    """Return an address as a pointer."""
    return builder.inttoptr(where, POINTER)


def load_as(builder: Any, where: Any, kind: ir.Type, align: int = 4) -> Any:
    """Read a value of `kind`, with the alignment of its elements."""
    value = builder.load(at(builder, where), typ=kind)
    value.align = align
    return value


def store_as(builder: Any, value: Any, where: Any, align: int = 4) -> Any:
    """Write a value; return what stands for no value."""
    builder.store(value, at(builder, where)).align = align
    return none()


def none() -> Any:
    """Return what stands for no value."""
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
