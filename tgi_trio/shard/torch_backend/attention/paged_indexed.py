"""Attention over the tokens that an index chooses, by kernels of ours, which can be recorded.

The index scores tokens, or whole runs of them, in the paged cache; the latents of those that are
chosen are attended to where they lie. Nothing is chosen where no context can be too long. Imported
only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tgi_trio.shard.torch_backend.attention.index_projecting import (
    Turn,
    ask_index,
    average_runs,
    expand_both,
    write_indexed_keys,
)
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged import PagedAttention
from tgi_trio.shard.torch_backend.attention.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.projecting import (
    absorb_queries,
    write_latent_keys,
)
from tgi_trio.shard.torch_backend.attention.selecting import (
    Asking,
    TokenList,
    cut_tokens,
    make_list,
    score_units,
    select_tokens,
)
from tgi_trio.shard.torch_backend.layers.expanding import AttendedParts
from tgi_trio.shard.torch_backend.layers.index import TokenIndex
from tgi_trio.shard.torch_backend.layers.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.rotary import Rotary, RotaryTable


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
        *,
        expanded: torch.Tensor | None = None,
    ) -> torch.Tensor | AttendedParts:
        """See AttentionBackend. A choice is kept until the last layer with it has attended."""
        turning, cache = Turn(*turns[rotary]), batch.cache
        plain, both = batch.longest <= layer.most, None
        key, scale = cache.key_slots[layer.index], layer.kv_scales[0]
        if index is None:
            query, ends = write_latent_keys(
                *(projected, latent, *turning, key, batch.slots, expanded),
                scale=scale,
                codes=cache.codes,
            )
        else:
            own = Turn(*turns[index.rotary])
            compressed = write_indexed_keys(
                *(projected, latent, turning, index, own, key, batch.slots),
                scale=scale,
                codes=cache.codes,
            )
            keys = key[:, 0, index.place_in(latent.spec)]
            if index.spec.pool:
                average_runs(index, keys, batch, scale, compressed)
            if expanded is None:
                both = None if plain else expand_both(latent, index, compressed)
                expanded = latent.expand(compressed, projected) if both is None else both[0]
            query, ends = absorb_queries(latent, expanded)
        if plain:
            return self._attend_latents(layer, query, ends, batch, turning).leave_parts()
        if index is not None:
            source = compressed if hidden is None else hidden
            queries = index.project(source) if both is None else both[1]
            asked = ask_index(projected, queries, index, own)
            batch.chosen = batch.over(*choose_tokens(layer, index, asked, keys, batch))
        chosen = batch.chosen
        if chosen is None:
            raise ValueError(f"layer {layer.index} of the cache has no choice to go on with")
        if layer.chosen_last:  # a recording's batch lives on
            batch.chosen = None
        return self._attend_latents(layer, query, ends, chosen, turning).leave_parts()


def choose_tokens(
    layer: AttentionLayer,
    index: TokenIndex,
    asked: Asking,
    keys: torch.Tensor,
    batch: PagedBatch,
) -> TokenList:
    """Return the tokens to which each token of a step attends.

    `keys`: [slots, at least dim], a view of one layer of the cache.
    """
    unit, tail = max(1, index.spec.pool), index.spec.pool > 0
    most = layer.most // unit
    listed = make_list(len(asked.queries), most * unit + unit - 1, keys.device)
    for tokens in cut_tokens(len(asked.queries), batch.longest // unit):
        found = score_units(asked, keys, batch, tokens, unit=unit, most=most)
        own = listed.part(tokens)
        select_tokens(found, batch, tokens, own, most=most, unit=unit, tail=tail)
    return listed
