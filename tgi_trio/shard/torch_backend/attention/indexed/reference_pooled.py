"""Sparse attention over blocks of tokens that an index chooses by one key of each, in plain torch.

Index keys are a layer of the cache without values. A token's key lies there as it is projected,
until its block is whole: then the block's own key takes the place of its last token's, so that a
step reads one key for each block. As long as no context has more whole blocks than are chosen, this
is plain attention. In other steps each token gathers the keys and values that it has chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.indexed.reference_groups import (
    ScoredGroup,
    group_tokens,
)
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention, ReferenceBatch
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.index import choose_best
from tgi_trio.shard.torch_backend.layers.attention.pooled_index import PooledIndex, score_pooled
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.opening import open_values

_GATHERED = 1 << 15  # tokens whose keys and values are gathered at a time


@dataclass(slots=True)
class _Ends:
    """The tokens of a step with which a block becomes whole."""

    tokens: torch.Tensor  # int64 [B]
    slots: torch.Tensor  # int64 [B, size]: of the tokens of the block
    turns: torch.Tensor  # int64 [B] or [3, B]: the rotary position of its first token


@dataclass(slots=True)
class PooledBatch(ReferenceBatch):
    """A plan, prepared. The layers of a model have one index spec, so they share all of it."""

    ends: _Ends | None = None  # made by the first layer
    groups: list[ScoredGroup] = field(default_factory=list)  # likewise, where tokens choose


class PooledAttention(ReferenceAttention):
    """Plain torch."""

    def prepare(self, plan: StepPlan, cache: KVCache) -> PooledBatch:
        slots = torch.from_numpy(plan.kv_slots).to(cache.key.device)
        return PooledBatch(cache, plan, slots)

    def attend_pooled(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        index_queries: torch.Tensor,
        steps: HeadSteps,
        index: PooledIndex,
        table: RotaryTable | None,
        batch: PooledBatch,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rotary, spec = steps.rotary, index.spec
        if rotary is None or table is None:
            raise ValueError(f"layer {layer.index} of the cache has an index, and no positions")
        queries, keys = index.queries(index_queries)
        _write_keys(layer, index, keys, rotary, batch)
        query, key, value = steps.split(projected, table)
        if int(batch.plan.context_lengths.max()) // spec.size <= spec.most:
            found = self.attend(layer, query, key, value, batch)
            return found if gates is None else open_values(found, gates)
        batch.cache.write(layer.index, batch.slots, key, value, layer.kv_scales)
        queries = rotary.apply(queries, table.cos, table.sin).float()
        if not batch.groups:
            least, device = spec.most * spec.size, query.device
            batch.groups += group_tokens(batch.plan, spec.heads, least, device, unit=spec.size)
        out = query.new_empty(len(query), layer.heads * value.shape[-1])
        for group in batch.groups:
            slots, hidden = _choose(
                layer, index, queries.index_select(0, group.tokens), group, batch
            )
            part = query.index_select(0, group.tokens)
            out[group.tokens] = _attend_chosen(layer, part, batch.cache, slots, hidden)
        return out if gates is None else open_values(out, gates)


# --- keys -----------------------------------------------------------------------------------------


def _write_keys(
    layer: AttentionLayer,
    index: PooledIndex,
    keys: torch.Tensor,
    rotary: Rotary,
    batch: PooledBatch,
) -> None:
    """Write tokens' index keys [T, 1, dim], and in place of some those of blocks now whole."""
    cache, scales = batch.cache, layer.kv_scales
    nothing = keys.new_empty(len(keys), 1, 0)
    cache.write(index.number, batch.slots, keys, nothing, scales)
    if batch.ends is None:
        batch.ends = _find_ends(batch.plan, index.spec.size, cache)
    ends = batch.ends
    if len(ends.tokens):
        stored = cache.key_slots[index.number][:, 0].index_select(0, ends.slots.flatten())
        stored = cache.decode(stored, scales[0], keys.dtype).view(*ends.slots.shape, -1)
        turn = rotary.table(ends.turns, ends.turns, keys.dtype)
        whole = rotary.apply(index.join(stored), turn.cos, turn.sin)
        # To the slots of this step, which are spare ones where a prefix is only computed again.
        slots = batch.slots.index_select(0, ends.tokens)
        cache.write(index.number, slots, whole, nothing[: len(whole)], scales)


def _find_ends(plan: StepPlan, size: int, cache: KVCache) -> _Ends:
    tokens = np.flatnonzero((plan.positions + 1) % size == 0)
    firsts = plan.positions[tokens] - (size - 1)
    rows = np.searchsorted(plan.query_starts, tokens, side="right") - 1
    places = firsts[:, None] + np.arange(size)
    blocks = plan.block_tables[rows[:, None], places // BLOCK_SIZE].astype(np.int64)
    found: tuple[NDArray[np.int64], ...] = (
        tokens,
        blocks * BLOCK_SIZE + places % BLOCK_SIZE,
        firsts,
    )
    ends = _Ends(*(torch.from_numpy(each).to(cache.key.device) for each in found))
    if cache.turns is not None:
        ends.turns = cache.turns.index_select(0, ends.slots[:, 0]).T.long()
    return ends


# --- choosing -------------------------------------------------------------------------------------


def _choose(
    layer: AttentionLayer,
    index: PooledIndex,
    queries: torch.Tensor,
    group: ScoredGroup,
    batch: PooledBatch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of the tokens to which each of a group attends, int64 [N, most], and which
    of them are none, bool [N, most]. `queries` [N, heads, dim] are float32.
    """
    spec, positions = index.spec, group.reach
    whole = (positions + 1) // spec.size  # of the blocks before each token and with it
    scores = _score(layer, index, queries, group, batch.cache)
    beyond = torch.arange(scores.shape[1], device=scores.device) >= whole
    best = choose_best(scores.masked_fill_(beyond, float("-inf")), spec.most)
    within = torch.arange(spec.size, device=scores.device)
    chosen = (best[:, :, None] * spec.size + within).flatten(1)
    chosen = torch.cat((chosen, whole * spec.size + within[:-1]), dim=1)
    hidden = (best >= whole).repeat_interleave(spec.size, dim=1)
    hidden = torch.cat((hidden, chosen[:, hidden.shape[1] :] > positions), dim=1)
    places = group.places.expand(len(positions), -1)
    slots = places.gather(1, chosen.clamp(max=places.shape[1] - 1))  # hidden ones may be beyond
    # Hidden places have weight zero, but NaN times zero is NaN: use the token's own slot there.
    own = batch.slots.index_select(0, group.tokens)[:, None]
    return torch.where(hidden, own, slots), hidden


def _score(
    layer: AttentionLayer,
    index: PooledIndex,
    queries: torch.Tensor,
    group: ScoredGroup,
    cache: KVCache,
) -> torch.Tensor:
    """Return the scores of a group's blocks, float32 [N, blocks]."""
    size = index.spec.size
    lasts = group.places[:, size - 1 :: size]
    keys = cache.key_slots[index.number][:, 0].index_select(0, lasts.flatten())
    keys = cache.decode(keys, layer.kv_scales[0], torch.float32).float().view(*lasts.shape, -1)
    if len(keys) == 1:  # their queries are rows over one set of keys
        return score_pooled(queries, keys[0])
    return score_pooled(queries[:, None], keys)[:, 0]


def _attend_chosen(
    layer: AttentionLayer,
    query: torch.Tensor,
    cache: KVCache,
    slots: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Return attention [N, heads * value_dim] of queries [N, heads, dim] over `slots` [N, most]."""
    count, most = slots.shape
    size, parts = max(1, _GATHERED // most), []
    both = (cache.key_slots[layer.index], cache.value_slots[layer.index])
    for first in range(0, count, size):
        some = slice(first, first + size)
        key, value = (
            cache.decode(of.index_select(0, slots[some].flatten()), scale, query.dtype)
            .unflatten(0, (-1, most))
            .transpose(1, 2)
            for of, scale in zip(both, layer.kv_scales, strict=True)
        )
        # Query heads that share a KV head become rows.
        grouped = query[some].unflatten(1, (layer.kv_heads, -1))
        scores = torch.matmul(grouped, key.transpose(-1, -2)) * layer.scale
        scores = scores.masked_fill(hidden[some, None, None], float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        parts.append(torch.matmul(weights, value).flatten(1))
    return torch.cat(parts)
