"""The weights of a token's hidden states around attention and MLP, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weigh_streams(
    read,  # float32 [T, COUNT]: of each state in what the part reads
    added,  # float32 [T, COUNT]: of the part's result in each state
    mixture,  # float32 [T, COUNT, COUNT]; with ITERATIONS
    parts,  # float32 [T, 2 COUNT], and with ITERATIONS + COUNT * COUNT
    base,  # float32, as many
    scale,  # float32 [2 or 3]
    eps,
    most,
    added_eps,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,  # to a power of two
    ITERATIONS: tl.constexpr,
):
    """Compute the weights of a token; see `HyperConnection.enter`."""
    token = tl.program_id(0).to(tl.int64)
    own = parts + token * (2 * COUNT + (COUNT * COUNT if ITERATIONS else 0))
    state = tl.arange(0, PADDED)
    inside = state < COUNT
    x = weigh(own, base, tl.load(scale), state, inside)
    tl.store(read + token * COUNT + state, tl.sigmoid(x) + eps, mask=inside)
    x = weigh(own + COUNT, base + COUNT, tl.load(scale + 1), state, inside)
    tl.store(added + token * COUNT + state, most * tl.sigmoid(x) + added_eps, mask=inside)
    if ITERATIONS:
        place = state[:, None] * COUNT + state[None, :]
        there = inside[:, None] & inside[None, :]
        x = weigh(own + 2 * COUNT, base + 2 * COUNT, tl.load(scale + 2), place, there)
        odds = tl.exp(x - tl.max(tl.where(there, x, float("-inf")), 1)[:, None])
        odds = tl.where(there, odds, 0.0)
        total = tl.where(inside, tl.sum(odds, 1), 1.0)
        odds = tl.where(there, odds / total[:, None] + eps, 0.0)
        odds = tl.where(there, odds / (tl.sum(odds, 0)[None, :] + eps), 0.0)
        for _ in range(ITERATIONS - 1):
            odds = tl.where(there, odds / (tl.sum(odds, 1)[:, None] + eps), 0.0)
            odds = tl.where(there, odds / (tl.sum(odds, 0)[None, :] + eps), 0.0)
        tl.store(mixture + token * COUNT * COUNT + place, odds, mask=there)


@triton.jit
def weigh(part, base, scale, place, there):
    """Return what the weights at `place` are computed from; 0 where none are `there`."""
    own = tl.load(part + place, mask=there, other=0.0)
    return own * scale + tl.load(base + place, mask=there, other=0.0)
