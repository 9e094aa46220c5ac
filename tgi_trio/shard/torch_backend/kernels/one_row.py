"""A product of one row and a matrix, at the pace at which the matrix is read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_row(
    out,  # [N]
    x,  # [K]
    weight,  # [N, K]
    bias,  # [N], read with HAS_BIAS only
    outputs,  # N
    inputs,  # K
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # of a program
    DEPTH: tl.constexpr,  # inputs looked at together
):
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = column < outputs
    rows = weight + column.to(tl.int64)[:, None] * inputs
    total = tl.zeros([OUTPUTS, DEPTH], tl.float32)
    for low in range(0, inputs, DEPTH):
        depth = low + tl.arange(0, DEPTH)
        inside = depth < inputs
        a = tl.load(x + depth, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(rows + depth[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        total += w.to(tl.float32) * a[None, :]
    found = tl.sum(total, 1)
    if HAS_BIAS:
        found += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + column, found.to(out.dtype.element_ty), mask=there)
