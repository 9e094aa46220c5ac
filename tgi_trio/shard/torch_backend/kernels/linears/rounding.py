"""Around a product of 8-bit numbers: rounding activations before it, scaling its sums after it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_rows(
    rounded,  # int8 or e4m3 [rows, WIDTH], zero beyond the inputs
    scales,  # float32 [rows]: the number that 1 stands for
    x,  # [rows, inputs]
    inputs,
    width,
    MOST: tl.constexpr,  # what a row's largest number becomes
    WHOLE: tl.constexpr,  # round to integers
    BLOCK: tl.constexpr,
):
    """Divide each row by its own scale, and round."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for low in range(0, inputs, BLOCK):
        at = low + place
        value = tl.load(x + row * inputs + at, mask=at < inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    # IEEE division, so that numbers half-way between two others are the same on all devices.
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), MOST), 1e-30)
    tl.store(scales + row, scale)
    for low in range(0, width, BLOCK):
        at = low + place
        value = tl.load(x + row * inputs + at, mask=at < inputs, other=0.0).to(tl.float32)
        value = tl.minimum(tl.maximum(tl.div_rn(value, scale), -MOST), MOST)
        # Adding 1.5 * 2^23 leaves no fraction, and rounds half-way numbers to even ones.
        value = (value + 12582912.0) - 12582912.0 if WHOLE else round_to_e4m3(value)
        tl.store(rounded + row * width + at, value.to(rounded.dtype.element_ty), mask=at < width)


@triton.jit
def round_to_e4m3(value):
    """Return float32 numbers of up to 448, rounded to e4m3's three bits of fraction.

    It is done here so that the conversion, which devices do differently, has nothing to round.
    """
    bits = value.to(tl.int32, bitcast=True)
    kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (value + 24576.0) - 24576.0  # below 2^-6, e4m3's numbers are 2^-9 apart
    return tl.where(tl.abs(value) < 0.015625, small, kept.to(tl.float32, bitcast=True))


@triton.jit
def scale_sums(
    out,  # [rows, outputs], with `out_stride` between rows
    sums,  # int32 [rows, outputs]
    row_scales,  # float32 [rows]
    scales,  # [outputs]
    bias,  # [outputs], with HAS_BIAS
    outputs,
    out_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply sums of int8 products by the scales of their row and output, and add the bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    total = tl.load(sums + row * outputs + column, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + column, mask=inside, other=0.0).to(tl.float32)
    total = total * tl.load(row_scales + row) * scale
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=inside)
