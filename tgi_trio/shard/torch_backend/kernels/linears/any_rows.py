"""Products of a matrix with any number of rows, whose sums do not depend on that number.

Every product has the same tile, so that the same instruction of the tensor cores adds up the same
inputs in the same order, for decodes as for prompts: an instruction for other numbers of rows
(Hopper's for 64, against those for 16) might not. The inputs are divided into parts, as many as the
size of the matrix says. Each part is summed by itself, and the parts are added in their order: with
few rows by `add_parts`, behind programs that have a part each, with many by the program that has
all parts of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "outputs"])
def multiply_any(
    out,  # [rows, outputs] of each product, with `out_batch` and `out_row` between them
    sums,  # float32 [PARTS, rows, outputs], written with DIVIDED, which is for a single product
    x,  # [rows, INPUTS] of each product, with `x_batch` and `x_row`; inputs lie together
    weight,  # [outputs, INPUTS] of each product, with strides
    bias,  # [outputs], read with HAS_BIAS, unless DIVIDED
    rows,
    outputs,
    out_batch,
    out_row,
    x_batch,
    x_row,
    weight_batch,
    weight_output,
    weight_input,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DIVIDED: tl.constexpr,  # each program has one part of its tile's inputs
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile; powers of two
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs of one step of the loop
):
    """Multiply a tile of rows by a tile of a matrix; the grid's third dimension: see DIVIDED.

    Otherwise it is which of several products of as many rows, with a matrix each.
    """
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real, there = row < rows, column < outputs
    batch = 0 if DIVIDED else tl.program_id(2)
    source = x + tl.cast(batch, tl.int64) * x_batch + tl.where(real, row, 0).to(tl.int64) * x_row
    matrix = weight + tl.cast(batch, tl.int64) * weight_batch
    matrix += tl.where(there, column, 0).to(tl.int64) * weight_output
    each: tl.constexpr = (INPUTS + DEPTH * PARTS - 1) // (DEPTH * PARTS) * DEPTH
    if DIVIDED:
        part = tl.program_id(2)
        total = sum_inputs(
            source, matrix, weight_input, part * each, INPUTS, each, ROWS, OUTPUTS, DEPTH
        )
        which = part.to(tl.int64) * rows + row
        at = sums + which[:, None] * outputs + column[None, :]
        tl.store(at, total, mask=real[:, None] & there[None, :])
    else:
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for part in range(PARTS):
            total += sum_inputs(
                source, matrix, weight_input, part * each, INPUTS, each, ROWS, OUTPUTS, DEPTH
            )
        if HAS_BIAS:
            total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
        at = out + tl.cast(batch, tl.int64) * out_batch
        at += row.to(tl.int64)[:, None] * out_row + column[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=real[:, None] & there[None, :])


@triton.jit
def sum_inputs(
    source,  # pointers to rows of x [ROWS]; what missing rows yield is not stored
    matrix,  # pointers to rows of the matrix [OUTPUTS], likewise
    stride,  # between inputs of the matrix
    begin,
    INPUTS: tl.constexpr,
    EACH: tl.constexpr,  # of a part
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the product of a tile over the part of the inputs from `begin` on, float32."""
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for low in range(begin, tl.minimum(begin + EACH, INPUTS), DEPTH):
        depth = low + tl.arange(0, DEPTH)
        inside = (depth < INPUTS)[None, :]
        a = tl.load(source[:, None] + depth[None, :], mask=inside, other=0.0)
        w = tl.load(matrix[:, None] + depth[None, :] * stride, mask=inside, other=0.0)
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
    return total
