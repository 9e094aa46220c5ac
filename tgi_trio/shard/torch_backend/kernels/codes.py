"""A product with a matrix that stays quantised: its codes become numbers on their way to the units.

    y = x W^T + b,  W = scale * number - low

One kernel for every format that can be told in these words; `layers/stored_codes.py` has the table
of kinds and says how their bytes lie. A tile of outputs is the left matrix, since numbers made in
registers can be multiplied from there. Where rows are few, programs share a tile along the inputs,
and `add_parts` adds what they found (split-K).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply_codes(
    out,  # [rows, outputs], its rows `out_stride` apart; written unless DIVIDED
    sums,  # float32 [parts, rows, outputs], written with DIVIDED
    x,  # [rows, inputs], contiguous
    codes,  # uint8 [outputs, steps * DEPTH]: two codes a byte, unless BITS is 8, or 2: half as wide
    planes,  # uint8 [outputs, steps * DEPTH * (BITS - 4) / 4]: what 5 or 6 bits have above 4
    scales,  # [runs, outputs]: runs of GROUP inputs; with NESTED whole numbers
    units,  # [runs / NESTED, outputs], what those count
    lows,  # [runs, outputs]: zero points or lows, as LOWS says
    low_units,  # as `units`
    table,  # float32 [16], with NUMBERS "table"
    order,  # int32 [steps * STEP], with ORDERED: which of x's numbers comes where; -1: none
    bias,  # [outputs], with HAS_BIAS
    rows,
    outputs,
    inputs,
    steps,
    out_stride,
    BITS: tl.constexpr,  # of a code as it lies: 2, 4, 5, 6 or 8
    NUMBERS: tl.constexpr,  # what it stands for: itself ("whole", "signed"), "table", "e4m3"
    GROUP: tl.constexpr,  # inputs that share a scale: a power of two from 16 on; 0: all
    LOWS: tl.constexpr,  # low = scale * ZERO ("constant"), scale * zero ("zeros"), itself ("lows")
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,  # runs that share a unit; 0: scales are plain numbers
    ORDERED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DIVIDED: tl.constexpr,  # programs share a tile: as many as the grid is deep
    OUTPUTS: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs multiplied together: at most two runs, one from 32 inputs on
):
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = tl.minimum(column, outputs - 1)[:, None]  # what lies beyond is computed for nobody
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    source = x + tl.where(real, row, 0).to(tl.int64)[None, :] * inputs
    begin = 0
    end = steps
    if DIVIDED:
        each = tl.cdiv(steps, tl.num_programs(2))
        begin = tl.program_id(2) * each
        end = tl.minimum(begin + each, steps)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total = add_steps(
        total, codes, planes, begin, end, steps, there, source, real, inputs, outputs, scales,
        units, lows, low_units, table, order, BITS, NUMBERS, GROUP, LOWS, ZERO, NESTED, ORDERED,
        DEPTH,
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
def add_steps(
    total,  # float32 [OUTPUTS, ROWS]
    codes,
    planes,
    begin,  # of `steps`, as `end`
    end,
    steps,
    there,  # [OUTPUTS, 1]: rows of the matrix
    source,  # pointers to rows of x [1, ROWS]
    real,
    inputs,
    outputs,
    scales,
    units,
    lows,
    low_units,
    table,
    order,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWS: tl.constexpr,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
    ORDERED: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return a tile with the product of some steps of inputs added to it."""
    place = tl.arange(0, DEPTH)
    wide: tl.constexpr = DEPTH // 2 if BITS == 2 else DEPTH  # bytes of a step in `codes`
    high: tl.constexpr = BITS - 4  # bits that lie in `planes`
    width: tl.constexpr = DEPTH * high // 4  # bytes of a step there
    line = codes + there.to(tl.int64) * (steps * wide) + (place % wide)[None, :]
    pair = (place // wide * 4)[None, :]  # where codes of 2 bits begin in a byte
    if BITS == 5 or BITS == 6:
        above = planes + there.to(tl.int64) * (steps * width) + (place % width)[None, :]
        shift = (place // width * 2 * high)[None, :]
    for step in range(begin, end):
        packed = tl.load(line + step * wide)
        if BITS == 8:
            total = add_product(
                total, packed, step * DEPTH, there, source, real, inputs, outputs, scales, units,
                lows, low_units, table, order, NUMBERS, GROUP, LOWS, ZERO, NESTED, ORDERED, DEPTH,
            )  # fmt: skip
        else:
            first = packed & 15
            second = packed >> 4
            if BITS == 2:
                first = (packed.to(tl.int32) >> pair) & 3
                second = (packed.to(tl.int32) >> (pair + 2)) & 3
            if BITS > 4:
                more = tl.load(above + step * width).to(tl.int32) >> shift
                mask: tl.constexpr = (1 << high) - 1
                first = first.to(tl.int32) | ((more & mask) << 4)
                second = second.to(tl.int32) | (((more >> high) & mask) << 4)
            total = add_product(
                total, first, step * 2 * DEPTH, there, source, real, inputs, outputs, scales,
                units, lows, low_units, table, order, NUMBERS, GROUP, LOWS, ZERO, NESTED, ORDERED,
                DEPTH,
            )  # fmt: skip
            total = add_product(
                total, second, step * 2 * DEPTH + DEPTH, there, source, real, inputs, outputs,
                scales, units, lows, low_units, table, order, NUMBERS, GROUP, LOWS, ZERO, NESTED,
                ORDERED, DEPTH,
            )  # fmt: skip
    return total


@triton.jit
def add_product(
    total,  # float32 [OUTPUTS, ROWS]
    code,  # whole numbers [OUTPUTS, DEPTH]
    first,  # the input that the first of them is for
    there,  # [OUTPUTS, 1]
    source,  # pointers to rows of x [1, ROWS]
    real,
    inputs,
    outputs,
    scales,
    units,
    lows,
    low_units,
    table,
    order,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWS: tl.constexpr,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
    ORDERED: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return a tile with the product of some inputs added to it."""
    k = first + tl.arange(0, DEPTH)
    if ORDERED:
        k = tl.load(order + k)
    known = (k >= 0) & (k < inputs)
    a = tl.load(source + k[:, None], mask=known[:, None] & real[None, :], other=0.0)
    number = read_numbers(code, table, NUMBERS)
    run = first // GROUP if GROUP else 0
    scale, low = read_head(run, there, outputs, scales, units, lows, low_units, LOWS, ZERO, NESTED)
    if GROUP != 0 and GROUP < DEPTH:
        scale_2, low_2 = read_head(
            run + 1, there, outputs, scales, units, lows, low_units, LOWS, ZERO, NESTED
        )
        begins = (tl.arange(0, DEPTH) < GROUP)[None, :]
        scale = tl.where(begins, scale, scale_2)
        low = tl.where(begins, low, low_2)
    weight = number * scale - low if LOWS == "lows" else (number - low) * scale
    return tl.dot(weight.to(a.dtype), a, total, input_precision="ieee")


@triton.jit
def read_numbers(code, table, NUMBERS: tl.constexpr):
    """Return the float32 numbers that codes stand for."""
    if NUMBERS == "table":
        return tl.load(table + code.to(tl.int32))
    elif NUMBERS == "signed":
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    elif NUMBERS == "e4m3":  # the bits of a float16, whose exponents are 8 less
        wide = code.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        tl.static_assert(NUMBERS == "whole")
        return code.to(tl.float32)


@triton.jit
def read_head(
    run,
    there,
    outputs,
    scales,
    units,
    lows,
    low_units,
    LOWS: tl.constexpr,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Return float32 scales and lows, or zero points, [OUTPUTS, 1] of a run of inputs."""
    at = run * outputs + there
    scale = tl.load(scales + at).to(tl.float32)
    if NESTED:
        unit = run // NESTED * outputs + there
        scale *= tl.load(units + unit).to(tl.float32)
    low = tl.full(there.shape, ZERO, tl.float32)
    if LOWS == "zeros" or LOWS == "lows":
        low = tl.load(lows + at).to(tl.float32)
        if LOWS == "lows" and NESTED != 0:
            low *= tl.load(low_units + unit).to(tl.float32)
    return scale, low


@triton.jit(do_not_specialize=["rows", "parts"])
def add_parts(
    out,  # [rows, outputs], its rows `out_stride` apart
    sums,  # float32 [parts, rows, outputs]
    bias,  # [outputs], with HAS_BIAS
    rows,
    parts,
    outputs,
    out_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add what programs found of the same rows, in the order of their inputs."""
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
