"""The weighted sum of a token's experts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def combine_experts(
    out,  # [T, SIZE]
    parts,  # [T, PER_TOKEN + SHARED, SIZE]
    weights,  # [T, PER_TOKEN]
    gate_logits,  # [T]: logits of the shared experts' gate; with HAS_GATE
    beside,  # [T, SIZE]: what a shared expert says that is not among the parts; with BESIDE
    SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,  # parts of shared experts
    HAS_GATE: tl.constexpr,
    BESIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the weighted sum of each token's experts; see `sum_experts`."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = sum_experts(
        parts, weights, gate_logits, beside, token, place, SIZE, PER_TOKEN, SHARED, HAS_GATE, BESIDE
    )
    tl.store(out + token * SIZE + place, total.to(out.dtype.element_ty), mask=place < SIZE)


@triton.jit
def sum_experts(
    parts,
    weights,
    gate_logits,
    beside,
    token,  # a single one, or several, [N, 1]
    place,  # which of its SIZE numbers are computed: any shape, or [1, M] of several tokens
    SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BESIDE: tl.constexpr,  # then there are no SHARED parts
):
    """Return the weighted sums, float32, shaped like `token + place`.

    They are rounded as torch's operations are.
    """
    dtype = parts.dtype.element_ty
    inside = place < SIZE
    total = tl.zeros((token + place).shape, tl.float32)
    for i in tl.static_range(PER_TOKEN):
        weight = tl.load(weights + token * PER_TOKEN + i).to(tl.float32)
        at = parts + (token * (PER_TOKEN + SHARED) + i) * SIZE
        part = tl.load(at + place, mask=inside, other=0.0).to(tl.float32)
        total += (part * weight).to(dtype).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if SHARED or BESIDE:
        more = tl.zeros((token + place).shape, tl.float32)
        if BESIDE:
            more = tl.load(beside + token * SIZE + place, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(SHARED):
            at = parts + (token * (PER_TOKEN + SHARED) + PER_TOKEN + i) * SIZE
            more += tl.load(at + place, mask=inside, other=0.0).to(tl.float32)
        more = more.to(dtype).to(tl.float32)
        if HAS_GATE:
            opened = (
                tl.sigmoid(tl.load(gate_logits + token).to(tl.float32)).to(dtype).to(tl.float32)
            )
            more = (opened * more).to(dtype).to(tl.float32)
        total = (total + more).to(dtype).to(tl.float32)
    return total
