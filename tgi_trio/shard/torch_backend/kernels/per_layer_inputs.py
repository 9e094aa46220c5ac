"""Products of what gates let through of a layer's own embeddings (`layers/per_layer_inputs.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.activations import activate


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def multiply_opened(
    out,  # [T, OUTPUTS], written
    gates,  # [T, SIZE]
    own,  # [T, SIZE], with `stride` between tokens
    weight,  # [OUTPUTS, SIZE]
    tokens, stride,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    ACT: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program; all three are powers of two
    BLOCK: tl.constexpr,  # outputs of a program
    DEPTH: tl.constexpr,  # numbers that are multiplied at a time
):
    """Multiply act(gates) * own by a matrix, rounded as `open_own` and a product would round it.

    Every program opens the numbers of its tokens anew; they are few.
    """
    dtype = out.dtype.element_ty
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    real, at = (token < tokens)[:, None], token.to(tl.int64)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < OUTPUTS
    row = weight + column.to(tl.int64)[None, :] * SIZE
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for begin in range(0, SIZE, DEPTH):
        number = begin + tl.arange(0, DEPTH)
        there = number < SIZE
        some = real & there[None, :]
        opened = tl.load(gates + at * SIZE + number[None, :], mask=some, other=0.0).to(tl.float32)
        opened = activate(opened, ACT).to(dtype).to(tl.float32)
        value = tl.load(own + at * stride + number[None, :], mask=some, other=0.0).to(tl.float32)
        w = tl.load(row + number[:, None], mask=inside[None, :] & there[:, None], other=0.0)
        total = tl.dot((opened * value).to(dtype), w, total, input_precision="ieee")
    place = out + at * OUTPUTS + column[None, :]
    tl.store(place, total.to(dtype), mask=real & inside[None, :])
# fmt: on
