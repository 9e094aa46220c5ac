"""The tokens that an index chooses by runs: whole runs of tokens, and those behind the last one.

A run's key is a mean of its tokens' keys. It is made again in every step, from what the cache has
of each token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tgi_trio.shard.torch_backend.attention.indexed.reference_groups import Choice, ScoredGroup
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.attention.index import (
    IndexQueries,
    TokenIndex,
    choose_best,
    score_keys,
)


def choose_runs(
    layer: AttentionLayer,
    index: TokenIndex,
    index_queries: IndexQueries,
    cache: KVCache,
    kept: torch.Tensor,
    groups: Sequence[ScoredGroup],
    own: torch.Tensor,
) -> Choice:
    """Return the tokens to which each token of a step attends.

    `kept`: [slots, 2 * dim], what the cache has of tokens for the index. `groups`: all tokens, with
    keys that are whole runs; `own` int64 [T]: the tokens' slots.
    """
    pool = index.spec.pool
    width = layer.most // pool * pool + pool - 1
    slots = own[:, None].repeat(1, width)
    hidden = torch.ones_like(slots, dtype=torch.bool)
    for group in groups:
        tokens, reach = group.tokens, group.reach
        scores = _score(layer, index, index_queries, cache, kept, group)
        ends = torch.arange(scores.shape[1], device=scores.device) * pool + pool - 1
        scores = scores.masked_fill(ends > reach, float("-inf"))
        best = choose_best(scores, layer.most // pool)
        positions, away = _spread(best, reach, pool)
        hidden[tokens] = away
        rows = group.places.expand(len(tokens), -1)
        chosen = rows.gather(1, positions.clamp(max=rows.shape[1] - 1))
        # Hidden places have weight zero, but NaN times zero is NaN: use the token's own slot there.
        slots[tokens] = torch.where(away, slots[tokens], chosen)
    return Choice(slots, hidden)


def _spread(
    runs: torch.Tensor, reach: torch.Tensor, pool: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of `runs` [N, count], then those behind each token's last whole run.

    The other result says which of them a token does not see. `reach` int64 [N, 1]: the last
    position that each token sees.
    """
    inside = torch.arange(pool, device=runs.device)
    whole = runs[..., None] * pool + inside
    apart = (whole[..., -1:] > reach[..., None]).expand_as(whole)
    behind = (reach + 1) // pool * pool + inside[:-1]
    positions = torch.cat((whole.flatten(1), behind), dim=1)
    return positions, torch.cat((apart.flatten(1), behind > reach), dim=1)


def _score(
    layer: AttentionLayer,
    index: TokenIndex,
    index_queries: IndexQueries,
    cache: KVCache,
    kept: torch.Tensor,
    group: ScoredGroup,
) -> torch.Tensor:
    """Return the scores of a group's runs, float32 [tokens, runs]."""
    queries, weights = (of.index_select(0, group.tokens) for of in index_queries)
    dim, pool = index.spec.dim, index.spec.pool
    kept = kept.index_select(0, group.places.flatten())
    kept = cache.decode(kept, layer.kv_scales[0], torch.float32).float()
    keys, gates = kept.view(len(group.places), -1, pool, 2 * dim).split(dim, dim=-1)
    if index.pool_bias is not None:
        gates = gates + index.pool_bias
    keys = (gates.softmax(dim=2) * keys).sum(dim=2)
    if len(keys) == 1:  # their queries are rows over one set of keys
        return score_keys(IndexQueries(queries, weights), keys[0])
    return score_keys(IndexQueries(queries[:, None], weights[:, None]), keys)[:, 0]
