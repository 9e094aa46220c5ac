"""Products with EXL3's matrices as they are stored: of a few rows, and of some on matrix units.

A program has a block's 128 outputs, since these are turned together, and some of its inputs. The
last program of a block to finish adds up what all have found, in the order of their inputs, and
turns it. So the result does not depend on which one that is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.linears.trellis import (
    BEHIND,
    find_numbers,
    read_tile,
    read_turned,
    read_windows,
    run_of,
    turn,
)


@triton.jit(do_not_specialize=["rows"])
def multiply_turned_few(
    out,  # [rows, outputs], with `out_stride` between rows
    sums,  # float32 [blocks, parts, ROWS, 128], with DIVIDED
    arrived,  # int32 [blocks]: programs that have finished; 0 before and after
    x,  # [rows, inputs], contiguous
    rings,  # tensors of `Trellis`, as are all up to `output_scales`
    input_scales,
    sorts,
    output_scales,
    bias,  # [outputs], with HAS_BIAS
    rows,
    outputs,
    inputs,
    padded,
    out_stride,
    HALF_BITS: tl.constexpr,
    BOOK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DIVIDED: tl.constexpr,  # programs share a block: as many as the grid's second dimension
    ROWS: tl.constexpr,  # as many as there are or more, a power of two
):
    """Multiply a few rows, which each program turns by itself; all in float32."""
    run: tl.constexpr = run_of(HALF_BITS)
    block = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]
    source = x + tl.minimum(row, rows - 1) * inputs
    scales = input_scales + tl.load(sorts + block).to(tl.int64) * padded
    lane = tl.arange(0, 128)[None, :]
    tile = tl.arange(0, 8)[None, :, None] * 8 + tl.arange(0, 8)[:, None, None]
    own_rings = rings + block * (padded // 128) * (256 * HALF_BITS)
    begin, end = find_part(padded, DIVIDED)
    found = tl.zeros([ROWS, 8, 8, 256 // run], tl.float32)  # by tiles of outputs, and of inputs
    for i in range(begin, end):
        a = read_turned(source, scales, i * 128 + lane, inputs)
        a = tl.trans(tl.reshape(a, [ROWS, 8, 2, 4, 2]), (0, 1, 3, 2, 4))
        pair = tl.split(a)
        window = read_windows(own_rings + i * (256 * HALF_BITS), tile * (4 * HALF_BITS), HALF_BITS)
        for place in tl.static_range(run):
            own = pair[place % 2]
            if run == 4:
                own = tl.split(own)[place // 2]
            own = tl.reshape(own, [ROWS, 8, 1, 4, 1, 4 // run])
            own = tl.broadcast_to(own, [ROWS, 8, 8, 4, 2, 4 // run])
            number = find_numbers(window, place, HALF_BITS, BOOK).to(tl.float32)
            found += number[None] * tl.reshape(own, [ROWS, 1, 8, 256 // run])
    every = tl.reshape(found, [ROWS, 8, 8, 8, 4, 2, 4 // run])
    total = tl.sum(tl.sum(tl.sum(every, 6), 4), 2)
    total = tl.reshape(tl.trans(total, (0, 1, 3, 2)), [ROWS, 128])
    finish_block(
        out, sums, arrived, total, output_scales, bias, 0, rows, outputs, out_stride, HAS_BIAS,
        DIVIDED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "turned_rows"])
def multiply_turned(
    out,  # [rows, outputs], with `out_stride` between rows
    sums,  # float32 [tiles, blocks, parts, ROWS, 128], with DIVIDED
    arrived,  # int32 [tiles, blocks]: programs that have finished; 0 before and after
    turned,  # as `turn_inputs` writes it: the first of some rows in the first sort
    rings,  # tensors of `Trellis`, as are all up to `output_scales`
    sorts,
    output_scales,
    bias,  # [outputs], with HAS_BIAS
    rows,
    turned_rows,  # of a sort
    outputs,
    padded,
    out_stride,
    one,  # the bits of 1.0
    HALF_BITS: tl.constexpr,
    BOOK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DIVIDED: tl.constexpr,  # programs share a block: as many as the grid's second dimension
    ROWS: tl.constexpr,  # of a tile, a power of two
    DEPTH: tl.constexpr,  # inputs of one step of the loop, at most 128
):
    """Multiply rows that have been turned, on matrix units; sums are float32.

    The grid's third dimension are tiles of ROWS rows.
    """
    block = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(2) * ROWS
    row = first_row + tl.arange(0, ROWS)
    sort = tl.load(sorts + block).to(tl.int64)
    source = turned + (sort * turned_rows + tl.minimum(row, rows - 1)) * padded
    beside: tl.constexpr = DEPTH // 16
    tile = tl.arange(0, beside)[None, :, None] * 8 + tl.arange(0, 8)[:, None, None]
    own_rings = rings + block * (padded // 128) * (256 * HALF_BITS)
    begin, end = find_part(padded, DIVIDED)
    total = tl.zeros([128, ROWS], tl.float32)
    for first in range(begin * 128, end * 128, DEPTH):
        a = tl.load(source[None, :] + (first + tl.arange(0, DEPTH))[:, None])
        some = own_rings + first * (2 * HALF_BITS)
        number = read_tile(some, tile * (4 * HALF_BITS), HALF_BITS, BOOK).to(a.dtype)
        # The factor 1.0: see `add_units` in codes.py.
        total += tl.dot(number, a, input_precision="ieee") * one.to(tl.float32, bitcast=True)
    finish_block(
        out, sums, arrived, tl.trans(total), output_scales, bias, first_row, rows, outputs,
        out_stride, HAS_BIAS, DIVIDED,
    )  # fmt: skip


@triton.jit
def find_part(padded, DIVIDED: tl.constexpr):
    """Return the first of the program's runs of 128 inputs, and the end."""
    runs = padded // 128
    begin = 0
    end = runs
    if DIVIDED:
        each = tl.cdiv(runs, tl.num_programs(1))
        begin = tl.program_id(1) * each
        end = tl.minimum(begin + each, runs)
    return begin, end


@triton.jit
def finish_block(
    out,
    sums,
    arrived,
    total,  # float32 [ROWS, 128]: what the program has found
    output_scales,
    bias,
    first_row,  # of the program's tile
    rows,
    outputs,
    out_stride,
    HAS_BIAS: tl.constexpr,
    DIVIDED: tl.constexpr,
):
    """Turn, scale and write a block's results, if no other program of it is still at work."""
    size: tl.constexpr = total.shape[0]
    block = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, size)[:, None]
    lane = tl.arange(0, 128)[None, :]
    last = True
    if DIVIDED:
        parts, shared = tl.num_programs(1), tl.program_id(2) * tl.num_programs(0) + block
        own = sums + shared * parts * size * 128 + row * 128 + lane
        tl.store(own + tl.program_id(1) * size * 128, total)
        tl.debug_barrier()  # a program's sums are written before it counts as arrived
        last = tl.atomic_add(arrived + shared, 1) == parts - 1
    if last:
        if DIVIDED:
            tl.store(arrived + shared, 0)
            total = tl.zeros([size, 128], tl.float32)
            for part in range(parts):
                total += tl.load(own + part * size * 128, cache_modifier=".cg")
        column = block * 128 + lane
        there = column < outputs
        result = turn(total) * (tl.load(output_scales + column).to(tl.float32) * BEHIND)
        if HAS_BIAS:
            result += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
        row += first_row
        at = out + row.to(tl.int64) * out_stride + column
        tl.store(at, result.to(out.dtype.element_ty), mask=there & (row < rows))
