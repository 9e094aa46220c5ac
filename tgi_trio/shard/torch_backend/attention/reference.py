"""Paged attention in plain torch: exact on any device, the measure of the other backends.

Decoding rows are put into buckets of similar context; a bucket is one padded call. A row that is
alone in its bucket reads the cache through a view when its blocks are consecutive. Prefill rows go
one by one, their queries cut into tiles so that no mask grows with the square of a prompt.
Query heads that share a KV head become query rows of it, which needs no copy of K and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import AttentionBackend, AttentionLayer
from tgi_trio.shard.torch_backend.kv_cache import BLOCK_SIZE, KVCache
from tgi_trio.shard.torch_backend.layers.activation import soft_cap

Positions = TypeVar("Positions", np.int64, NDArray[np.int64])

_TILE = 256  # queries whose mask is made at a time
_WASTE = 2  # a bucket's longest context is at most this many times its shortest
_LONG = 4096  # a longer context is worth a call of its own rather than a padded copy
_BUCKET_TOKENS = 1 << 16  # padded KV tokens gathered at a time


class _Reach(NamedTuple):
    """How far the queries of a layer see, as `AttentionLayer` says."""

    window: int
    chunk: int
    ahead: bool

    def first(self, positions: Positions) -> Positions:
        """Return the first position that each of `positions` sees."""
        first = positions * 0
        if self.window:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk:
            first = np.maximum(first, positions - positions % self.chunk)
        return first


@dataclass(slots=True)
class _Bucket:
    """Decoding rows of one padded call: `tokens` [B] are their places in the flat list."""

    tokens: torch.Tensor
    table: torch.Tensor  # int64 [B * width] block ids
    beyond: torch.Tensor  # int64: gathered keys behind the rows' own, as places in B * keys
    rows: int
    starts: NDArray[np.int64]  # [B] position of each row's first gathered token
    firsts: NDArray[np.int64]  # [B] the first position that each row sees
    contexts: NDArray[np.int64]  # [B]
    width: int  # blocks per row
    masks: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def positions(self) -> NDArray[np.int64]:
        """[B, width * BLOCK_SIZE] position of every gathered key."""
        return self.starts[:, None] + np.arange(self.width * BLOCK_SIZE)

    def mask(self, like: torch.Tensor) -> torch.Tensor:
        """Return the additive mask [B, 1, 1, keys], made at the first layer that asks."""
        if like.dtype not in self.masks:
            keys = self.positions()
            hidden = (keys >= self.contexts[:, None]) | (keys < self.firsts[:, None])
            mask = torch.zeros(hidden.shape, dtype=like.dtype)
            mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
            self.masks[like.dtype] = mask[:, None, None].to(like.device)
        return self.masks[like.dtype]


@dataclass(slots=True)
class _Row:
    """One row that is computed alone: a prefill chunk, or a decode with no like."""

    start: int  # first token in the flat list
    stop: int
    context: int
    first_block: int  # >= 0: the row's blocks follow each other from here
    table: torch.Tensor | None  # int64 [blocks] otherwise
    lasts: NDArray[np.int64] | None  # [Q] the last position each query sees; None: its own


@dataclass(slots=True)
class ReferenceBatch:
    """A plan, prepared."""

    cache: KVCache
    plan: StepPlan
    slots: torch.Tensor  # int64 [T]
    by_reach: dict[_Reach, tuple[list[_Bucket], list[_Row]]] = field(default_factory=dict)


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
        reach = _Reach(layer.window, layer.chunk, layer.ahead)
        if reach not in batch.by_reach:
            batch.by_reach[reach] = _arrange(batch.plan, reach, query.device)
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


def _arrange(
    plan: StepPlan, reach: _Reach, device: torch.device
) -> tuple[list[_Bucket], list[_Row]]:
    """Split the plan's rows into buckets of decodes and rows to compute alone."""
    counts = np.diff(plan.query_starts)
    rows = [_row(plan, i, reach, device) for i in np.flatnonzero(counts > 1).tolist()]
    buckets: list[_Bucket] = []
    decodes = np.flatnonzero(counts == 1)
    contexts = plan.context_lengths.astype(np.int64)
    seen = contexts - reach.first(contexts - 1)
    for group in _groups(decodes, seen):
        if len(group) == 1:
            rows.append(_row(plan, int(group[0]), reach, device))
        else:
            buckets.append(_bucket(plan, group, contexts[group], seen[group], device))
    return buckets, rows


def _groups(rows: NDArray[np.int64], seen: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield groups of decoding rows whose padded contexts waste little.

    Where one group holds them all it keeps their order: `attend` counts on that.
    """
    if len(rows) == 0:
        return
    lengths = seen[rows]
    longest = int(lengths.max())
    if (
        longest <= min(_LONG, _WASTE * int(lengths.min()) + 2 * BLOCK_SIZE)
        and longest * len(rows) <= _BUCKET_TOKENS
    ):
        yield rows
        return
    rows = rows[np.argsort(-lengths, kind="stable")]
    begin = 0
    while begin < len(rows):
        top = int(seen[rows[begin]])
        end = begin + 1
        while (
            end < len(rows)
            and top <= min(_LONG, _WASTE * int(seen[rows[end]]) + 2 * BLOCK_SIZE)
            and top * (end - begin + 1) <= _BUCKET_TOKENS
        ):
            end += 1
        yield rows[begin:end]
        begin = end


def _bucket(
    plan: StepPlan,
    group: NDArray[np.int64],
    contexts: NDArray[np.int64],
    seen: NDArray[np.int64],
    device: torch.device,
) -> _Bucket:
    first = (contexts - seen) // BLOCK_SIZE  # a window leaves the blocks before it unread
    width = int((-(-contexts // BLOCK_SIZE) - first).max())
    columns = np.minimum(first[:, None] + np.arange(width), plan.block_tables.shape[1] - 1)
    table = plan.block_tables[group[:, None], columns].astype(np.int64)
    tokens = plan.query_starts[group].astype(np.int64)
    beyond = first[:, None] * BLOCK_SIZE + np.arange(width * BLOCK_SIZE) >= contexts[:, None]
    return _Bucket(
        tokens=torch.from_numpy(tokens).to(device),
        table=torch.from_numpy(table.reshape(-1)).to(device),
        beyond=torch.from_numpy(np.flatnonzero(beyond)).to(device),
        rows=len(group),
        starts=first * BLOCK_SIZE,
        firsts=contexts - seen,
        contexts=contexts,
        width=width,
    )


def _row(plan: StepPlan, index: int, reach: _Reach, device: torch.device) -> _Row:
    context = int(plan.context_lengths[index])
    count = -(-context // BLOCK_SIZE)
    blocks = plan.block_tables[index, :count].astype(np.int64)
    first = int(blocks[0])
    consecutive = int(blocks[-1]) - first == count - 1 and bool((np.diff(blocks) == 1).all())
    return _Row(
        start=int(plan.query_starts[index]),
        stop=int(plan.query_starts[index + 1]),
        context=context,
        first_block=first if consecutive else -1,
        table=None if consecutive else torch.from_numpy(blocks).to(device),
        lasts=_lasts(plan, index) if reach.ahead else None,
    )


def _lasts(plan: StepPlan, index: int) -> NDArray[np.int64] | None:
    """Return the last position that each of a row's queries sees; None: all see up to their own."""
    if plan.visible is None:
        return None
    own = slice(int(plan.query_starts[index]), int(plan.query_starts[index + 1]))
    lasts = plan.visible[own]
    return None if (lasts == plan.positions[own]).all() else lasts


def _attend_bucket(
    layer: AttentionLayer, query: torch.Tensor, cache: KVCache, bucket: _Bucket
) -> torch.Tensor:
    """Return [B, heads, width of values] for one query per row."""
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
    # A block's last owner may have left NaN, which a mask does not hide: NaN times zero is NaN.
    key, value = (of.index_fill_(0, bucket.beyond, 0.0).unflatten(0, by_row) for of in (key, value))
    grouped = query.view(rows, layer.kv_heads, -1, layer.head_dim)
    mask = bucket.mask(query)
    if layer.slopes is not None:
        positions = torch.from_numpy(bucket.positions()).to(query.device)
        slopes = layer.slopes.view(1, layer.kv_heads, -1, 1)
        mask = mask + (slopes * positions[:, None, None]).to(mask.dtype)
    sinks = None if layer.sinks is None else layer.sinks.view(1, layer.kv_heads, -1, 1)
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    out = _scores_to_values(layer, grouped, key, value, mask, sinks=sinks)
    return out.reshape(rows, layer.heads, -1)


def _attend_row(
    layer: AttentionLayer,
    query: torch.Tensor,
    new_key: torch.Tensor,
    new_value: torch.Tensor,
    cache: KVCache,
    row: _Row,
) -> torch.Tensor:
    """Return [Q, heads, width of values] for the Q query tokens of one row."""
    count = query.shape[0]
    if (
        count == row.context and not layer.reads_only
    ):  # the whole sequence is in hand: nothing to fetch
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
    slots: list[torch.Tensor], blocks: list[torch.Tensor], index: int, row: _Row
) -> torch.Tensor:
    """Return [context, kv_heads, head_dim]: a view where the blocks allow it."""
    if row.table is None:
        return slots[index].narrow(0, row.first_block * BLOCK_SIZE, row.context)
    return blocks[index].index_select(0, row.table).flatten(0, 1)[: row.context]


def _tiles(layer: AttentionLayer, count: int, row: _Row) -> list[tuple[int, int, bool]]:
    """Return (first query, end, plainly causal) of every tile."""
    masked = layer.slopes is not None or row.lasts is not None
    masked |= 0 < layer.window < row.context or 0 < layer.chunk < row.context
    own = bool(layer.soft_cap) or layer.sinks is not None  # a softmax that torch has no kernel of
    if count == row.context and not masked and not own:
        return [(0, count, True)]
    return [(begin, min(begin + _TILE, count), False) for begin in range(0, count, _TILE)]


def _attend_tile(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: _Row,
    begin: int,
    end: int,
    causal: bool,
) -> torch.Tensor:
    """Return [end - begin, heads, width of values]."""
    count, kv_heads = end - begin, layer.kv_heads
    first = row.context - query.shape[0] + begin  # position of the tile's first query
    lasts = None if row.lasts is None else row.lasts[begin:end]
    reach = _Reach(layer.window, layer.chunk, layer.ahead)
    low = int(reach.first(np.int64(first)))
    high = row.context if causal else first + count
    if lasts is not None:
        high = int(lasts.max()) + 1
    key, value = key[low:high].transpose(0, 1), value[low:high].transpose(0, 1)
    part = query[begin:end].view(count, kv_heads, -1, layer.head_dim)
    mask = None if causal else _tile_mask(layer, first, count, low, high, lasts, query)
    if count == 1:  # one query: its heads are rows over their KV head, and nothing is hidden
        sinks = None if layer.sinks is None else layer.sinks.view(1, layer.kv_heads, -1, 1)
        out = _scores_to_values(layer, part, key[None], value[None], mask, sinks=sinks)
        return out.reshape(1, layer.heads, -1)
    # [kv_heads, group, queries, dim]; K and V repeat over the group without being copied
    part = part.permute(1, 2, 0, 3)
    group = part.shape[1]
    key = key[:, None].expand(-1, group, -1, -1)
    value = value[:, None].expand(-1, group, -1, -1)
    sinks = None if layer.sinks is None else layer.sinks.view(layer.kv_heads, -1, 1, 1)
    out = _scores_to_values(layer, part, key, value, mask, causal, sinks)
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
    """Return an additive mask, or None when the tile hides nothing."""
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


def _scores_to_values(
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax(scale * Q K^T + mask) V over 4-dimensional operands.

    `sinks` broadcasts to one more score for each query, which has no value.
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
