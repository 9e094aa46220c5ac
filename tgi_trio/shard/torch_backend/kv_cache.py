"""The tensors that hold K and V, in blocks that block tables point into."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tgi_trio.shard.contract import BLOCK_SIZE as BLOCK_SIZE

NULL_BLOCK = 0  # never handed out: unused entries of block tables point here


class KVShape(NamedTuple):
    """What the KV cache of a model holds per token, as this rank has it."""

    layers: int
    kv_heads: int
    head_dim: int
    same: bool = False  # a value is its key (attention over latents), and kept once

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of K and V of one token over all layers."""
        kept = 1 if self.same else 2
        return kept * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


class KVCache:
    """K and V of all layers: two tensors [layers, blocks, BLOCK_SIZE, kv_heads, head_dim].

    The layout flash-attention wants of a paged cache. Freshly zeroed memory, never garbage: what a
    mask hides is still multiplied by zero, and zero times NaN is NaN. On Linux zeroed pages take no
    memory until they are written.
    """

    def __init__(
        self, shape: KVShape, blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate; raises torch's out-of-memory errors."""
        layers, kv_heads, head_dim, same = shape
        size = (layers, blocks, BLOCK_SIZE, kv_heads, head_dim)
        self.blocks = blocks
        self.key = torch.zeros(size, dtype=dtype, device=device)
        self.value = self.key if same else torch.zeros(size, dtype=dtype, device=device)
        # Per layer, by slot and by block: views made once, since a view costs a microsecond.
        flat = (blocks * BLOCK_SIZE, kv_heads, head_dim)
        self.key_slots = [self.key[i].view(flat) for i in range(layers)]
        self.value_slots = [self.value[i].view(flat) for i in range(layers)]
        self.key_blocks = list(self.key.unbind(0))
        self.value_blocks = list(self.value.unbind(0))

    @property
    def nbytes(self) -> int:
        return self.key.nbytes + (0 if self.value is self.key else self.value.nbytes)
