"""Writing a quantised matrix as numbers, for products of many rows."""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.linears.code_numbers import inputs_of, open_units


@triton.jit(do_not_specialize=["start", "outputs", "one"])
def write_numbers(
    out,  # [outputs, width], contiguous
    codes,  # tensors of `Codes`, as are all up to `order`
    planes,
    scales,
    bases,
    lows,
    low_bases,
    table,
    order,  # inputs by place; places without one become 0
    start,  # first output to be written
    outputs,  # number of outputs to be written
    width,
    units,
    one,  # the bits of 1.0
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    LOWS: tl.constexpr,
    ZERO: tl.constexpr,
    NESTED: tl.constexpr,
    ORDERED: tl.constexpr,
    NATIVE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr,
):
    inputs: tl.constexpr = inputs_of(BITS)
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None]
    there = start + tl.minimum(column, outputs - 1).to(tl.int64)
    first = tl.program_id(1) * UNITS
    like = tl.zeros([1], out.dtype.element_ty)
    weight = open_units(
        codes, planes, scales, bases, lows, low_bases, table, there, first, units, one, like, BITS,
        NUMBERS, GROUP, LOWS, ZERO, NESTED, NATIVE, UNITS, False, False,
    )  # fmt: skip
    k = first * inputs + tl.arange(0, UNITS * inputs)[None, :]
    if ORDERED:
        found = tl.load(order + k, mask=k < units * inputs, other=-1)
        weight = tl.where(found >= 0, weight, 0.0).to(like.dtype)
    at = out + column.to(tl.int64) * width + k
    tl.store(at, weight, mask=(column < outputs) & (k < width))
