"""Paged attention in plain torch: exact on any device, the reference for the other backends.

Decodes are sorted into buckets of similar contexts, each computed by one padded call. A row alone
in its bucket reads the cache through a view if its blocks are consecutive. Prefill rows are
computed one by one, with their queries cut into tiles so that no mask grows with the square of a
prompt. Query heads that share a KV head become query rows, which avoids copying K and V.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend, AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference_rows import Bucket, Reach, Row, arrange
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.activation import soft_cap

_TILE = 256  # queries of a mask


@dataclass(slots=True)
class ReferenceBatch:
    """A plan, prepared."""

    cache: KVCache
    plan: StepPlan
    slots: torch.Tensor  # int64 [T]
    by_reach: dict[Reach, tuple[list[Bucket], list[Row]]] = field(default_factory=dict)


class ReferenceAttention(AttentionBackend):
    """Plain torch; see AttentionBackend."""

    name = "torch"

    def prepare(self, plan: StepPlan, cache: KVCache) -> ReferenceBatch:
        slots = torch.from_numpy(plan.kv_slots).to(cache.key.device)
        return ReferenceBatch(cache, plan, slots)

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: ReferenceBatch,
    ) -> torch.Tensor:
        cache, index = batch.cache, layer.index
        if not layer.reads_only:
            key, value = cache.write(index, batch.slots, key, value, layer.kv_scales)
        reach = Reach(layer.window, layer.chunk, layer.ahead)
        if reach not in batch.by_reach:
            batch.by_reach[reach] = arrange(batch.plan, reach, query.device)
        buckets, rows = batch.by_reach[reach]
        tokens = query.shape[0]
        if len(buckets) + len(rows) == 1:  # all of the plan, in its order: nothing to scatter
            if buckets:
                return _attend_bucket(layer, query, cache, buckets[0]).reshape(tokens, -1)
            return _attend_row(layer, query, key, value, cache, rows[0]).reshape(tokens, -1)
        out = query.new_empty((tokens, layer.heads, cache.value_slots[index].shape[-1]))
        for bucket in buckets:
            part = query.index_select(0, bucket.tokens)
            out.index_copy_(0, bucket.tokens, _attend_bucket(layer, part, cache, bucket))
        for row in rows:
            span = slice(row.start, row.stop)
            out[span] = _attend_row(layer, query[span], key[span], value[span], cache, row)
        return out.reshape(tokens, -1)


def _attend_bucket(
    layer: AttentionLayer, query: torch.Tensor, cache: KVCache, bucket: Bucket
) -> torch.Tensor:
    """Return [B, heads, value width] for one query per row."""
    rows, keys = bucket.rows, bucket.width * BLOCK_SIZE
    by_row = (rows, keys)
    key, value = (
        cache.decode(blocks[layer.index].index_select(0, bucket.table), scale, query.dtype).flatten(
            0, 1
        )
        for blocks, scale in zip(
            (cache.key_blocks, cache.value_blocks), layer.kv_scales, strict=True
        )
    )
    # A block's last owner may have left NaN, which no mask hides: NaN times zero is NaN.
    key, value = (of.index_fill_(0, bucket.beyond, 0.0).unflatten(0, by_row) for of in (key, value))
    grouped = query.view(rows, layer.kv_heads, -1, layer.head_dim)
    mask = bucket.mask(query)
    if layer.slopes is not None:
        positions = torch.from_numpy(bucket.positions()).to(query.device)
        slopes = layer.slopes.view(1, layer.kv_heads, -1, 1)
        mask = mask + (slopes * positions[:, None, None]).to(mask.dtype)
    sinks = None if layer.sinks is None else layer.sinks.view(1, layer.kv_heads, -1, 1)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    out = scores_to_values(layer, grouped, key, value, mask, sinks=sinks)
    return out.reshape(rows, layer.heads, -1)


def _attend_row(
    layer: AttentionLayer,
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    cache: KVCache,
    row: Row,
) -> torch.Tensor:
    """Return [Q, heads, value width] for the Q query tokens of one row."""
    count = query.shape[0]
    if (
        count == row.context and not layer.reads_only
    ):  # all keys are new ones: the cache need not be read
        key, value = new_key, new_value
    else:
        key, value = (
            cache.decode(_fetch(slots, blocks, layer.index, row), scale, query.dtype)
            for slots, blocks, scale in (
                (cache.key_slots, cache.key_blocks, layer.kv_scales[0]),
                (cache.value_slots, cache.value_blocks, layer.kv_scales[1]),
            )
        )
    tiles = _tiles(layer, count, row)
    parts = [_attend_tile(layer, query, key, value, row, *tile) for tile in tiles]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fetch(
    slots: list[torch.Tensor], blocks: list[torch.Tensor], index: int, row: Row
) -> torch.Tensor:
    """Return [context, kv_heads, head_dim]: a view if the blocks are consecutive."""
    if row.table is None:
        return slots[index].narrow(0, row.first_block * BLOCK_SIZE, row.context)
    return blocks[index].index_select(0, row.table).flatten(0, 1)[: row.context]


def _tiles(layer: AttentionLayer, count: int, row: Row) -> list[tuple[int, int, bool]]:
    """Return (first query, end, plain causal mask) of each tile."""
    masked = layer.slopes is not None or row.lasts is not None
    masked |= 0 < layer.window < row.context or 0 < layer.chunk < row.context
    own = bool(layer.soft_cap) or layer.sinks is not None  # a softmax that torch's kernels lack
    if count == row.context and not masked and not own:
        return [(0, count, True)]
    return [(begin, min(begin + _TILE, count), False) for begin in range(0, count, _TILE)]


def _attend_tile(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: Row,
    begin: int,
    end: int,
    causal: bool,
) -> torch.Tensor:
    """Return [end - begin, heads, value width]."""
    count, kv_heads = end - begin, layer.kv_heads
    first = row.context - query.shape[0] + begin  # position of the tile's first query
    lasts = None if row.lasts is None else row.lasts[begin:end]
    reach = Reach(layer.window, layer.chunk, layer.ahead)
    low = int(reach.first(np.int64(first)))
    high = row.context if causal else first + count
    if lasts is not None:
        high = int(lasts.max()) + 1
    key, value = key[low:high].transpose(0, 1), value[low:high].transpose(0, 1)
    part = query[begin:end].view(count, kv_heads, -1, layer.head_dim)
    mask = None if causal else _tile_mask(layer, first, count, low, high, lasts, query)
    if count == 1:  # its heads become query rows of their KV head, and no key is hidden
        sinks = None if layer.sinks is None else layer.sinks.view(1, layer.kv_heads, -1, 1)
        out = scores_to_values(layer, part, key[None], value[None], mask, sinks=sinks)
        return out.reshape(1, layer.heads, -1)
    # [kv_heads, group, queries, dim]; K and V are expanded over the group without a copy
    part = part.permute(1, 2, 0, 3)
    group = part.shape[1]
    key = key[:, None].expand(-1, group, -1, -1)
    value = value[:, None].expand(-1, group, -1, -1)
    sinks = None if layer.sinks is None else layer.sinks.view(layer.kv_heads, -1, 1, 1)
    out = scores_to_values(layer, part, key, value, mask, causal, sinks)
    return out.permute(2, 0, 1, 3).reshape(count, layer.heads, -1)


def _tile_mask(
    layer: AttentionLayer,
    first: int,
    count: int,
    low: int,
    high: int,
    lasts: NDArray[np.int64] | None,
    like: torch.Tensor,
) -> torch.Tensor | None:
    """Return an additive mask, or None if nothing is hidden."""
    mask = None
    keys = torch.arange(low, high, device=like.device)
    if count > 1:
        queries = torch.arange(first, first + count, device=like.device)[:, None]
        seen = queries if lasts is None else torch.from_numpy(lasts).to(like.device)[:, None]
        hidden = keys > seen
        if layer.window:
            hidden |= keys <= queries - layer.window
        if layer.chunk:
            hidden |= keys < queries - queries % layer.chunk
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(hidden, float("-inf"))
    if layer.slopes is not None:
        slopes = layer.slopes.view(layer.kv_heads, -1, 1, 1)
        bias = (slopes * keys).to(like.dtype)  # [kv_heads, group, 1, keys]
        if count == 1:
            return bias.view(1, layer.kv_heads, -1, high - low)
        mask = bias if mask is None else bias + mask
    return mask


def scores_to_values(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax(scale * Q K^T + mask) V over 4-dimensional operands.

    `sinks`: broadcasts to one additional score per query, which has no value.
    """
    if not layer.soft_cap and sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=layer.scale
        )
    scores = torch.matmul(query, key.transpose(-1, -2)) * layer.scale
    if layer.soft_cap:
        scores = soft_cap(scores, layer.soft_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights[..., : key.shape[-2]], value)
