"""Positions as sines and cosines, which are added to embeddings (Vaswani, others 2017).

No torch in this file: the CPU kernels use it as well. Numbers are float32, as in transformers.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from tgi_trio.shard.checkpoint.numbers import Floats

_SLOWEST: Final = 10000.0  # positions in which the slowest sine turns by one radian


def sine_positions(rows: int, width: int) -> Floats:
    """Return a table [rows, width]: a row's sines of falling frequencies, then their cosines.

    The last of an odd number of features is 0.
    """
    half = width // 2
    step = np.float32(-math.log(_SLOWEST) / max(half - 1, 1))
    frequencies = np.exp(np.arange(half, dtype=np.float32) * step)
    angles = np.arange(rows, dtype=np.float32)[:, None] * frequencies
    table = np.zeros((rows, width), np.float32)
    table[:, :half], table[:, half : 2 * half] = np.sin(angles), np.cos(angles)
    return table
