"""The product of few rows with a matrix of codes, as fast as the matrix can be read."""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.linears.code_numbers import (
    cells_of,
    codes_of,
    inputs_of,
    lower,
    read_cells,
    read_heads,
    read_numbers,
    runs_of,
    span_of,
)


@triton.jit(do_not_specialize=["one"])
def multiply_few_rows(
    out,  # [ROWS, outputs], with `out_stride` between rows
    x,  # [ROWS, inputs], contiguous
    codes,  # tensors of `Codes`, as are all up to `order`
    planes,
    scales,
    bases,
    lows,
    low_bases,
    table,
    order,
    bias,  # [outputs], with HAS_BIAS
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
    OUTPUTS: tl.constexpr,  # of a program
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,  # of one step of the loop
):
    """Multiply x by codes, and apply scales and lows to the sums; all in float32."""
    width: tl.constexpr = inputs_of(BITS)
    cells: tl.constexpr = cells_of(BITS)
    pieces: tl.constexpr = runs_of(BITS, GROUP)
    span: tl.constexpr = span_of(BITS, NUMBERS)
    each: tl.constexpr = codes_of(BITS) // pieces  # codes of a cell in a run
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = tl.minimum(column, outputs - 1).to(tl.int64)[None, :, None]
    row = tl.arange(0, ROWS)
    source = x + row[:, None, None] * inputs
    place = tl.arange(0, UNITS * cells)[None, None, :]
    cell = place % cells
    lowered: tl.constexpr = NUMBERS == "whole" or NUMBERS == "signed" or LOWS != ""
    total = tl.zeros([ROWS, OUTPUTS, UNITS], tl.float32)
    found = tl.zeros([ROWS, OUTPUTS, UNITS * cells], tl.float32)
    seen = tl.zeros([ROWS, 1, UNITS * cells], tl.float32)
    for first in range(0, units, UNITS):
        unit = first + place // cells
        at = there * units + tl.minimum(unit, units - 1)
        word, more = read_cells(codes, planes, at, cell, BITS, NUMBERS)
        for piece in tl.static_range(pieces):
            if GROUP != 0:
                found = tl.zeros([ROWS, OUTPUTS, UNITS * cells], tl.float32)
                seen = tl.zeros([ROWS, 1, UNITS * cells], tl.float32)
            for i in tl.static_range(piece * each, (piece + 1) * each):
                k = unit * width + i * cells + cell
                if ORDERED:
                    k = tl.load(order + k, mask=unit < units, other=-1)
                a = tl.load(source + k, mask=(k >= 0) & (k < inputs), other=0.0).to(tl.float32)
                found += read_numbers(word, more, cell, i, table, one, BITS, NUMBERS, NATIVE) * a
                if lowered:
                    seen += a
            if GROUP != 0:
                own = tl.minimum(first + tl.arange(0, UNITS)[None, None, :], units - 1)
                scale, low = read_heads(
                    scales, bases, lows, low_bases, there, own, piece, own, units, BITS, GROUP,
                    LOWS, ZERO, NESTED,
                )  # fmt: skip
                total += sum_units(found, cells) * (scale * span)
                if lowered:
                    total -= sum_units(seen, cells) * lower(scale, low, BITS, NUMBERS, LOWS)
    if GROUP == 0:
        own = tl.zeros([1, 1, 1], tl.int32)
        scale, low = read_heads(
            scales,
            bases,
            lows,
            low_bases,
            there,
            own,
            0,
            own,
            units,
            BITS,
            GROUP,
            LOWS,
            ZERO,
            NESTED,
        )
        total = sum_units(found, cells) * (scale * span)
        if lowered:
            total -= sum_units(seen, cells) * lower(scale, low, BITS, NUMBERS, LOWS)
    result = tl.sum(total, 2)
    column = column[None, :]
    if HAS_BIAS:
        result += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)
    at = out + row[:, None].to(tl.int64) * out_stride + column
    tl.store(at, result.to(out.dtype.element_ty), mask=column < outputs)


@triton.jit
def sum_units(every, cells: tl.constexpr):
    """Return sums over the cells of each unit, [rows, outputs, units]."""
    rows: tl.constexpr = every.shape[0]
    outputs: tl.constexpr = every.shape[1]
    return tl.sum(tl.reshape(every, [rows, outputs, every.shape[2] // cells, cells]), 3)
