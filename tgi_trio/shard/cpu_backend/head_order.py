"""Rotary embeddings of pairs that are not half a head apart: reorders dimensions so that they are.

Scores are sums over the dimensions of a query and a key, so both may be permuted alike. V is not
affected.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.cpu_backend.weight_layout import LANES


def needs_order(rotary: RotarySpec | None) -> bool:
    """Return whether the kernels need another order of a head's dimensions to rotate it."""
    return rotary is not None and (rotary.interleaved or rotary.dim % (2 * LANES) != 0)


def head_order(rotary: RotarySpec, head_dim: int) -> NDArray[np.int32]:
    """Return the new order of a head's dimensions, int32 [head_dim]: the old index at each place.

    First come the first elements of all pairs, half a head later their second ones. Dimensions that
    are not rotated are paired likewise.
    """
    half, count = head_dim // 2, rotary.dim // 2
    order = np.zeros(head_dim, np.int32)
    pairs = np.arange(count)
    order[:count] = 2 * pairs if rotary.interleaved else pairs
    order[half : half + count] = order[:count] + (1 if rotary.interleaved else count)
    order[count:half] = np.arange(rotary.dim, rotary.dim + half - count)
    order[half + count :] = np.arange(rotary.dim + half - count, head_dim)
    return order


def widen(angles: NDArray[np.float32], head_dim: int, rest: float) -> NDArray[np.float32]:
    """Return cosines or sines [positions, head_dim / 2], `rest` for pairs that are not rotated."""
    missing = head_dim // 2 - angles.shape[1]
    return np.pad(angles, ((0, 0), (0, missing)), constant_values=rest)
