"""Products of a matrix with several rows, up to 64, on tensor cores.

The matrix is the left operand, since it has the most rows. If there are few outputs, programs share
the inputs of a tile (split-K). The last one to finish adds the partial sums, in their order, so the
result does not depend on which one that is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import activate
from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# fmt: off
@triton.jit(do_not_specialize=["rows", "outputs"])
def multiply_several(
    out,  # [rows, outputs]
    x,  # [rows, INPUTS]
    weight,  # [outputs, INPUTS]; with ACT twice as many outputs: gates, then ups
    bias,  # of each output; read with HAS_BIAS only
    sums,  # float32 [tiles, PARTS, 1 or with ACT 2, OUTPUTS, ROWS], with PARTS > 1 only
    arrived,  # int32 [tiles]: programs that have finished; 0 before and after
    rows,
    outputs,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACT: tl.constexpr,  # "": no gates
    ROWS: tl.constexpr,  # 16, 32 or 64, as many as there are or more
    OUTPUTS: tl.constexpr,  # of a tile; this and the next are powers of two
    DEPTH: tl.constexpr,  # inputs of one step of the loop
    PARTS: tl.constexpr,  # programs that share a tile's inputs
    AHEAD: tl.constexpr,  # stages of software pipelining: steps whose loads are in flight
    OVERLAPS: tl.constexpr,
):
    """Multiply rows by a matrix, with float32 sums."""
    let_next_begin(OVERLAPS)
    wait_for_earlier(OVERLAPS)
    tile, part = tl.program_id(0), tl.program_id(1)
    column = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    there = (column < outputs)[:, None]
    row = tl.arange(0, ROWS)
    each: tl.constexpr = (INPUTS + DEPTH * PARTS - 1) // (DEPTH * PARTS) * DEPTH
    begin = part * each
    at = weight + column.to(tl.int64)[:, None] * INPUTS
    other = at + outputs.to(tl.int64) * INPUTS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    gated = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for low in tl.range(begin, tl.minimum(begin + each, INPUTS), DEPTH, num_stages=AHEAD):
        depth = low + tl.arange(0, DEPTH)[None, :]
        inside = depth < INPUTS
        read = (row < rows)[:, None] & inside
        a = tl.trans(tl.load(x + row[:, None] * INPUTS + depth, mask=read, other=0.0))
        total = tl.dot(tl.load(at + depth, mask=there & inside, other=0.0), a, total)
        if ACT != "":
            gated = tl.dot(tl.load(other + depth, mask=there & inside, other=0.0), a, gated)
    last = True
    if PARTS > 1:
        size: tl.constexpr = (1 if ACT == "" else 2) * OUTPUTS * ROWS
        place = tl.arange(0, OUTPUTS)[:, None] * ROWS + row[None, :]
        own = sums + tile.to(tl.int64) * PARTS * size
        tl.store(own + part * size + place, total)
        if ACT != "":
            tl.store(own + part * size + OUTPUTS * ROWS + place, gated)
        tl.debug_barrier()  # a program's sums are written before it counts as arrived
        last = tl.atomic_add(arrived + tile, 1) == PARTS - 1
    if last:
        if PARTS > 1:
            tl.store(arrived + tile, 0)
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            gated = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for i in range(PARTS):
                total += tl.load(own + i * size + place, cache_modifier=".cg")
                if ACT != "":
                    gated += tl.load(own + i * size + OUTPUTS * ROWS + place, cache_modifier=".cg")
        dtype = out.dtype.element_ty
        if HAS_BIAS:
            total += tl.load(bias + column[:, None], mask=there, other=0.0).to(tl.float32)
        if ACT != "":
            if HAS_BIAS:
                more = tl.load(bias + outputs + column[:, None], mask=there, other=0.0)
                gated += more.to(tl.float32)
            opened = activate(total.to(dtype).to(tl.float32), ACT).to(dtype).to(tl.float32)
            total = opened * gated.to(dtype).to(tl.float32)
        into = out + row[None, :] * outputs + column[:, None]
        tl.store(into, total.to(dtype), mask=there & (row < rows)[None, :])
# fmt: on
