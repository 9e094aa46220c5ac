"""Attention with linear biases (ALiBi): how steep each head's is.

No torch: the CPU kernels read it as well. Source: Press et al. 2022, arXiv 2108.12409.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def alibi_slopes(heads: int, maximum: float = 8.0) -> NDArray[np.float32]:
    """Return float32 [heads].

    Heads beyond a power of two take every other slope of twice as many.
    """
    power = 2 ** math.floor(math.log2(heads))
    base = np.arange(1, power + 1) * (maximum / power)
    finer = np.arange(1, 2 * (heads - power) + 1, 2) * (maximum / (2 * power))
    slopes: NDArray[np.float32] = np.exp2(-np.concatenate((base, finer))).astype(np.float32)
    return slopes
