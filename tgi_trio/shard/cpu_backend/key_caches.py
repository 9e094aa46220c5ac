"""The KV cache of a program: K and V of each layer, and the keys of indexes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.model.specs.decoder import DecoderSpec, HeadSizes, LayerSpec
from tgi_trio.shard.cpu_backend.arena import address, allocate_zeroed
from tgi_trio.shard.cpu_backend.operations.choosers import index_dim
from tgi_trio.shard.cpu_backend.operations.padded_heads import kept_sizes
from tgi_trio.shard.cpu_backend.tables import OF_INDEX_KEYS, OF_KEYS, Code

Array = NDArray[Any]

_OF_TURNS = (Code.ASK_POOLED, Code.POOL_KEYS)
_TURN_BYTES = 3 * 4  # of a token


class KeyCaches:
    """The cache of a model's layers, each of which has memory of its own.

    `kept`: K and V of each layer that has its own; `index_keys`: of each layer with an index of its
    own; `turns`: int32 [slots, 3], rotary positions, if pooled keys turn by them.
    """

    def __init__(self, spec: DecoderSpec, number: np.dtype[Any]) -> None:
        """Allocate nothing. `number`: what K and V are stored as."""
        self.kept: list[tuple[Array, Array]] = []
        self.index_keys: list[Array] = []
        self.turns = allocate_zeroed((0,))
        self._spec = spec
        self._keeps_turns = any(layer.pooled is not None for layer in spec.layers)
        self._number = number

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        numbers = sum(own.kv_heads * (own.dim + own.value_dim) for own in self.sizes)
        numbers += sum(index_dim(self._spec, layer) for layer in self._spec.layers)
        return numbers * self._number.itemsize + (_TURN_BYTES if self._keeps_turns else 0)

    @property
    def sizes(self) -> list[HeadSizes]:
        """The heads of layers that have their own K and V."""
        layers = (layer for layer in self._spec.layers if layer.attends)
        return [kept_sizes(self._spec, layer) for layer in layers if layer.reads_layer is None]

    def allocate(self, operations: NDArray[np.void], firsts: Sequence[int], blocks: int) -> int:
        """Allocate a new, empty cache for a program's operations; return its bytes.

        `firsts`: the first operation of each layer, and of what follows the last one.
        """
        self.kept, self.index_keys = [], []  # freed before: both may not fit
        self.turns = allocate_zeroed((blocks if self._keeps_turns else 0, BLOCK_SIZE * _TURN_BYTES))
        caches: dict[int, tuple[Array, Array]] = {}  # by layer number
        for index, layer, own in self._attending(operations, firsts):
            kept_by = index if layer.reads_layer is None else layer.reads_layer
            if kept_by == index:
                caches[index] = self._allocate_layer(blocks, kept_sizes(self._spec, layer))
            reading = np.isin(own["code"], OF_KEYS)
            for column, cache in zip(("keys", "values"), caches[kept_by], strict=True):
                own[column][reading] = address(cache)
            if dim := index_dim(self._spec, layer):
                keys = allocate_zeroed((blocks, BLOCK_SIZE * dim), self._number)
                own["keys"][np.isin(own["code"], OF_INDEX_KEYS)] = address(keys)
                own["values"][np.isin(own["code"], _OF_TURNS)] = address(self.turns)
                self.index_keys.append(keys)
        self.kept = list(caches.values())
        return sum(cache.nbytes for cache in self.arrays)

    @property
    def arrays(self) -> list[Array]:
        """Everything that is kept, each [blocks, ...]."""
        own = [*sum(self.kept, ()), *self.index_keys]
        return [*own, self.turns] if self.turns.size else own

    def _attending(
        self, operations: NDArray[np.void], firsts: Sequence[int]
    ) -> Iterator[tuple[int, LayerSpec, NDArray[np.void]]]:
        """Yield each layer that attends: its number, itself, a view of its operations."""
        for index, layer in enumerate(self._spec.layers):
            if layer.attends:
                yield index, layer, operations[firsts[index] : firsts[index + 1]]

    def _allocate_layer(self, blocks: int, own: HeadSizes) -> tuple[Array, Array]:
        """Return a layer's empty K and V."""
        keys, values = (
            allocate_zeroed((blocks, own.kv_heads, BLOCK_SIZE * dim), self._number)
            for dim in (own.dim, own.value_dim)
        )
        return keys, values
