"""Products of numpy that its library (OpenBLAS) computes without threads.

It would spread larger ones over threads that compete with the kernels' own, and waits for each: on
a machine with other work a drafter's attention then takes some hundred times as long.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_MOST: Final = 1 << 18  # multiply-adds of a product; OpenBLAS's own limit


def multiply_small(x: Floats, y: Floats) -> Floats:
    """Return x @ y [heads, m, n] for x [heads, m, k] and y [heads, k, n], cut along k or n."""
    (rows, inner), width = x.shape[1:], y.shape[2]
    if rows * inner * width <= _MOST:
        return x @ y
    if width >= inner:
        size = max(1, _MOST // (rows * inner))
        return np.concatenate([x @ y[:, :, at : at + size] for at in range(0, width, size)], axis=2)
    size = max(1, _MOST // (rows * width))
    found = np.zeros((len(x), rows, width), np.float32)
    for at in range(0, inner, size):
        found += x[:, :, at : at + size] @ y[:, at : at + size]
    return found
