"""Attention with linear biases."""

from __future__ import annotations

import torch

from tgi_trio.shard.positions import linear_biases


def alibi_slopes(heads: int, maximum: float = 8.0) -> torch.Tensor:
    """Return float32 [heads] slopes; see `linear_biases.py`."""
    return torch.from_numpy(linear_biases.alibi_slopes(heads, maximum))
