"""Rotating the last numbers of heads, neighbours together (DeepSeek V4)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_turns(cos, sin, token, dim, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Return a token's cosines and sines for all numbers of a head; 1 and 0 before the last."""
    turned = dim - (DIM - ROTARY)
    there = (turned >= 0) & (dim < DIM)
    at = token * ROTARY + turned
    c = tl.load(cos + at, mask=there, other=1.0).to(tl.float32)
    return c, tl.load(sin + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def turn_neighbours(x, c, s):
    """Return `x` [rows, numbers] rotated: neighbours together, by cosines and signed sines.

    Which product the sum is one operation with is said, so that no two kernels differ in it.
    """
    first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    other = tl.reshape(tl.join(second, first), (x.shape[0], x.shape[1]))
    return tl.fma(other, tl.broadcast_to(s, x.shape), x * c)
