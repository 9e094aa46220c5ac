"""A product with a matrix that stays quantised, dequantised on its way to the tensor cores.

    y = x W^T + b

One kernel for all formats that `code_numbers.py` can express. A tile of outputs is the left operand
of the product, because that one can be taken from registers, in which it is dequantised. For few
rows, programs share a tile along the inputs, and `add_parts` adds their sums (split-K).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.linears.code_numbers import inputs_of, open_units


@triton.jit(do_not_specialize=["rows", "one"])
def multiply_codes(
    out,  # [rows, outputs], with `out_stride` between rows; written unless DIVIDED
    sums,  # float32 [parts, rows, outputs], written with DIVIDED
    x,  # [rows, inputs], contiguous
    codes,  # tensors of `Codes`, as are all up to `order`
    planes,
    scales,
    bases,
    lows,
    low_bases,
    table,
    order,
    bias,  # [outputs], with HAS_BIAS
    rows,
    outputs,
    inputs,
    units,
    out_stride,
    one,  # the bits of 1.0
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWS: tl.constexpr,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
    ORDERED: tl.constexpr,
    NATIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DIVIDED: tl.constexpr,  # programs share a tile: as many as the grid's third dimension
    OUTPUTS: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,  # of one step of the loop
    EVEN: tl.constexpr,  # inputs are in order, and a multiple of a step's
):
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = tl.minimum(column, outputs - 1)[:, None]  # results beyond the last are not stored
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    source = x + tl.where(real, row, 0).to(tl.int64) * inputs
    begin = 0
    end = units
    if DIVIDED:
        each = tl.cdiv(tl.cdiv(units, UNITS), tl.num_programs(2)) * UNITS
        begin = tl.program_id(2) * each
        end = tl.minimum(begin + each, units)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total = add_units(
        total, codes, planes, begin, end, units, there, source, inputs, scales, bases, lows,
        low_bases, table, order, one, BITS, NUMBERS, GROUP, LOWS, ZERO, NESTED, ORDERED, NATIVE,
        UNITS, EVEN,
    )  # fmt: skip
    stored = (column < outputs)[:, None] & real[None, :]
    if DIVIDED:
        which = tl.program_id(2).to(tl.int64) * rows + row
        tl.store(sums + which[None, :] * outputs + column[:, None], total, mask=stored)
    else:
        if HAS_BIAS:
            total += tl.load(bias + there).to(tl.float32)
        at = row.to(tl.int64)[None, :] * out_stride + column[:, None]
        tl.store(out + at, total.to(out.dtype.element_ty), mask=stored)


@triton.jit
def add_units(
    total,  # float32 [OUTPUTS, ROWS]
    codes,
    planes,
    begin,  # first of the units to add, and `end`
    end,
    units,
    there,  # [OUTPUTS, 1]: rows of the matrix
    source,  # pointers to rows of x [ROWS]; what missing rows yield is not stored
    inputs,
    scales,
    bases,
    lows,
    low_bases,
    table,
    order,
    one,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWS: tl.constexpr,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
    ORDERED: tl.constexpr,
    NATIVE: tl.constexpr,
    UNITS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return a tile plus its product over some units of inputs."""
    width: tl.constexpr = inputs_of(BITS)
    # With a single scale per output it is applied last, if the numbers are exact without it.
    plain: tl.constexpr = (
        GROUP == 0 and LOWS == "" and BITS == 8 and source.dtype.element_ty != tl.float32
    )
    like = tl.zeros([1], source.dtype.element_ty)
    there = there.to(tl.int64)
    for first in range(begin, end, UNITS):
        k = first * width + tl.arange(0, UNITS * width)
        if ORDERED:
            k = tl.load(order + k, mask=k < units * width, other=-1)
        at = source[None, :] + k[:, None]
        known = ((k >= 0) & (k < inputs))[:, None]
        a = tl.load(at) if EVEN else tl.load(at, mask=known, other=0.0)
        weight = open_units(
            codes, planes, scales, bases, lows, low_bases, table, there, first, units, one, like,
            BITS, NUMBERS, GROUP, LOWS, ZERO, NESTED, NATIVE, UNITS, EVEN, plain,
        )  # fmt: skip
        # The factor 1.0 keeps the product from being accumulated by the tensor cores: the compiler
        # splits a product that is, and waits after each part of the left operand.
        total += tl.dot(weight, a, input_precision="ieee") * one.to(tl.float32, bitcast=True)
    if plain:
        total *= tl.load(scales + there).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["rows", "parts"])
def add_parts(
    out,  # [rows, outputs], with `out_stride` between rows
    sums,  # float32 [parts, rows, outputs]
    bias,  # [outputs], with HAS_BIAS
    rows,
    parts,
    outputs,
    out_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the partial sums of the same rows, in the order of their inputs (split-K)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    total = tl.zeros([BLOCK], tl.float32)
    at = sums + row * outputs + column
    apart = tl.cast(rows, tl.int64) * outputs
    for _ in range(parts):
        total += tl.load(at, mask=inside, other=0.0)
        at += apart
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=inside)
