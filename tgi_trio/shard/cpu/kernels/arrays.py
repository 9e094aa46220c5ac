"""Arrays at an address, for kernels that go about single numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from tgi_trio.shard.cpu.kernels import kernel
from tgi_trio.shard.cpu.kernels.emit import FLOAT, I32, I64, address, at, operation


@operation(types.voidptr, address)
def _pointer(builder: Any, where: Any) -> Any:
    return at(builder, where)


@operation(types.int64, types.float32)
def bits_of(builder: Any, value: Any) -> Any:
    """Return the bits of a float32 as a whole number; order is kept where it is not negative."""
    return builder.zext(builder.bitcast(value, I32), I64)


@operation(types.float32, types.int64)
def float_of(builder: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""
    return builder.bitcast(builder.trunc(bits, I32), FLOAT)


@kernel
def floats_at(where, size):
    """Return float32 [size]."""
    return carray(_pointer(where), (size,), np.float32)


@kernel
def doubles_at(where, size):
    """Return float64 [size]."""
    return carray(_pointer(where), (size,), np.float64)


@kernel
def ints_at(where, size):
    """Return int64 [size]."""
    return carray(_pointer(where), (size,), np.int64)
