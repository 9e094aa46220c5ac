"""The inputs of experts whose weights multiply what goes into them (Llama 4).

A program has some numbers of one (token, expert) pair. The pairs' rows are in the order in which
`route_tokens` counts them, and their outputs have the weight 1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weigh_inputs(
    out,  # [T, PER_TOKEN + SHARED, SIZE]
    left,  # [T, PER_TOKEN]: what is left to weigh the outputs with, 1 each
    x,  # [T, SIZE]
    weights,  # [T, PER_TOKEN]
    SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,  # experts that get `x` as it is
    BLOCK: tl.constexpr,
):
    """Multiply each token with the weights of its experts."""
    token, expert = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    number = tl.load(x + token * SIZE + place, mask=inside, other=0.0)
    if expert < PER_TOKEN:
        at = token * PER_TOKEN + expert
        number = (number.to(tl.float32) * tl.load(weights + at).to(tl.float32)).to(number.dtype)
        if tl.program_id(2) == 0:
            tl.store(left + at, 1.0)
    tl.store(out + (token * (PER_TOKEN + SHARED) + expert) * SIZE + place, number, mask=inside)
