"""Filling in the token ids that the previous step chose."""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin


# Sizes are not specialised: a new one must not make Triton compile another variant.
@triton.jit(do_not_specialize=["count"])
def fill_tokens(
    filled,  # int64 [T], written
    ids,  # int64 [T]
    inputs,  # int32 [T]: index into `chosen` for each token, -1: the one in `ids`
    chosen,  # int64: tokens that the previous step chose
    count,  # T
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,  # the next kernel may begin early; this one never does
):
    """Take each token from where it is known."""
    let_next_begin(OVERLAPS)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    which = tl.load(inputs + at, mask=there, other=-1)
    known = tl.load(ids + at, mask=there, other=0)
    new = tl.load(chosen + tl.maximum(which, 0), mask=which >= 0, other=0)
    tl.store(filled + at, tl.where(which >= 0, new, known), mask=there)
