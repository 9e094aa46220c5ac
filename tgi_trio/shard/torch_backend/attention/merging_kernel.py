"""Attention's parts become one: what programs that share a tile have found along its keys.

Each part is a running softmax (`paged_kernel.py`). A kernel of its own puts them together, or of
decodes the program that comes last: in the parts' order, so what comes out is the same whoever that
is. Imported only where Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


@triton.jit(do_not_specialize=["count"])
def merge_parts(
    out,  # [T, heads, DIM], contiguous
    parts,  # float32, as are the next two: see `attend_tile`
    bests,
    masses,
    count,  # parts there are
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MOST: tl.constexpr,  # parts there can be, a power of two
    OVERLAPS: tl.constexpr,
):
    """Weigh a query head's parts by their masses; one program each."""
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
    tl.store(out + which * DIM + dim, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def merge_last(
    out,
    parts,  # as for `attend_tile`
    bests,
    masses,
    arrived,
    first,  # int64: token * heads + the first of GROUP heads that the tile has
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MOST: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Do what `merge_parts` does of a decode's heads, in the last of the programs that share them.

    Parts are read where all multiprocessors see them, beside their own caches.
    """
    count = tl.num_programs(2)
    own = arrived + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.debug_barrier()  # all of a program's part comes before it says that it has arrived
    if tl.atomic_add(own, 1, sem="acq_rel", scope="gpu") == count - 1:
        tl.store(own, 0)
        part = tl.arange(0, MOST)[:, None]
        dim = tl.arange(0, PADDED_DIM)
        for low in tl.static_range(0, GROUP, MERGED):
            head = low + tl.arange(0, MERGED)
            there = (part < count) & (head < GROUP)[None, :]
            at = (first + head)[None, :] * count + part
            best = tl.load(bests + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            mass = tl.load(masses + at, mask=there, other=0.0, cache_modifier=".cg")
            stored = there[:, :, None] & (dim < DIM)[None, None, :]
            places = parts + at[:, :, None] * DIM + dim[None, None, :]
            sums = tl.load(places, mask=stored, other=0.0, cache_modifier=".cg")
            level = tl.max(best, 0)
            level = tl.where(level == float("-inf"), 0.0, level)
            weight = tl.exp2(best - level[None, :])  # 0 where a part saw nothing
            mass = tl.sum(mass * weight, 0)
            result = tl.sum(sums * weight[:, :, None], 0)
            result = result / tl.where(mass == 0.0, 1.0, mass)[:, None]
            into = out + (first + head)[:, None] * DIM + dim[None, :]
            inside = (head < GROUP)[:, None] & (dim < DIM)[None, :]
            tl.store(into, result.to(out.dtype.element_ty), mask=inside)
