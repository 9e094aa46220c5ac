"""Sparse attention over blocks of tokens that an index chooses by their best token, in plain torch.

The cache has index keys in layers of their own, behind those of K and V. As long as no context
exceeds the tokens of all blocks that may be chosen, this is plain attention. In other steps index
keys are scored as `reference_groups.py` says; then each KV head of a token gathers the K and V of
its blocks, and so many tokens at a time attend in one batched operation.
"""

from __future__ import annotations

import torch

from tgi_trio.shard.torch_backend.attention.indexed.reference_groups import (
    ScoredGroup,
    group_tokens,
)
from tgi_trio.shard.torch_backend.attention.indexed.reference_tokens import (
    IndexedAttention,
    IndexedBatch,
)
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference import scores_to_values
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.attention.block_index import BlockIndex, score_blocks
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.index import choose_best
from tgi_trio.shard.torch_backend.layers.attention.rotary import RotaryTable

_GATHERED = 1 << 16  # keys gathered at a time, each of one KV head


class BlocksAttention(IndexedAttention):
    """Plain torch."""

    def attend_blocks(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        steps: HeadSteps,
        index: BlockIndex,
        table: RotaryTable | None,
        batch: IndexedBatch,
    ) -> torch.Tensor:
        qkv, index_queries, index_key = index.split(projected)
        key = index.keys(index_key, steps.rotary, table)
        batch.cache.write(index.number, batch.slots, key, key[..., :0], layer.kv_scales)
        most = index.spec.most * index.spec.size
        if int(batch.plan.context_lengths.max()) <= most:
            return self.attend_projected(layer, qkv, steps, table, batch)
        query, key, value = steps.split(qkv, table)
        batch.cache.write(layer.index, batch.slots, key, value, layer.kv_scales)
        queries = index.queries(index_queries, steps.rotary, table)
        if not batch.groups:
            device, size = query.device, index.spec.size
            batch.groups += group_tokens(batch.plan, index.heads, most, device, unit=size)
        out = query.new_empty(len(query), layer.heads, value.shape[-1])
        for group in batch.groups:
            slots, hidden = _choose(layer, index, queries, batch, group)
            size = max(1, _GATHERED // slots[0].numel())
            for first in range(0, len(slots), size):
                some = slice(first, first + size)
                tokens = group.tokens[some]
                out[tokens] = _attend(layer, query[tokens], batch.cache, slots[some], hidden[some])
        return out.flatten(1)


def _choose(
    layer: AttentionLayer,
    index: BlockIndex,
    queries: torch.Tensor,
    batch: IndexedBatch,
    group: ScoredGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each KV head of a group's tokens reads, [tokens, kv_heads, most]: slots, int64,
    and which of them are hidden, bool, because they are of later tokens.
    """
    cache, spec = batch.cache, index.spec
    keys = cache.key_slots[index.number][:, 0].index_select(0, group.places.flatten())
    keys = cache.decode(keys, layer.kv_scales[0], torch.float32).float()
    keys = keys.view(*group.places.shape, spec.dim)
    # of one row, keys are one matrix for all queries
    by_row = keys[0].T if len(keys) == 1 else keys.transpose(1, 2)
    scores = torch.matmul(queries.index_select(0, group.tokens), by_row)
    best = score_blocks(scores, group.reach, spec)
    blocks = choose_best(best.flatten(0, 1), spec.most)
    inside = torch.arange(spec.size, device=blocks.device)
    positions = (blocks[..., None] * spec.size + inside).view(*best.shape[:2], -1)
    hidden = positions > group.reach[..., None]
    rows = group.places.expand(len(positions), -1)
    slots = rows.gather(1, positions.flatten(1)).view_as(positions)
    # Hidden places have weight zero, but NaN times zero is NaN: use the token's own slot there.
    own = batch.slots.index_select(0, group.tokens)[:, None, None]
    return torch.where(hidden, own, slots), hidden


def _attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    cache: KVCache,
    slots: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Return attention [N, heads, value width] of `query` [N, heads, head_dim].

    `slots`, `hidden`: as `_choose` returns them, of these tokens.
    """
    count, kv_heads, _ = slots.shape
    places = slots * kv_heads + torch.arange(kv_heads, device=slots.device)[:, None]
    key, value = (
        cache.decode(of[layer.index].flatten(0, 1)[places], scale, query.dtype)
        for of, scale in zip((cache.key_slots, cache.value_slots), layer.kv_scales, strict=True)
    )
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill_(hidden, float("-inf"))[:, :, None]
    sinks = None if layer.sinks is None else layer.sinks.view(1, kv_heads, -1, 1)
    grouped = query.view(count, kv_heads, -1, layer.head_dim)
    out = scores_to_values(layer, grouped, key, value, mask, sinks=sinks)
    return out.reshape(count, layer.heads, -1)
