"""Calls of operations that few models have: compiled apart from the step, and called by address.

numba compiles a kernel into each caller. So what a llama never runs is not part of the step's code,
and a model without a mixture of experts does not wait for its compilation. Such an entry gets a
variant, the thread's rank, and addresses: of the step, of the operation, of the counter of work
items taken, and of the thread's scratch memory.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic

from tgi_trio.shard.numba_backend.kernels.emit import I32, I64, POINTER, none
from tgi_trio.shard.numba_backend.tables import (
    BLOCKS,
    HYPER,
    LATENT,
    MIXER,
    MIXTURE,
    OPENING,
    OPERATION,
    OWN,
    PADDING,
    ROW,
    STEP,
    STREAM,
)

_ARGUMENTS = 5  # integer arguments after the variant


@intrinsic
def call_apart(
    context: Any,
    function: types.Integer,
    rank: types.Integer,
    step: types.Integer,
    operation: types.Integer,
    counter: types.Integer,
    scratch: types.Integer,
) -> Any:
    """Call an entry at an address, as `call_panel_kernel` does."""

    def emit(ctx: Any, builder: Any, signature: Any, values: Any) -> Any:
        where, *numbers = values
        kind = ir.FunctionType(I32, [POINTER] * 3 + [I64] * _ARGUMENTS)
        result, problem = builder.alloca(POINTER), builder.alloca(POINTER)
        entry = builder.inttoptr(where, ir.PointerType(kind))
        builder.call(entry, [result, problem, ir.Constant(POINTER, None), *numbers])
        return none()

    return types.none(*[types.int64] * (_ARGUMENTS + 1)), emit


@intrinsic
def address_of(context: Any, record: types.Record) -> Any:
    """Return the address of a record."""
    return types.int64(record), lambda ctx, builder, signature, values: builder.ptrtoint(
        values[0], I64
    )


def _record_of(layout: np.dtype[np.void], doc: str) -> Any:
    """Return a function from an address to the record at it."""
    kind = from_dtype(layout)

    def make(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(kind))

    def typed(context: Any, where: Any) -> Any:
        return kind(types.int64), make

    typed.__doc__ = doc
    return intrinsic(typed)


step_at = _record_of(STEP, "Return the step at an address.")
operation_at = _record_of(OPERATION, "Return the operation at an address.")
row_at = _record_of(ROW, "Return what to do with a row of scores, at an address.")
mixture_at = _record_of(MIXTURE, "Return the numbers of a mixture at an address.")
mixer_at = _record_of(MIXER, "Return the numbers of what keeps a state at an address.")
opening_at = _record_of(OPENING, "Return the numbers of gates at an address.")
own_at = _record_of(OWN, "Return where layers' own embeddings are, at an address.")
padding_at = _record_of(PADDING, "Return the sizes of heads without their zeros, at an address.")
streams_at = _record_of(STREAM, "Return the numbers of several hidden states at an address.")
hyper_at = _record_of(HYPER, "Return the numbers of hyper-connections at an address.")
blocks_at = _record_of(BLOCKS, "Return the numbers of an index of blocks at an address.")
latent_at = _record_of(LATENT, "Return the numbers of latents at an address.")
