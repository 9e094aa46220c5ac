"""Expanding what heads have read of latents to their values, gated, in one launch.

Where programs have shared a context, their parts are merged here: parts are rows of the product,
which is linear, so that tensor cores multiply many rows where a step has few tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import open_heads


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def expand_values(
    out,  # [T, HEADS, VALUE], contiguous
    sums,  # float32 [T, HEADS, PARTS, RANK], contiguous; if not MERGES, [T, HEADS, RANK] to expand
    bests,  # float32 [T, HEADS, PARTS], read with MERGES only, as for `merge_parts`
    masses,
    weight,  # [HEADS, RANK, VALUE], contiguous
    gates,  # [T, HEADS * VALUE / EACH], read with EACH only, as for `attend_tile`
    tokens,
    token_stride, head_stride, gate_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    MERGES: tl.constexpr,
    PARTS: tl.constexpr,  # of a token: a power of two
    EACH: tl.constexpr,
    ROWS: tl.constexpr,  # parts of a program, of ROWS / PARTS tokens; at least 16
    OUTPUTS: tl.constexpr,  # numbers of values of a program
    DEPTH: tl.constexpr,  # numbers of latents that are multiplied at a time
):
    """Multiply some tokens of one head by its matrix."""
    dtype = out.dtype.element_ty
    head = tl.program_id(0)
    first = tl.program_id(2).to(tl.int64) * (ROWS // PARTS)
    row = tl.arange(0, ROWS)
    token, part = first + row // PARTS, row % PARTS
    real = token < tokens
    at = sums + token * token_stride + head * head_stride + part * RANK
    share = tl.zeros([ROWS], tl.float32) + 1.0
    if MERGES:
        which = (token * HEADS + head) * PARTS + part
        mass = tl.load(masses + which, mask=real, other=0.0)
        best = tl.load(bests + which, mask=real, other=float("-inf"))
        share = share_out(best, mass, PARTS)
        mass = tl.where(mass == 0.0, 1.0, mass)[:, None]
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    matrix = weight + head.to(tl.int64) * RANK * VALUE
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for low in range(0, RANK, DEPTH):
        number = low + tl.arange(0, DEPTH)
        there = real[:, None] & (number < RANK)[None, :]
        x = tl.load(at[:, None] + number[None, :], mask=there, other=0.0)
        if MERGES:
            x = (x / mass).to(dtype)
        inside = (number < RANK)[:, None] & (output < VALUE)[None, :]
        w = tl.load(matrix + number[:, None] * VALUE + output[None, :], mask=inside, other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    if PARTS > 1:
        total = tl.sum(tl.reshape(total * share[:, None], (ROWS // PARTS, PARTS, OUTPUTS)), 1)
    token = first + tl.arange(0, ROWS // PARTS)
    there = (token < tokens)[:, None] & (output < VALUE)[None, :]
    if EACH:
        own = gates + token[:, None] * gate_stride
        total = open_heads(total, own, head, output[None, :], there, out, VALUE, EACH)
    into = out + (token * HEADS + head)[:, None] * VALUE + output[None, :]
    tl.store(into, total.to(dtype), mask=there)
# fmt: on


@triton.jit
def share_out(
    best,  # float32 [ROWS]
    mass,
    PARTS: tl.constexpr,
):
    """Return the share of each part in its token's result, float32 [ROWS]: 0 if it saw nothing."""
    ROWS: tl.constexpr = best.shape[0]
    best = tl.reshape(best, (ROWS // PARTS, PARTS))
    level = tl.max(best, 1)[:, None]
    level = tl.where(level == float("-inf"), 0.0, level)
    weight = tl.exp2(best - level) * tl.reshape(mass, (ROWS // PARTS, PARTS))
    whole = tl.sum(weight, 1)[:, None]
    return tl.reshape(weight / tl.where(whole == 0.0, 1.0, whole), (ROWS,))
