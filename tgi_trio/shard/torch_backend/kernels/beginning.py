"""The beginning of a step of few rows: looking up embeddings, cosines and sines in one launch.

This kernel waits for the preceding one before it lets the next begin (programmatic dependent
launch), while others do the reverse: the preceding kernel is the last that writes a step's inputs,
which later kernels read before they wait themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tgi_trio.shard.torch_backend.kernels.overlapping import let_next_begin, wait_for_earlier


# Sizes are not specialised: a new one must not make Triton compile another variant.
@triton.jit(do_not_specialize=["rows"])
def begin_rows(
    x,  # [T, SIZE], written
    cos,  # [T, ROTARY], written
    sin,  # likewise
    ids,  # int64 [T]
    positions,  # int64 [T]
    embedding,  # [rows, SIZE]
    every_cos,  # [positions, ROTARY]
    every_sin,
    scale,  # of embeddings; read with SCALES
    rows,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two
    ROTARY: tl.constexpr,
    PADDED_ROTARY: tl.constexpr,
    SCALES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Look up what one token needs; an id outside the vocabulary is embedded as zeros."""
    wait_for_earlier(OVERLAPS)
    let_next_begin(OVERLAPS)
    token = tl.program_id(0)
    which, position = tl.load(ids + token), tl.load(positions + token)
    place, dim = tl.arange(0, PADDED), tl.arange(0, PADDED_ROTARY)
    inside, turned = place < SIZE, dim < ROTARY
    there = inside & (which >= 0) & (which < rows)
    value = tl.load(embedding + which * SIZE + place, mask=there, other=0.0)
    c = tl.load(every_cos + position * ROTARY + dim, mask=turned)
    s = tl.load(every_sin + position * ROTARY + dim, mask=turned)
    if SCALES:
        value = (value.to(tl.float32) * scale).to(x.dtype.element_ty)
    tl.store(x + token * SIZE + place, value, mask=inside)
    tl.store(cos + token * ROTARY + dim, c, mask=turned)
    tl.store(sin + token * ROTARY + dim, s, mask=turned)
