"""How precisely the kernels of recurrences multiply."""

from __future__ import annotations

import torch


def choose_precision(dtype: torch.dtype) -> str:
    """Return the precision of products of float32 numbers that become numbers of `dtype`.

    Factors that had a half-precision dtype are exact in a single product of tensor cores; numbers
    of float32 take three, which no compiler makes for AMD's devices.
    """
    if torch.version.hip:
        return "ieee"
    return "tf32x3" if dtype is torch.float32 else "tf32"
