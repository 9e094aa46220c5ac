"""Arrays at an address, for kernels that work on single numbers."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.compiler.values import unify
from tgi_trio.shard.cpu_backend.kernels.emit import FLOAT, I32, I64, address, at, operation


@operation(types.int64, types.float32)
def bits_of(builder: Any, value: Any) -> Any:
    """Return the bits of a float32 as an integer; the order of non-negative numbers is kept."""
    return builder.zext(builder.bitcast(value, I32), I64)


@operation(types.float32, types.int64)
def float_of(builder: Any, bits: Any) -> Any:
    """Return the float32 with the given bits."""
    return builder.bitcast(builder.trunc(bits, I32), FLOAT)


def _array_of(numbers: types.Type, doc: str) -> Any:
    """Return a function (address, size) -> array."""
    kind = types.Array(numbers)

    def make(builder: Any, signature: Any, values: Any) -> Any:
        where, size = values
        array = builder.insert_value(ir.Constant(kind.llvm, ir.Undefined), at(builder, where), 0)
        return builder.insert_value(array, size, 1)

    def typed(where: Any, size: Any) -> Any:
        return kind(address, types.int64), make

    typed.__doc__ = doc
    return intrinsic(typed)


floats_at = _array_of(types.float32, "Return float32 [size].")
doubles_at = _array_of(types.float64, "Return float64 [size].")
ints_at = _array_of(types.int64, "Return int64 [size].")
words_at = _array_of(types.uint64, "Return uint64 [size].")


def _one_of_two(smaller: bool) -> Any:
    """Return a function of two numbers."""
    sign = "<" if smaller else ">"

    def choose(builder: Any, signature: Any, values: Any) -> Any:
        kind, compare = signature.return_type, builder.fcmp_ordered
        if isinstance(kind, types.Integer):
            compare = builder.icmp_signed if kind.signed else builder.icmp_unsigned
        return builder.select(compare(sign, *values), *values)

    def typed(a: Any, b: Any) -> Any:
        kind = unify(a, b)
        return kind(kind, kind), choose

    return intrinsic(typed)


lesser = _one_of_two(smaller=True)
greater = _one_of_two(smaller=False)
