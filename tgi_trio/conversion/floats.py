"""Converts numbers of a checkpoint to float32 and back; numpy has no bfloat16."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

WIDENED: Final = ("F32", "F16", "BF16", "F64")
RAW: Final = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16, "F64": np.uint64}
_QUIET_NAN: Final = np.uint16(0x7FC0)


def widen(raw: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return numbers as float32, from unsigned integers of their size, `RAW`.

    float64 beyond float32's range becomes infinity.
    """
    if dtype == "F64":
        with np.errstate(over="ignore"):
            return raw.view(np.float64).astype(np.float32)
    if dtype == "F32":
        return raw.view(np.float32)
    if dtype == "F16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return float32 converted to another dtype, rounded to nearest, ties to even."""
    if dtype == "F32":
        return values
    if dtype == "F64":
        return values.astype(np.float64)
    if dtype == "F16":
        with np.errstate(over="ignore"):  # overflow becomes infinity, which the caller detects
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _QUIET_NAN, rounded)
