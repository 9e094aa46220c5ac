"""Attention with linear biases."""

from __future__ import annotations

import math

import torch


def alibi_slopes(heads: int, maximum: float = 8.0) -> torch.Tensor:
    """Return float32 [heads] slopes of attention with linear biases.

    Source: Press et al. 2022. Heads beyond a power of two take every other slope of twice as many.
    """
    power = 2 ** math.floor(math.log2(heads))
    base = torch.arange(1, power + 1, dtype=torch.float32) * (maximum / power)
    slopes = torch.pow(2.0, -base)
    if power == heads:
        return slopes
    finer = torch.arange(1, 2 * (heads - power) + 1, 2, dtype=torch.float32)
    return torch.cat((slopes, torch.pow(2.0, -finer * (maximum / (2 * power)))))
