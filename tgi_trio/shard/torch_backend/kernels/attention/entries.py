"""Entries: keys of whole runs of tokens, made where their last token's numbers lie (DeepSeek V4).

A number of an entry is the mean of a run's tokens, weighted by a softmax of its own over them. That
is made by the launch that writes a step's tokens (`shared_key.py`): of tokens that other programs
write meanwhile, numbers are read where those read them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.attention.interleaved_rotation import turn_neighbours
from tgi_trio.shard.torch_backend.kernels.fused import normalise


# fmt: off
@triton.jit
def make_entry(
    kept,  # pointer to what is kept of the cache's first token
    fresh,  # to the same of the step's first token, with `stride` between tokens
    slots,  # int64 [T]: of the step's tokens
    table,  # the row's block numbers
    token,  # the run's last one
    seen, frequencies, bias, gain, turn_scale, eps, stride,
    STRIDE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr,
    RATE: tl.constexpr, OVERLAPPING: tl.constexpr, ROTARY: tl.constexpr, KIND: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Make the entry of the run that ends before position `seen`.

    Of the preceding run the first DIM numbers are averaged, of the run itself the last DIM, and
    nobody else reads these: the entry takes their place. Tokens of the step are before `token` in
    it, each in the slot of its place in the run.
    """
    wide: tl.constexpr = 2 * DIM if OVERLAPPING else DIM
    tokens: tl.constexpr = 2 * RATE if OVERLAPPING else RATE
    dim = tl.arange(0, PADDED_DIM)[None, :]
    best = tl.full([PADDED_DIM], float("-inf"), tl.float32)
    mass, total = tl.zeros([PADDED_DIM], tl.float32), tl.zeros([PADDED_DIM], tl.float32)
    for low in range(0, tokens, BLOCK):
        which = low + tl.arange(0, BLOCK)[:, None]
        place = seen - tokens + which
        there = (which < tokens) & (place >= 0)
        block = tl.load(table + place // PAGE, mask=there, other=0).to(tl.int64)
        column = tl.where(which < tokens - RATE, 0, wide - DIM) + dim
        slot, beside = block * PAGE + place % PAGE, token - tokens + 1 + which
        new = tl.load(slots + beside, mask=there & (beside >= 0), other=-1) == slot
        new = there & (new | (beside == token))
        at = tl.where(new, fresh + beside * stride, kept + slot * STRIDE) + column
        inside = there & (dim < DIM)
        number = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(at + wide, mask=inside, other=0.0).to(tl.float32)
        weight += tl.load(bias + which % RATE * wide + column, mask=inside, other=0.0)
        weight = tl.where(there, weight, float("-inf"))
        higher = tl.maximum(best, tl.max(weight, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # no token yet
        fade, odds = tl.exp(best - level), tl.exp(weight - level[None, :])
        mass = mass * fade + tl.sum(odds, 0)
        total = total * fade + tl.sum(odds * number, 0)
        best = higher
    dtype = kept.dtype.element_ty
    x = (total / mass).to(dtype).to(tl.float32)[None, :]
    x = tl.where(dim < DIM, x, 0.0)
    x = normalise(x, dim, gain, gain, eps, DIM, KIND, True, False).to(dtype).to(tl.float32)
    turned = dim - (DIM - ROTARY)
    there = (turned >= 0) & (dim < DIM)
    angle = (seen - RATE).to(tl.float32)
    angle *= tl.load(frequencies + turned // 2, mask=there, other=0.0)
    c = tl.where(there, tl.cos(angle) * turn_scale, 1.0).to(dtype).to(tl.float32)
    s = tl.where(there, tl.sin(angle) * turn_scale, 0.0).to(dtype).to(tl.float32)
    x = turn_neighbours(x, c, tl.where(dim % 2 == 0, -s, s))
    into = kept + tl.load(slots + token) * STRIDE + wide - DIM
    tl.store(into + dim, x.to(dtype), mask=dim < DIM)
# fmt: on
