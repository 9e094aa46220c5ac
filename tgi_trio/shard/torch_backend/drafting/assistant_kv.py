"""The model's keys and values, as an assistant of Gemma 4 reads them: of some layers, all heads.

Where ranks divide the heads, rank 0 keeps the few layers' K and V of all ranks in a cache of its
own, in blocks of the same numbers; each step's are gathered when it has been computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape, KVSize
from tgi_trio.shard.torch_backend.models.decoder import Decoder, Ranks


class AssistantKv:
    """One rank's part in this; every rank has one."""

    def __init__(
        self,
        model: Decoder,
        sources: Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks | None,
    ) -> None:
        """`sources`: layers of the model that are read; `dtype`: of the model's K and V."""
        self._dtype = dtype
        self._device = device
        self._ranks = ranks
        own: dict[int, AttentionLayer] = {}
        for number in sorted(set(sources)):
            attention = model.layers[number].attention
            if attention is None:
                raise ValueError(f"layer {number} does not attend")
            own[number] = attention.shape
        self._own = list(own.values())  # this rank's heads, in the model's cache
        self.places = own  # where K and V are read, by layer of the model
        self.shape = model.kv_shape  # of the cache that is read
        self.cache: KVCache | None = None  # it; set by make_room
        self._model_cache: KVCache | None = None
        if ranks is None:
            return
        heads = [model.spec.sizes(model.spec.layers[number]).kv_heads for number in own]
        self.places = {
            number: replace(shape, index=i, kv_heads=heads[i])
            for i, (number, shape) in enumerate(own.items())
        }
        self.shape = KVShape.of(
            [KVSize(s.kv_heads, s.head_dim, s.head_dim) for s in self.places.values()]
        )

    @property
    def has_eight_bits(self) -> bool:
        """Whether K and V are of 8 bits."""
        return self._dtype.itemsize == 1

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes that a token takes on this rank beside those in the model's cache."""
        if self._ranks is None or self._ranks.rank:
            return 0
        return self.shape.bytes_per_token(self._dtype)

    @property
    def caches(self) -> Sequence[torch.Tensor]:
        """What is kept of tokens beside the model's cache, each [blocks * BLOCK_SIZE, ...]."""
        return () if self.cache is None or self.cache is self._model_cache else self.cache.tensors

    def make_room(self, cache: KVCache) -> int:
        """Take the model's cache; return the bytes of another one beside it."""
        self.cache = None  # before the new one: both may not fit
        self._model_cache = cache
        if self._ranks is None:
            self.cache = cache
        elif self._ranks.rank == 0:
            self.cache = KVCache(self.shape, cache.blocks, self._dtype, self._device)
            return self.cache.nbytes
        return 0

    def keep(self, plan: StepPlan) -> None:
        """Gather a step's K and V, which the model has written to its cache, on rank 0."""
        ranks, source = self._ranks, self._model_cache
        if ranks is None or source is None:
            return
        slots = torch.from_numpy(plan.kv_slots).to(self._device)
        for own, whole in zip(self._own, self.places.values(), strict=True):
            for part in ("key_slots", "value_slots"):
                new = getattr(source, part)[own.index].index_select(0, slots)
                heads = ranks.all_gather(new.flatten(1)).unflatten(-1, (-1, own.head_dim))
                if self.cache is not None:
                    # Neighbouring ranks have the same head, where there are fewer heads than ranks.
                    once = heads[:, :: heads.shape[1] // whole.kv_heads]
                    getattr(self.cache, part)[whole.index].index_copy_(0, slots, once)
