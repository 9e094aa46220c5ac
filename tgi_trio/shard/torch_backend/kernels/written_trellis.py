"""Writing an EXL3 matrix as numbers, for products of many rows that have been turned."""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.trellis import BEHIND, read_tile


@triton.jit(do_not_specialize=["first"])
def write_trellis(
    out,  # [outputs from `first` on, padded], contiguous
    rings,  # tensors of `Trellis`, as is `output_scales`
    output_scales,
    first,  # block
    padded,
    HALF_BITS: tl.constexpr,
    BOOK: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs of one step of the loop
    STEPS: tl.constexpr,  # of a program
):
    """Write weights that have been turned along their outputs, and wait for turned inputs."""
    block = (first + tl.program_id(0)).to(tl.int64)
    output = tl.arange(0, 128)
    both = output[:, None] & output[None, :]
    both ^= both >> 4
    both ^= both >> 2
    signs = (1 - 2 * ((both ^ (both >> 1)) & 1)).to(tl.float16)
    scale = tl.load(output_scales + block * 128 + output).to(tl.float32) * BEHIND
    beside: tl.constexpr = DEPTH // 16
    tile = tl.arange(0, beside)[None, :, None] * 8 + tl.arange(0, 8)[:, None, None]
    own_rings = rings + block * (padded // 128) * (256 * HALF_BITS)
    begin = tl.program_id(1) * STEPS * DEPTH
    for k in range(begin, tl.minimum(begin + STEPS * DEPTH, padded), DEPTH):
        some = own_rings + k * (2 * HALF_BITS)
        number = read_tile(some, tile * (4 * HALF_BITS), HALF_BITS, BOOK)
        weight = tl.dot(signs, number) * scale[:, None]
        place = (tl.program_id(0) * 128 + output).to(tl.int64)[:, None] * padded
        place += k + tl.arange(0, DEPTH)[None, :]
        tl.store(out + place, weight.to(out.dtype.element_ty))
