"""Activations quantised to integers: 32 of them share a scale; the largest becomes 127 (or 32767).

A row is blocks of `kind.active_block_bytes`. 16-bit numbers are in the order in which the kernels
widen codes: of four inputs 0 and 2, then 1 and 3. Rows with one scale are in `digits.py`.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.compiler import types
from tgi_trio.shard.cpu_backend.kernels.emit import (
    FLOAT,
    FLOATS,
    I32,
    INTS,
    address,
    call,
    operation,
    splat,
    store_as,
    vector,
)
from tgi_trio.shard.cpu_backend.kernels.quantised.codes import BYTE, SHORT, offset
from tgi_trio.shard.cpu_backend.kernels.quantised.digits import store_rows
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    load,
    load_float,
    load_int,
    store,
    store_active,
    store_float,
    store_half,
)
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS, MOST_ZERO, active_block_bytes
from tgi_trio.shard.cpu_backend.tables import Buffer, Form
from tgi_trio.shard.cpu_backend.weight_layout import LANES

_ORDER = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(LANES)]  # of 16-bit numbers
A8_BYTES, A16_BYTES = active_block_bytes(8), active_block_bytes(16)


def _write(builder: Any, where: Any, halves: list[Any], bits: int) -> Any:
    """Quantise one block, two vectors of float32, to integers of `bits`, and write it."""
    sizes = [call(builder, f"llvm.fabs.v{LANES}f32", FLOATS, half) for half in halves]
    larger = builder.select(builder.fcmp_ordered(">", *sizes), *sizes)
    most = _reduce(builder, "fmax", FLOAT, larger)
    limit = ir.Constant(FLOAT, float((1 << (bits - 1)) - 1))
    some = builder.fcmp_ordered(">", most, ir.Constant(FLOAT, 0.0))
    inverse = builder.select(some, builder.fdiv(limit, most), ir.Constant(FLOAT, 0.0))
    # NaN has to be kept, but `fmax` ignores it.
    strange = builder.or_(*[builder.fcmp_unordered("uno", half, half) for half in halves])
    strange = builder.icmp_unsigned(
        "!=", builder.bitcast(strange, ir.IntType(LANES)), ir.IntType(LANES)(0)
    )
    scale = builder.select(strange, ir.Constant(FLOAT, float("nan")), builder.fdiv(most, limit))
    element = BYTE if bits == 8 else SHORT
    sums = []
    for i, half in enumerate(halves):
        exact = builder.fmul(half, splat(builder, inverse, FLOATS))
        whole = builder.fptosi(call(builder, f"llvm.rint.v{LANES}f32", FLOATS, exact), INTS)
        sums.append(_reduce(builder, "add", I32, whole))
        if bits == 16:
            whole = builder.shuffle_vector(whole, whole, ir.Constant(INTS, _ORDER))
        stored = builder.trunc(whole, ir.VectorType(element, LANES))
        store_as(builder, stored, offset(builder, where, i * LANES * bits // 8), bits // 8)
    facts = offset(builder, where, BLOCK_INPUTS * bits // 8)
    both = builder.add(*sums)
    store_as(builder, scale, facts)
    of_all = builder.fmul(scale, builder.sitofp(both, FLOAT))
    store_as(builder, of_all, offset(builder, facts, 4))
    for i, value in enumerate([both, *sums]):
        negative = builder.mul(value, I32(-MOST_ZERO))
        stored = store_as(builder, negative, offset(builder, facts, 8 + 4 * i))
    return stored


def _reduce(builder: Any, name: str, result: Any, value: Any) -> Any:
    """Return the sum, or the largest, of all lanes, combined in a fixed order."""
    width = LANES
    while width > 1:
        width //= 2
        upper = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
        lower = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        a = builder.shuffle_vector(value, value, lower)
        b = builder.shuffle_vector(value, value, upper)
        if name == "add":
            value = builder.add(a, b)
        else:
            value = builder.select(builder.fcmp_ordered(">", a, b), a, b)
    return builder.extract_element(value, I32(0))


@operation(types.none, address, vector, vector)
def store_a8(builder: Any, where: Any, first: Any, second: Any) -> Any:
    """Write a block of 8-bit activations."""
    return _write(builder, where, [first, second], 8)


@operation(types.none, address, vector, vector)
def store_a16(builder: Any, where: Any, first: Any, second: Any) -> Any:
    """Write a block of 16-bit activations."""
    return _write(builder, where, [first, second], 16)


PLAIN, EIGHT, SIXTEEN, WIDE, AS_FLOATS, PAIRS_OF, DIGITS_8, DIGITS_16 = (
    int(form)
    for form in (
        Form.PLAIN,
        Form.WHOLE_8,
        Form.WHOLE_16,
        Form.WIDE,
        Form.FLOATS,
        Form.PAIRS,
        Form.DIGITS_8,
        Form.DIGITS_16,
    )
)
WHOLE_8, WHOLE_16, FLOATS_AT, UNSORTED = (
    int(b) for b in (Buffer.WHOLE_8, Buffer.WHOLE_16, Buffer.FLOATS, Buffer.UNSORTED)
)


@kernel
def store_forms(variant, step, op, place, first, second):
    """Write 32 activations in the forms of `op`; `place`: index of the first in its buffer."""
    if op.forms & PLAIN:
        target = step.buffers[op.target] + place * variant.active_bytes
        store_active(variant, target, first)
        store_active(variant, target + LANES * variant.active_bytes, second)
    block = place // BLOCK_INPUTS
    if op.forms & EIGHT:
        store_a8(step.buffers[WHOLE_8] + block * A8_BYTES, first, second)
    if op.forms & SIXTEEN:
        store_a16(step.buffers[WHOLE_16] + block * A16_BYTES, first, second)
    if op.forms & AS_FLOATS:
        store_pair(step.buffers[FLOATS_AT] + 4 * place, first, second)
    if op.forms & PAIRS_OF:
        store_half(step.buffers[FLOATS_AT] + 2 * place, first)
        store_half(step.buffers[FLOATS_AT] + 2 * place + 2 * LANES, second)
    if op.forms & WIDE:
        store_pair(step.buffers[UNSORTED] + 4 * place, first, second)


@kernel
def store_pair(target, first, second):
    store(target, first)
    store(target + 4 * LANES, second)


@kernel
def store_result(variant, op, target, place, value):
    """Write 16 activations to `place` of a buffer, for products or for QUANTISE to read."""
    if op.forms & WIDE:
        store(target + 4 * place, value)
    else:
        store_active(variant, target + place * variant.active_bytes, value)


@kernel
def pick(row, order, target):
    """Gather the 32 numbers of a row that `order` names; negative: 0."""
    for i in range(0, 4 * BLOCK_INPUTS, 4):
        feature = load_int(order + i)
        store_float(target + i, load_float(row + 4 * feature) if feature >= 0 else np.float32(0))


@kernel
def quantise(variant, rank, step, op, scratch):
    """Convert a buffer's float32 rows to the forms of `op`; each thread does its share of blocks.

    With an `op.order`, rows of `op.width` become rows of `op.inputs`.
    """
    if op.forms == 0:
        return
    each = op.inputs // BLOCK_INPUTS
    blocks = (step.wanted if op.wanted_only else step.tokens) * each
    source = step.buffers[op.source]
    first, end = blocks * rank // step.threads, blocks * (rank + 1) // step.threads
    if op.forms & (DIGITS_8 | DIGITS_16):
        store_rows(step, op, source, first, end)
        if not op.forms & PLAIN:  # which adapters read
            return
    for block in range(first, end):
        place = block * BLOCK_INPUTS
        where = source + 4 * place
        if op.order:
            row = source + block // each * op.width * 4
            pick(row, op.order + block % each * BLOCK_INPUTS * 4, scratch)
            where = scratch
        store_forms(variant, step, op, place, load(where), load(where + 4 * LANES))
