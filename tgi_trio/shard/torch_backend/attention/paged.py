"""Attention on a GPU through our own Triton kernel, which reads K and V where they lie.

Any dtype, any head size, windows, soft caps and linear biases. What a step changes is a handful of
small tensors, so a step of decodes can be recorded as a CUDA graph
(see `shard/torch_backend/decode_graphs.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged_kernel import attend_tile
from tgi_trio.shard.torch_backend.kv_cache import BLOCK_SIZE, KVCache

_LEAST_LANES = 16  # the smallest matrix that tensor cores multiply
_PREFILL_LANES = 64
_TILE_ELEMENTS = 8192  # of the keys looked at together: more would not fit the registers


@dataclass(slots=True)
class PagedBatch:
    """A plan, on the device."""

    cache: KVCache
    slots: torch.Tensor  # int64 [T] where new K and V go
    tables: torch.Tensor  # int32 [R, width]
    contexts: torch.Tensor  # int32 [R]
    query_starts: torch.Tensor  # int32 [R + 1]
    counts: NDArray[np.int32]  # [R] queries per row
    tiles: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def tiles_of(self, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (row, first query) of every tile of `queries` queries, int32 each; made once."""
        if queries not in self.tiles:
            rows, starts = split_queries(self.counts, queries)
            device = self.slots.device
            self.tiles[queries] = (
                torch.from_numpy(rows).to(device),
                torch.from_numpy(starts).to(device),
            )
        return self.tiles[queries]


def split_queries(
    counts: NDArray[np.int32], queries: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return int32 (row, first query within the row) of tiles of at most `queries` queries."""
    tiles = -(-counts // queries)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), tiles)
    first = np.cumsum(tiles) - tiles
    starts = (np.arange(len(rows)) - np.repeat(first, tiles)) * queries
    return rows, starts.astype(np.int32)


class PagedAttention:
    """See CapturableAttention."""

    name = "triton"

    def prepare(self, plan: StepPlan, cache: KVCache) -> PagedBatch:
        device = cache.key.device
        return PagedBatch(
            cache=cache,
            slots=torch.from_numpy(plan.kv_slots).to(device),
            tables=torch.from_numpy(plan.block_tables).to(device),
            contexts=torch.from_numpy(plan.context_lengths).to(device),
            query_starts=torch.from_numpy(plan.query_starts).to(device),
            counts=np.diff(plan.query_starts),
        )

    def refill(self, batch: PagedBatch, plan: StepPlan) -> None:
        """See CapturableAttention."""
        width = plan.block_tables.shape[1]
        batch.slots.copy_(torch.from_numpy(plan.kv_slots))
        batch.tables[:, :width].copy_(torch.from_numpy(plan.block_tables))
        batch.contexts.copy_(torch.from_numpy(plan.context_lengths))

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        keys = batch.cache.key_slots[layer.index]
        values = batch.cache.value_slots[layer.index]
        keys.index_copy_(0, batch.slots, key)
        values.index_copy_(0, batch.slots, value)
        group = layer.heads // layer.kv_heads
        decodes = len(batch.counts) == len(query)
        lanes = max(_LEAST_LANES if decodes else _PREFILL_LANES, _power_of_two(group))
        rows, starts = batch.tiles_of(lanes // group)
        padded = max(16, _power_of_two(layer.head_dim))
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attend_tile[(len(rows), layer.kv_heads)](
            out,
            query,
            keys,
            values,
            batch.tables,
            batch.contexts,
            batch.query_starts,
            rows,
            starts,
            batch.contexts if layer.slopes is None else layer.slopes,
            layer.scale,
            layer.soft_cap,
            query.stride(0),
            query.stride(1),
            batch.tables.stride(0),
            KV_HEADS=layer.kv_heads,
            GROUP=group,
            DIM=layer.head_dim,
            PADDED_DIM=padded,
            PAGE=BLOCK_SIZE,
            LANES=lanes,
            KEYS=max(16, min(64, _TILE_ELEMENTS // padded)),
            WINDOW=layer.window,
            SOFT_CAP=layer.soft_cap > 0,
            ALIBI=layer.slopes is not None,
        )
        return out.view(len(query), -1)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
