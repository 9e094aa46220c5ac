"""How precisely the kernels of recurrences multiply."""

from __future__ import annotations

import torch

from tgi_trio.shard.torch_backend.torch_device import FLOAT32_PRODUCTS


def choose_precision(dtype: torch.dtype) -> str:
    """Return the precision of products of float32 numbers that become numbers of `dtype`.

    Factors that had a half-precision dtype are exact in a single product of tensor cores; numbers
    of float32 take three, which no compiler makes for AMD's devices.
    """
    whole = dtype is torch.float32 or torch.version.hip is not None
    return FLOAT32_PRODUCTS if whole else "tf32"
