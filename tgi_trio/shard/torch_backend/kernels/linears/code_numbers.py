"""Dequantising in kernels: codes as `layers/linears/stored_codes.py` lays them out, as numbers.

    W = scale * number - low

Codes of fewer than 8 bits are read as words, four to a unit: the i-th code of word j, from its
lowest bits up, belongs to input 4 i + j of the unit. So a thread that reads a unit has the codes of
neighbouring inputs, which share a scale, and the inputs of all i-th codes are contiguous. Codes of
8 bits are read as bytes, one per input. A *cell* is what is read at once, a word or a byte.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def inputs_of(bits):
    """Return the inputs of a unit of 16 bytes of codes."""
    return 128 // (4 if bits in (5, 6) else bits)


@triton.constexpr_function
def codes_of(bits):
    """Return the codes in a cell."""
    return inputs_of(bits) // cells_of(bits)


@triton.constexpr_function
def cells_of(bits):
    """Return the cells in a unit."""
    return 16 if bits == 8 else 4


@triton.constexpr_function
def runs_of(bits, group):
    """Return how many runs a unit has, 1 if a run is longer."""
    return inputs_of(bits) // group if 0 < group < inputs_of(bits) else 1


@triton.constexpr_function
def span_of(bits, numbers):
    """Return the number that 1 stands for in what `read_numbers` returns."""
    return float(1 << bits) if numbers in ("whole", "signed") else 1.0


@triton.constexpr_function
def offset_of(bits, numbers):
    """Return the number by which everything that `read_numbers` returns is too large."""
    return {"whole": float(1 << bits), "signed": float(3 << (bits - 1))}.get(numbers, 0.0)


@triton.jit
def read_cells(codes, planes, at, cell, BITS: tl.constexpr, NUMBERS: tl.constexpr):
    """Return cell `cell` of units `at` (int64), and the corresponding part of their planes."""
    word = tl.load(codes + at * cells_of(BITS) + cell)
    if NUMBERS != "e4m3":
        word = word.to(tl.int32)
    more = word
    if BITS == 5 or BITS == 6:
        high: tl.constexpr = BITS - 4
        more = tl.load(planes + at * high + cell * high // 4)
    if NUMBERS == "signed":
        word = word ^ 128  # adds 128, which `offset_of` takes into account
    return word, more


@triton.jit
def read_numbers(
    word, more, cell, i, table, one, BITS: tl.constexpr, NUMBERS: tl.constexpr, NATIVE: tl.constexpr
):
    """Return the i-th numbers of cells as float32, from their words and planes.

    An integer code becomes the fraction of a number between 1 and 2, which takes a shift and a
    bitwise operation; a conversion takes as long as several of these. `one`: the bits of 1.0, as a
    variable: with a single constant between them, the assembler would merge two operations into
    one.
    """
    if NUMBERS == "e4m3":
        if NATIVE:
            return word.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
        word = word.to(tl.int32)
    low: tl.constexpr = 4 if BITS == 5 or BITS == 6 else BITS
    code = (word >> (i * low)) & ((1 << low) - 1)
    if low < BITS:
        high: tl.constexpr = BITS - low
        each: tl.constexpr = 4 // high  # words of a unit that share a plane's word
        shift = (i * each + cell % each) * high
        code |= ((more >> shift) & ((1 << high) - 1)) << low
    if NUMBERS == "table":
        return tl.load(table + code)
    elif NUMBERS == "e4m3":  # as the bits of a float32 whose exponent is 120 too small
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        return ((code << (23 - BITS)) | one).to(tl.float32, bitcast=True)


@triton.jit
def read_heads(
    scales,  # [outputs, runs]: of runs of GROUP inputs; integers with NESTED
    bases,  # [outputs, runs / NESTED]: the units of these integers
    lows,  # [outputs, runs]: zero points or lows, according to LOWS
    low_bases,  # like `bases`
    there,  # int64: outputs
    unit,
    piece,  # a run within the unit
    basis,  # a unit that has the same bases
    units,  # of a row of the matrix
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWS: tl.constexpr,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
):
    """Return the scales and the lows (or zero points) of units, float32."""
    inputs: tl.constexpr = inputs_of(BITS)
    at = there
    if GROUP != 0:
        runs = tl.cdiv(units * inputs, GROUP)
        # Not divided where a unit is a run, since the compiler would not see contiguous reads.
        run = unit // (GROUP // inputs) if inputs < GROUP else unit * (inputs // GROUP) + piece
        at = there * runs + run
    scale = tl.load(scales + at).to(tl.float32)
    if NESTED:
        base = there * tl.cdiv(runs, NESTED) + (
            run // NESTED if inputs > GROUP * NESTED else basis * inputs // (GROUP * NESTED)
        )
        scale *= tl.load(bases + base).to(tl.float32)
    low = tl.full(scale.shape, ZERO, tl.float32)
    if LOWS == "zeros" or LOWS == "lows":
        low = tl.load(lows + at).to(tl.float32)
        if LOWS == "lows" and NESTED != 0:
            low *= tl.load(low_bases + base).to(tl.float32)
    return scale, low


@triton.jit
def lower(scale, low, BITS: tl.constexpr, NUMBERS: tl.constexpr, LOWS: tl.constexpr):
    """Return what must be subtracted from (what `read_numbers` returns) * span * scale."""
    offset: tl.constexpr = offset_of(BITS, NUMBERS)
    return scale * offset + low if LOWS == "lows" else scale * (low + offset)


@triton.jit
def make_weights(
    number, scale, low, like, BITS: tl.constexpr, NUMBERS: tl.constexpr, LOWS: tl.constexpr
):
    """Return weights in the dtype of `like`, rounded once from float32."""
    span: tl.constexpr = span_of(BITS, NUMBERS)
    if like.dtype == tl.float32:  # as exactly as possible
        number = number * span - offset_of(BITS, NUMBERS)
        return number * scale - low if LOWS == "lows" else (number - low) * scale
    else:  # in one fused operation
        weight = number * (scale * span) - lower(scale, low, BITS, NUMBERS, LOWS)
        return weight.to(like.dtype)


@triton.jit
def find_units(
    first,
    units,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,  # inputs that share a scale or base; 0: all
    UNITS: tl.constexpr,
    EVEN: tl.constexpr,  # the units are a multiple of UNITS
):
    """Return the units whose scales or bases a step reads, [1, UNITS or 1, 1, 1]."""
    if SPAN == 0 or UNITS * inputs_of(BITS) <= SPAN:
        unit = first + tl.zeros([1, 1, 1, 1], tl.int32)
    else:
        unit = (first + tl.arange(0, UNITS))[None, :, None, None]
    return unit if EVEN else tl.minimum(unit, units - 1)


@triton.jit
def open_units(
    codes,
    planes,
    scales,
    bases,
    lows,
    low_bases,
    table,
    there,  # int64 [OUTPUTS, 1]: rows of the matrix
    first,  # first of UNITS units of each
    units,
    one,
    like,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWS: tl.constexpr,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
    NATIVE: tl.constexpr,
    UNITS: tl.constexpr,
    EVEN: tl.constexpr,
    PLAIN: tl.constexpr,  # numbers only, without scales and lows
):
    """Return weights [OUTPUTS, inputs of UNITS units]; arbitrary beyond the last unit.

    A thread computes the weights of the whole units that it has read.
    """
    cells: tl.constexpr = cells_of(BITS)
    pieces: tl.constexpr = runs_of(BITS, GROUP)
    width: tl.constexpr = inputs_of(BITS)
    outputs: tl.constexpr = there.shape[0]
    place = tl.arange(0, UNITS * cells)
    unit = (first + place // cells)[None, :]
    if not EVEN:
        unit = tl.minimum(unit, units - 1)
    word, more = read_cells(
        codes, planes, there * units + unit, (place % cells)[None, :], BITS, NUMBERS
    )
    word = tl.reshape(word, [outputs, UNITS, 1, cells])
    more = tl.reshape(more, [outputs, UNITS, 1, cells])
    cell = tl.arange(0, cells)[None, None, None, :]
    i = tl.arange(0, codes_of(BITS))[None, None, :, None]
    number = read_numbers(word, more, cell, i, table, one, BITS, NUMBERS, NATIVE)
    if PLAIN:
        number = number * span_of(BITS, NUMBERS) - offset_of(BITS, NUMBERS)
        return tl.reshape(number.to(like.dtype), [outputs, UNITS * width])
    number = tl.reshape(number, [outputs, UNITS, pieces, width // pieces])
    scale, low = read_heads(
        scales,
        bases,
        lows,
        low_bases,
        there[:, :, None, None],
        find_units(first, units, BITS, GROUP, UNITS, EVEN),
        tl.arange(0, pieces)[None, None, :, None],
        find_units(first, units, BITS, GROUP * NESTED, UNITS, EVEN),
        units,
        BITS,
        GROUP,
        LOWS,
        ZERO,
        NESTED,
    )
    weight = make_weights(number, scale, low, like, BITS, NUMBERS, LOWS)
    return tl.reshape(weight, [outputs, UNITS * width])
