"""Sparse attention over the tokens that an index chooses, in plain torch, batched and paged.

The cache has an index key after every latent. As long as no context exceeds the number of tokens to
be chosen, all are chosen, and this is plain attention over latents. In other steps, index keys are
scored: decodes together, with rows of similar contexts at a time, and prefills by tiles of a row's
queries. Then each token gathers the latents that it has chosen, and so many tokens at a time attend
in one batched operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.indexed.reference_groups import (
    Choice,
    ScoredGroup,
    group_tokens,
)
from tgi_trio.shard.torch_backend.attention.indexed.reference_runs import choose_runs
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention, ReferenceBatch
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.attention.index import (
    IndexQueries,
    TokenIndex,
    choose_best,
    score_keys,
)
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable

_GATHERED = 1 << 15  # latents gathered at a time


@dataclass(slots=True)
class IndexedBatch(ReferenceBatch):
    """A plan, prepared."""

    choice: Choice | None = None  # of the last layer that has an index
    groups: list[ScoredGroup] = field(default_factory=list)  # made by the first layer


class IndexedAttention(ReferenceAttention):
    """Plain torch."""

    def prepare(self, plan: StepPlan, cache: KVCache) -> IndexedBatch:
        return IndexedBatch(cache, plan, torch.from_numpy(plan.kv_slots).to(cache.key.device))

    def attend_indexed(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        latent: LatentProjections,
        index: TokenIndex | None,
        rotary: int,
        turns: Sequence[tuple[Rotary, RotaryTable]],
        batch: IndexedBatch,
        hidden: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        turning, table = turns[rotary]
        latent.scale(projected, table)
        expanded = None
        if latent.gate_up is not None:
            expanded, gates = latent.open(latent.double(projected)) or (None, gates)
        index_queries = index_key = None
        plain = int(batch.plan.context_lengths.max()) <= layer.most
        if index is not None:
            projected, key, weights, *pooled = index.split(projected)
            index_key = index.keys(key, *turns[index.rotary])
            index_key = torch.cat((index_key, *(part[:, None] for part in pooled)), dim=-1)
            if not plain:
                source = latent.compress(projected) if hidden is None else hidden
                index_queries = index.ask(source, weights, *turns[index.rotary])
        query, key = latent.query_and_key(
            projected, lambda part: turning.apply(part, table.cos, table.sin), expanded
        )
        key = functional.pad(key, (0, layer.head_dim - key.shape[-1]))
        _place_key(layer, latent, index, index_key, key, batch)
        if plain:
            query = functional.pad(query, (0, layer.head_dim - query.shape[-1]))
            return latent.values(self.attend(layer, query, key, key, batch), gates)
        if not layer.reads_only:
            batch.cache.write(layer.index, batch.slots, key, key, layer.kv_scales)
        if index_queries is not None and index is not None:
            batch.choice = _choose(layer, latent, index, index_queries, batch)
        if batch.choice is None:
            raise ValueError(f"layer {layer.index} of the cache has no choice to go on with")
        return latent.values(_attend_chosen(layer, query, batch.cache, batch.choice), gates)


def _place_key(
    layer: AttentionLayer,
    latent: LatentProjections,
    index: TokenIndex | None,
    index_key: torch.Tensor | None,
    key: torch.Tensor,
    batch: IndexedBatch,
) -> None:
    """Put what an index keeps in its place in `key` [T, 1, head_dim], which is to be written.

    A layer that reads the latents of another writes it to that one's rows of the cache.
    """
    if index is None or index_key is None:
        return
    place = index.place_in(latent.spec)
    if layer.reads_only:
        batch.cache.write_part(layer.index, batch.slots, place, index_key, layer.kv_scales[0])
    else:
        key[..., place] = index_key


def _attend_chosen(
    layer: AttentionLayer, query: torch.Tensor, cache: KVCache, choice: Choice
) -> torch.Tensor:
    """Return attention [T, heads * value_dim] of queries [T, heads, dim]."""
    tokens, most = choice.slots.shape
    size, dim = max(1, _GATHERED // most), query.shape[-1]
    parts = []
    for first in range(0, tokens, size):
        some = slice(first, first + size)
        slots = choice.slots[some]
        keys = cache.key_slots[layer.index][:, 0].index_select(0, slots.flatten())
        keys = cache.decode(keys[:, :dim], layer.kv_scales[0], query.dtype)
        keys = keys.view(*slots.shape, dim)
        scores = torch.matmul(query[some], keys.transpose(1, 2)) * layer.scale
        scores = scores.masked_fill(choice.hidden[some, None], float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.to(scores.dtype)[:, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        parts.append(torch.matmul(weights[..., :most], keys[..., : layer.value_dim]))
    return torch.cat(parts).flatten(1)


# --- choosing -------------------------------------------------------------------------------------


def _choose(
    layer: AttentionLayer,
    latent: LatentProjections,
    index: TokenIndex,
    index_queries: IndexQueries,
    batch: IndexedBatch,
) -> Choice:
    """Return the tokens to which each token of a step attends."""
    spec, cache = index.spec, batch.cache
    if not batch.groups:
        device, unit = index_queries.queries.device, max(1, spec.pool)
        batch.groups += group_tokens(batch.plan, spec.heads, layer.most, device, unit=unit)
    kept = cache.key_slots[layer.index][:, 0, index.place_in(latent.spec)]
    if spec.pool:
        return choose_runs(layer, index, index_queries, cache, kept, batch.groups, batch.slots)
    slots = batch.slots[:, None].repeat(1, layer.most)
    hidden = torch.ones_like(slots, dtype=torch.bool)
    for group in batch.groups:
        tokens, reach = group.tokens, group.reach
        scores = _score(layer, index_queries, cache, kept, group)
        beyond = torch.arange(scores.shape[1], device=scores.device) > reach
        best = choose_best(scores.masked_fill_(beyond, float("-inf")), layer.most)
        hidden[tokens] = best > reach
        chosen = group.places.expand(len(tokens), -1).gather(1, best)
        # Hidden places have weight zero, but NaN times zero is NaN: use the token's own slot there.
        slots[tokens] = torch.where(best > reach, slots[tokens], chosen)
    return Choice(slots, hidden)


def _score(
    layer: AttentionLayer,
    index_queries: IndexQueries,
    cache: KVCache,
    kept: torch.Tensor,
    group: ScoredGroup,
) -> torch.Tensor:
    """Return the scores of a group's keys, float32 [tokens, keys]; `kept`: [slots, dim]."""
    queries, weights = (of.index_select(0, group.tokens) for of in index_queries)
    dim = queries.shape[-1]
    keys = kept.index_select(0, group.places.flatten())
    keys = cache.decode(keys, layer.kv_scales[0], torch.float32).float()
    keys = keys.view(*group.places.shape, dim)
    if len(keys) == 1:  # their queries are rows over one set of keys
        return score_keys(IndexQueries(queries, weights), keys[0])
    return score_keys(IndexQueries(queries[:, None], weights[:, None]), keys)[:, 0]
