"""What drafters in torch share that have K and V of their own: their cache, rows of states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape


class OwnKv:
    """A drafter with a paged KV cache of its own, whose blocks are numbered as the model's."""

    def __init__(self, shape: KVShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._cache: KVCache | None = None  # set by make_room

    @property
    def kv_bytes_per_token(self) -> int:
        return self._shape.bytes_per_token(self._dtype)

    def make_room(self, blocks: int) -> int:
        """Allocate a cache with as many blocks as the model's; return its bytes."""
        self._cache = None  # before the new one: both may not fit
        self._cache = KVCache(self._shape, blocks, self._dtype, self._device)
        return self._cache.nbytes

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        """Everything that it keeps of tokens, each [blocks * BLOCK_SIZE, ...]."""
        return () if self._cache is None else self._cache.tensors

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def pick(self, states: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
        return states.index_select(0, torch.from_numpy(places).to(states.device))
