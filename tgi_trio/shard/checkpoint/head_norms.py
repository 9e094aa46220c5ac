"""Reads the weights of norms of heads that each have their own."""

from __future__ import annotations

import numpy as np

from tgi_trio.model.matrices.references import NormRef
from tgi_trio.shard.checkpoint.lookup import Weights
from tgi_trio.shard.checkpoint.numbers import Floats


def read_head_norms(source: Weights, ref: NormRef, mine: slice) -> Floats:
    """Return the weights of the heads `mine`, float32 [heads, size].

    Raises ModelLoadError for a tensor that is missing or misshapen.
    """
    tensors = list(ref.tensors())
    if "{}" not in ref.weight:
        ((name, shape),) = tensors
        return source.array(name, shape)[mine]
    return np.stack([source.vector(name, ref.size) for name, _ in tensors[mine]])
