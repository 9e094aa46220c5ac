"""How a step calls the compiled kernels of panels."""

from __future__ import annotations

from typing import Any

from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.emit import call_address

_ARGUMENTS = 10  # integer arguments after the multiplier


@intrinsic
def call_panel_kernel(
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
    """Call a way to multiply a panel (`WAYS` in `machine_code/entry.py`) at an address."""

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        where, *numbers = values
        return call_address(builder, where, numbers)

    return types.none(*[types.int64] * (_ARGUMENTS + 1)), emit
