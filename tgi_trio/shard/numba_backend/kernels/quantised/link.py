"""How a step calls the compiled kernels of panels."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from tgi_trio.shard.numba_backend.kernels.emit import I32, I64, POINTER, none

_ARGUMENTS = 10  # integer arguments after the multiplier


@intrinsic
def call_panel_kernel(
    context: Any,
    function: types.Integer,
    rows: types.Integer,
    inputs: types.Integer,
    stride: types.Integer,
    weights: types.Integer,
    blocks: types.Integer,
    span_blocks: types.Integer,
    panel_bytes: types.Integer,
    mode: types.Integer,
    room: types.Integer,
    sums: types.Integer,
) -> Any:
    """Call a `multiply_panel` at an address, by the calling convention of numba's own functions.

    Their first arguments are where to put the result and an exception, which are unused here.
    """

    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        where, *numbers = values
        kind = ir.FunctionType(I32, [POINTER] * 3 + [I64] * _ARGUMENTS)
        result, problem = builder.alloca(POINTER), builder.alloca(POINTER)
        function = builder.inttoptr(where, ir.PointerType(kind))
        builder.call(function, [result, problem, ir.Constant(POINTER, None), *numbers])
        return none()

    return types.none(*[types.int64] * (_ARGUMENTS + 1)), emit
