"""Sparse attention over the tokens that an index chooses, by kernels, which can be recorded.

The index scores tokens, or whole runs of them, in the paged cache; the latents of those that are
chosen are attended to where they lie. Nothing is chosen where no context can be too long, except
where batch invariance is kept: whether others have long contexts must not change what is launched
for a row. Such a row's list then has all of its tokens. Imported only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.indexed.absorbing import PendingQueries
from tgi_trio.shard.torch_backend.attention.indexed.index_projecting import (
    StepRotary,
    ask_index,
    expand_both,
    write_indexed_keys,
)
from tgi_trio.shard.torch_backend.attention.indexed.selecting import (
    Asking,
    TokenList,
    cut_tokens,
    make_list,
    score_units,
    select_tokens,
)
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged.kv_writing import write_latent_keys
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.layers.attention.index import TokenIndex
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable


class PagedIndexedAttention(PagedAttention):
    """Our own kernels."""

    def attend_indexed(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        latent: LatentProjections,
        index: TokenIndex | None,
        rotary: int,
        turns: Sequence[tuple[Rotary, RotaryTable]],
        batch: PagedBatch,
        hidden: torch.Tensor | None = None,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. A choice is kept until the last layer with it has attended."""
        turning, asking = StepRotary(*turns[rotary]), None
        plain = batch.longest <= layer.most and not self._invariant
        if index is None:
            layer_queries = write_plain(layer, projected, latent, turning, batch)
        else:
            own = StepRotary(*turns[index.rotary])
            layer_queries = write_and_ask(
                *(layer, projected, latent, turning, index, own, batch, hidden), plain=plain
            )
            asking = layer_queries.asking
        scale = latent.query_scale
        if self._invariant:  # the kernel that walks spans takes queries as they are
            latent.scale(layer_queries.expanded, turning.table)
            scale = None
        pending, seen = PendingQueries(latent, layer_queries.expanded), batch
        if not plain:
            if asking is not None and index is not None:
                keys = batch.cache.key_slots[layer.index][:, 0, index.place_in(latent.spec)]
                listed = choose_tokens(
                    *(layer, index, asking, keys, batch, pending), invariant=self._invariant
                )
                batch.chosen = batch.over(*listed)
            if batch.chosen is None:
                raise ValueError(f"layer {layer.index} of the cache has no choice to go on with")
            seen = batch.chosen
            if layer.chosen_last:  # a recording's batch lives on
                batch.chosen = None
        query, ends = pending.settle()
        work = self._attend_latents(layer, query, ends, seen, turning, scale)
        return latent.values(
            work.hand_on(latent), gates if layer_queries.gates is None else layer_queries.gates
        )


class LayerQueries(NamedTuple):
    """What is made of a layer's projections, behind keys that have been written."""

    expanded: torch.Tensor  # queries [T, heads * size], neither scaled nor rotated yet
    gates: torch.Tensor | None = None  # of values, if they are made as queries are
    asking: Asking | None = None  # None: there is no index, or nothing has to be chosen


def write_plain(
    layer: AttentionLayer,
    projected: torch.Tensor,
    latent: LatentProjections,
    turning: StepRotary,
    batch: PagedBatch,
) -> LayerQueries:
    """Write a layer's keys, and expand its queries, where it has no index of its own."""
    key, codes = batch.cache.key_slots[layer.index], batch.cache.codes
    query = write_latent_keys(
        *(projected, latent, *turning, key, batch.slots), scale=layer.kv_scales[0], codes=codes
    )
    opened = None if latent.gate_up is None else latent.open(latent.double(projected))
    return (
        LayerQueries(latent.expand(query, projected)) if opened is None else LayerQueries(*opened)
    )


def write_and_ask(
    layer: AttentionLayer,
    projected: torch.Tensor,
    latent: LatentProjections,
    turning: StepRotary,
    index: TokenIndex,
    own: StepRotary,
    batch: PagedBatch,
    hidden: torch.Tensor | None,
    *,
    plain: bool,
) -> LayerQueries:
    """Write a layer's keys and those of its index; expand queries of both.

    `plain`: nothing has to be chosen.
    """
    key = batch.cache.key_slots[layer.index]
    written = write_indexed_keys(
        *(projected, latent, turning, index, own, key, batch, None if plain else hidden),
        scale=layer.kv_scales[0],
    )
    query, queries = written.query, None
    opened = latent.open(query)
    both = None if plain or opened is not None else expand_both(latent, index, query)
    if opened is not None:
        layer_queries = LayerQueries(*opened)
    elif both is not None:
        layer_queries, queries = LayerQueries(both[0]), both[1]
    else:
        layer_queries = LayerQueries(latent.expand(query, projected))
    if plain:
        return layer_queries
    if queries is None:
        source = query[:, : latent.spec.query_rank] if written.asking is None else written.asking
        queries = index.multiply(source)
    return layer_queries._replace(asking=ask_index(projected, queries, index, own))


def choose_tokens(
    layer: AttentionLayer,
    index: TokenIndex,
    asking: Asking,
    keys: torch.Tensor,
    batch: PagedBatch,
    pending: PendingQueries,
    *,
    invariant: bool = False,
) -> TokenList:
    """Return the tokens to which each token of a step attends.

    `keys`: [slots, at least dim], a view of one layer of the cache. `invariant`, and the `pending`
    queries of attention: see `score_units`.
    """
    unit, tail = max(1, index.spec.pool), index.spec.pool > 0
    most = layer.most // unit
    listed = make_list(len(asking.queries), most * unit + unit - 1, keys.device)
    for tokens in cut_tokens(len(asking.queries), batch.longest // unit):
        found = score_units(
            *(asking, keys, batch, tokens),
            unit=unit,
            most=most,
            invariant=invariant,
            pending=pending,
        )
        own = listed.part(tokens)
        select_tokens(found, batch, tokens, own, most=most, unit=unit, tail=tail)
    return listed
