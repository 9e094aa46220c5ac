"""What lies around a product of 8-bit numbers: activations are rounded, sums made numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_rows(
    rounded,  # int8 or e4m3 [rows, WIDTH], zero beyond the inputs
    scales,  # float32 [rows]: what 1 stands for
    x,  # [rows, inputs]
    inputs,
    width,
    MOST: tl.constexpr,  # what the largest of a row becomes
    WHOLE: tl.constexpr,  # numbers are whole
    BLOCK: tl.constexpr,
):
    """Divide each row by a scale of its own and round it to the nearest numbers."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for low in range(0, inputs, BLOCK):
        at = low + place
        value = tl.load(x + row * inputs + at, mask=at < inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    # Divided as IEEE has it: what lies half-way between two numbers is then the same everywhere.
    scale = tl.maximum(tl.div_rn(tl.max(largest, 0), MOST), 1e-30)
    tl.store(scales + row, scale)
    for low in range(0, width, BLOCK):
        at = low + place
        value = tl.load(x + row * inputs + at, mask=at < inputs, other=0.0).to(tl.float32)
        value = tl.minimum(tl.maximum(tl.div_rn(value, scale), -MOST), MOST)
        # 1.5 * 2^23: what is added to it keeps no fraction, and the even one from half-way.
        value = (value + 12582912.0) - 12582912.0 if WHOLE else round_to_e4m3(value)
        tl.store(rounded + row * width + at, value.to(rounded.dtype.element_ty), mask=at < width)


@triton.jit
def round_to_e4m3(value):
    """Return float32 numbers of up to 448 rounded to three bits of fraction, as few as e4m3 has.

    Here, so that no conversion has anything to round: how it would is the device's.
    """
    bits = value.to(tl.int32, bitcast=True)
    kept = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (value + 24576.0) - 24576.0  # below 2^-6 all are as far apart, 2^-9
    return tl.where(tl.abs(value) < 0.015625, small, kept.to(tl.float32, bitcast=True))


@triton.jit
def scale_sums(
    out,  # [rows, outputs], its rows `out_stride` apart
    sums,  # int32 [rows, outputs]
    row_scales,  # float32 [rows]
    scales,  # [outputs]
    bias,  # [outputs], with HAS_BIAS
    outputs,
    out_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return sums of products of whole numbers as what these stand for."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    total = tl.load(sums + row * outputs + column, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + column, mask=inside, other=0.0).to(tl.float32)
    total = total * tl.load(row_scales + row) * scale
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, total.to(out.dtype.element_ty), mask=inside)
