"""Floating-point numbers as arrays. numpy has no bfloat16, so its bits are stored as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def to_float32(values: NDArray[Any]) -> Floats:
    """Return float32 from a checkpoint's numbers: float32, float16, or uint16 for bfloat16.

    float64 beyond float32's range becomes infinity, as torch has it.
    """
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, np.float32)


def to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 numbers, ties to even."""
    if values.dtype == np.uint16:
        return values
    bits = to_float32(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)
