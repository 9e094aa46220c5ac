"""The weighted sum of what a token's experts have found."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_experts(
    out,  # [T, SIZE]
    parts,  # [T, PER_TOKEN + SHARED, SIZE]
    weights,  # [T, PER_TOKEN]
    doors,  # [T]: how far shared experts are let in, as a logit; with HAS_DOOR
    SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,  # parts of what every token goes through
    HAS_DOOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up what a token's experts have found; see `sum_experts`."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = sum_experts(parts, weights, doors, token, place, SIZE, PER_TOKEN, SHARED, HAS_DOOR)
    tl.store(out + token * SIZE + place, total.to(out.dtype.element_ty), mask=place < SIZE)


@triton.jit
def sum_experts(
    parts,
    weights,
    doors,
    token,  # one of them
    place,  # what is wanted of its SIZE numbers, of any shape
    SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_DOOR: tl.constexpr,
):
    """Return float32 sums like `place`, weighted; rounded as torch's operations are."""
    dtype = parts.dtype.element_ty
    inside = place < SIZE
    total = tl.zeros(place.shape, tl.float32)
    for i in tl.static_range(PER_TOKEN):
        weight = tl.load(weights + token * PER_TOKEN + i).to(tl.float32)
        at = parts + (token * (PER_TOKEN + SHARED) + i) * SIZE
        part = tl.load(at + place, mask=inside, other=0.0).to(tl.float32)
        total += (part * weight).to(dtype).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if SHARED:
        more = tl.zeros(place.shape, tl.float32)
        for i in tl.static_range(SHARED):
            at = parts + (token * (PER_TOKEN + SHARED) + PER_TOKEN + i) * SIZE
            more += tl.load(at + place, mask=inside, other=0.0).to(tl.float32)
        more = more.to(dtype).to(tl.float32)
        if HAS_DOOR:
            door = tl.sigmoid(tl.load(doors + token).to(tl.float32)).to(dtype).to(tl.float32)
            more = (door * more).to(dtype).to(tl.float32)
        total = (total + more).to(dtype).to(tl.float32)
    return total
