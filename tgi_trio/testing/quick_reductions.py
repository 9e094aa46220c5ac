"""Computes sums and extremes of Triton's interpreter at once, after it has shown how.

They are functions of Triton's own language, which were interpreted; see `quick_operations.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tgi_trio.testing.quick_memory import Memory

REDUCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "sum": np.add.reduce,
    "max": np.fmax.reduce,
    "min": np.fmin.reduce,
}
_REDUCED: Final = frozenset(("int32", "int64", "fp32", "fp64"))  # what is narrower is widened


def quicken_reduction(memory: Memory, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a sum or an extreme over one dimension, which is numpy's where nothing is widened."""
    known, tensor, constant = memory.known, memory.tensor, memory.constant
    compute, unknown = REDUCTIONS[name], object()

    def call(x: Any, axis: Any = None, *rest: Any, **options: Any) -> Any:
        if type(axis) is constant:
            axis = axis.value
        keep = options.get("keep_dims", False)
        if type(keep) is constant:
            keep = keep.value
        ours = type(x) is tensor and x.dtype.name in _REDUCED and type(axis) is int
        if not ours or rest or options.keys() - {"keep_dims"}:
            return plain(x, axis, *rest, **options)
        key = (name, x.type.name, axis, bool(keep))
        kind: Any = known.get(key, unknown)
        if kind is None:
            return plain(x, axis, **options)
        data = x.handle.data
        lone = keep or data.ndim == 1  # a single number is an array of one as well
        if kind is unknown:
            told = plain(x, axis, **options)
            return memory.learn(key, told, lambda: compute(data, axis=axis, keepdims=lone))
        found = compute(data, axis=axis, keepdims=lone)
        return (
            memory.result(found, kind) if found.shape == kind.sizes else plain(x, axis, **options)
        )

    return call
