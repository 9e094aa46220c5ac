"""Numbers of self-tests: drawn so that bfloat16 holds them, stored and read in either format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.checkpoint.numbers import Floats, to_bfloat16, to_float32
from tgi_trio.shard.cpu_backend.variant import Variant


def draw(*shape: int) -> Floats:
    """Return normal numbers of deviation 0.5, the same for a shape at each start."""
    values = np.random.default_rng(shape).standard_normal(shape, np.float32) * np.float32(0.5)
    return to_float32(to_bfloat16(values))


def number_type(half: bool) -> type[np.generic]:
    """Return the type of stored numbers; `half`: they are bfloat16."""
    return np.uint16 if half else np.float32


def to_floats(values: Any) -> Floats:
    """Return numbers as float32, whether stored as float32 or as bfloat16."""
    return np.asarray(to_float32(values), np.float32)


def pack_keys(variant: Variant, keys: Floats) -> NDArray[Any]:
    """Return keys [..., 16, size] as K has them in panels, [..., size / step, 16, step]."""
    parts = keys.reshape(*keys.shape[:-1], -1, variant.kv.step).swapaxes(-2, -3)
    parts = np.ascontiguousarray(parts)
    return to_bfloat16(parts) if variant.kv.bf16 else parts
