"""Compiled kernels of panels, and how a step calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir
from numba import typeof, types
from numba.extending import intrinsic

from tgi_trio.shard.numba_backend.kernels import is_marked, mark
from tgi_trio.shard.numba_backend.kernels.emit import I32, I64, POINTER, none
from tgi_trio.shard.numba_backend.kernels.quantised.panels import multiply_panel
from tgi_trio.shard.numba_backend.kinds.kind import BLOCK_INPUTS
from tgi_trio.shard.numba_backend.multiplier import Multiplier

_ARGUMENTS = 10  # integers, behind the multiplier


@dataclass(frozen=True, slots=True)
class PanelKernel:
    """`multiply_panel` for one kind, compiled."""

    multiplier: Multiplier
    address: int
    _compiled: Any

    def room_bytes(self, inputs: int) -> int:
        """Return the size of an unpacked panel."""
        return inputs // BLOCK_INPUTS * self.multiplier.unpacked.block_bytes

    def call(
        self,
        rows: int,
        inputs: int,
        stride: int,
        weights: int,
        blocks: int,
        span_blocks: int,
        panel_bytes: int,
        mode: int,
        room: int,
        sums: int,
    ) -> None:
        """See `multiply_panel`."""
        self._compiled(
            self.multiplier, rows, inputs, stride, weights, blocks, span_blocks, panel_bytes,
            mode, room, sums,
        )  # fmt: skip


def compile_panel_kernel(multiplier: Multiplier) -> PanelKernel:
    """Compile, or take from the cache; raises what the compiler raises without instructions."""
    signature = (typeof(multiplier), *[types.int64] * _ARGUMENTS)
    compiled = multiply_panel.compile(signature)
    mark(multiplier.name)
    made = multiply_panel.overloads[signature]
    where = made.library.get_pointer_to_function(made.fndesc.llvm_func_name)
    return PanelKernel(multiplier, where, compiled)


def is_compiled(multiplier: Multiplier) -> bool:
    """Return whether the cache has it; a guess, which costs time where it is wrong."""
    return is_marked(multiplier.name)


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
    """Call the `multiply_panel` at an address, as numba's code calls its own functions.

    They take a place for the result and one for an exception first, and neither is used here.
    """

    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        where, *numbers = values
        kind = ir.FunctionType(I32, [POINTER] * 3 + [I64] * _ARGUMENTS)
        result, problem = builder.alloca(POINTER), builder.alloca(POINTER)
        function = builder.inttoptr(where, ir.PointerType(kind))
        builder.call(function, [result, problem, ir.Constant(POINTER, None), *numbers])
        return none()

    return types.none(*[types.int64] * (_ARGUMENTS + 1)), emit
