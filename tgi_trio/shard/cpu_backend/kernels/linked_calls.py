"""Calls of operations that few models have: compiled apart from the step, and called by address.

A kernel is compiled into its callers. So what a llama never runs is not part of the step's code,
and a model without a mixture of experts does not wait for its compilation. Such an entry gets a
variant, the thread's rank, and addresses: of the step, of the operation, of the counter of work
items taken, and of the thread's scratch memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.compiler.types import intrinsic
from tgi_trio.shard.cpu_backend.kernels.emit import I64, at, call_address
from tgi_trio.shard.cpu_backend.tables import (
    BLOCKS,
    GATED,
    HYPER,
    LATENT,
    MIXER,
    MIXTURE,
    NGRAMS,
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
def call_linked(
    function: types.Integer,
    rank: types.Integer,
    step: types.Integer,
    operation: types.Integer,
    counter: types.Integer,
    scratch: types.Integer,
) -> Any:
    """Call an entry at an address, as `call_panel_kernel` does."""

    def emit(builder: Any, signature: Any, values: Any) -> Any:
        where, *numbers = values
        return call_address(builder, where, numbers)

    return types.none(*[types.int64] * (_ARGUMENTS + 1)), emit


@intrinsic
def address_of(record: types.Record) -> Any:
    """Return the address of a record."""
    return types.int64(record), lambda builder, signature, values: builder.ptrtoint(values[0], I64)


def _record_of(layout: np.dtype[np.void], doc: str) -> Any:
    """Return a function from an address to the record at it."""
    kind = types.Record(layout)

    def make(builder: Any, signature: Any, values: Any) -> Any:
        return at(builder, values[0])

    def typed(where: Any) -> Any:
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
gated_at = _record_of(GATED, "Return the numbers of gated hidden states at an address.")
ngrams_at = _record_of(NGRAMS, "Return the numbers of n-grams at an address.")
latent_at = _record_of(LATENT, "Return the numbers of latents at an address.")
