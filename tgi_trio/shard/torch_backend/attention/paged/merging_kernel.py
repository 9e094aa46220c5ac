"""Merging the parts of attention that programs found along a tile's keys (split-KV).

Each part is a running softmax (`paged_kernel.py`). Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import open_heads
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


@triton.jit(do_not_specialize=["count"])
def merge_parts(
    out,  # [T, heads, DIM], contiguous
    parts,  # float32, as are the next two: see `attend_tile`
    bests,
    masses,
    gates,  # [T, HEADS * DIM / EACH], read with EACH only, as for `attend_tile`
    count,  # parts
    gate_stride,
    HEADS: tl.constexpr,  # of a token
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MOST: tl.constexpr,  # most parts, a power of two
    EACH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Add up a query head's parts, weighted by their masses; one program for each head."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    which = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MOST)
    there = part < count
    dim = tl.arange(0, PADDED_DIM)
    inside = dim < DIM
    best = tl.load(bests + which * count + part, mask=there, other=float("-inf"))
    level = tl.max(best, 0)
    level = tl.where(level == float("-inf"), 0.0, level)
    weight = tl.exp2(best - level)  # 0 where a part saw nothing
    mass = tl.sum(tl.load(masses + which * count + part, mask=there, other=0.0) * weight, 0)
    at = (which * count + part[:, None]) * DIM + dim[None, :]
    sums = tl.load(parts + at, mask=there[:, None] & inside[None, :], other=0.0)
    result = tl.sum(sums * weight[:, None], 0) / tl.where(mass == 0.0, 1.0, mass)
    if EACH:
        own = gates + which // HEADS * gate_stride
        result = open_heads(result, own, which % HEADS, dim, inside, out, DIM, EACH)
    tl.store(out + which * DIM + dim, result.to(out.dtype.element_ty), mask=inside)
