"""What comes before products with EXL3's matrices: inputs are turned, matrices written as numbers.

Of a layer's activation, inputs are opened by the programs that turn them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import activate, open_pairs
from tgi_trio.shard.torch_backend.kernels.linears.trellis import (
    BEHIND,
    place_inputs,
    read_tile,
    turn_scaled,
)


@triton.jit(do_not_specialize=["rows"])
def turn_inputs(
    turned,  # [sorts, rows, padded]: inputs of 16 in the order of rings
    x,  # [rows, inputs], contiguous; with GATED [rows, 2 inputs]: gates, then ups
    input_scales,  # float16 [sorts, padded]
    limit,  # as for `gate` of activations.py, as are the next and all from ACT on
    scale,
    rows,
    inputs,
    padded,  # inputs, up to a multiple of 128
    ROWS: tl.constexpr,
    ACT: tl.constexpr,  # "": inputs are as they are
    GATED: tl.constexpr,
    LIMITS: tl.constexpr,
    RAISED: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Write rows times each sort of scales, turned; a program for each 128 inputs of a sort."""
    turn_some(
        turned, x, input_scales, limit, scale, rows, inputs, padded, tl.program_id(0),
        tl.program_id(1), tl.program_id(2), ROWS, ACT, GATED, LIMITS, RAISED, PAIRED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "first", "blocks", "writing"])
def turn_and_write(
    turned,  # as for `turn_inputs`, as are all up to `padded`
    x,
    input_scales,
    limit,
    scale,
    rows,
    inputs,
    padded,
    out,  # [outputs of `blocks` blocks from `first` on, padded], contiguous
    rings,  # tensors of `Trellis`, as is `output_scales`
    output_scales,
    first,  # block
    blocks,
    writing,  # programs that write, which are the first ones; all others turn
    ROWS: tl.constexpr,  # as are all up to PAIRED
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    LIMITS: tl.constexpr,
    RAISED: tl.constexpr,
    PAIRED: tl.constexpr,
    HALF_BITS: tl.constexpr,
    BOOK: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs of one step of the loop
    STEPS: tl.constexpr,  # of a program that writes
):
    """Turn inputs, and write weights that have been turned along their outputs, for a library."""
    program = tl.program_id(0)
    if program < writing:
        write_some(
            out, rings, output_scales, first, padded, program % blocks, program // blocks,
            HALF_BITS, BOOK, DEPTH, STEPS,
        )  # fmt: skip
    else:
        program -= writing
        runs, tiles = padded // 128, tl.cdiv(rows, ROWS)
        turn_some(
            turned, x, input_scales, limit, scale, rows, inputs, padded, program // runs % tiles,
            program % runs, program // runs // tiles, ROWS, ACT, GATED, LIMITS, RAISED, PAIRED,
        )  # fmt: skip


@triton.jit
def turn_some(
    turned, x, input_scales, limit, scale, rows, inputs, padded, tile, run, sort,
    ROWS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, LIMITS: tl.constexpr,
    RAISED: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Turn a tile of rows: the 128 inputs of a run, times the scales of a sort."""
    sort = sort.to(tl.int64)
    row = (tile * ROWS + tl.arange(0, ROWS))[:, None]
    i = tl.arange(0, 128)[None, :]
    k = run * 128 + i
    source = x + tl.minimum(row, rows - 1).to(tl.int64) * (2 * inputs if GATED else inputs)
    if GATED:
        a = open_pairs(source, k, k < inputs, inputs, limit, scale, x, ACT, LIMITS, RAISED, PAIRED)
    else:
        a = tl.load(source + k, mask=k < inputs, other=0.0).to(tl.float32)
        if ACT != "":
            a = activate(a, ACT)
    if ACT != "":
        a = a.to(x.dtype.element_ty).to(tl.float32)
    a = turn_scaled(a, input_scales + sort * padded, k)
    at = (sort * rows + row) * padded + place_inputs(k, i)
    tl.store(turned + at, a.to(turned.dtype.element_ty), mask=row < rows)


@triton.jit
def write_some(
    out, rings, output_scales, first, padded, own, part,
    HALF_BITS: tl.constexpr, BOOK: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Write a part of the inputs of the own-th block behind the first."""
    block = (first + own).to(tl.int64)
    output = tl.arange(0, 128)
    both = output[:, None] & output[None, :]
    both ^= both >> 4
    both ^= both >> 2
    signs = (1 - 2 * ((both ^ (both >> 1)) & 1)).to(tl.float16)
    scales = tl.load(output_scales + block * 128 + output).to(tl.float32) * BEHIND
    beside: tl.constexpr = DEPTH // 16
    tile = tl.arange(0, beside)[None, :, None] * 8 + tl.arange(0, 8)[:, None, None]
    own_rings = rings + block * (padded // 128) * (256 * HALF_BITS)
    begin = part * STEPS * DEPTH
    for k in range(begin, tl.minimum(begin + STEPS * DEPTH, padded), DEPTH):
        some = own_rings + k * (2 * HALF_BITS)
        number = read_tile(some, tile * (4 * HALF_BITS), HALF_BITS, BOOK)
        weight = tl.dot(signs, number) * scales[:, None]
        place = (own * 128 + output).to(tl.int64)[:, None] * padded
        place += k + tl.arange(0, DEPTH)[None, :]
        tl.store(out + place, weight.to(out.dtype.element_ty))
