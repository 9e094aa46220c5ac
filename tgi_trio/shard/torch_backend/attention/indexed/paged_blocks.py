"""Sparse attention over blocks of tokens that an index chooses for each KV head, in kernels.

See `reference_blocks.py`. The best blocks of each pair of a token and a KV head are found, and
their tokens listed. Such a pair is then a row with one query, over the cache of a single head.
Where no row has more tokens than are chosen, this is plain attention; in a recording, whose rows
change, the kernels find that out for each row. So they do where batch invariance is kept: a row's
launches must not follow from the contexts of others. Imported only where Triton is installed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from tgi_trio.shard.torch_backend.attention.indexed.index_writing import write_heads_and_index
from tgi_trio.shard.torch_backend.attention.indexed.selecting import (
    UnitScores,
    count_programs,
    cut_tokens,
    make_list,
    select_tokens,
)
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.attention import block_scores
from tgi_trio.shard.torch_backend.layers.attention.block_index import BlockIndex
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.rotary import RotaryTable
from tgi_trio.shard.torch_backend.padding import next_power_of_2

KEYS: Final = 64  # of a block that a program scores at a time
_LANES: Final = 128  # (token, head) pairs of a program, where a step has many tokens
_WIDE_LANES: Final = 32  # in float32
_FEWEST: Final = 16  # rows that tensor cores multiply


class PagedBlocks(PagedAttention):
    """See `AttentionBackend.attend_blocks`."""

    def attend_blocks(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        steps: HeadSteps,
        index: BlockIndex,
        table: RotaryTable | None,
        batch: PagedBatch,
    ) -> torch.Tensor:
        spec = index.spec
        chosen = spec.most * spec.size
        qkv, own = projected.tensor_split((-(index.heads + 1) * spec.dim,), dim=-1)
        norms = index.query_norm, index.key_norm
        plain = batch.longest <= chosen and not self._invariant
        query, queries = write_heads_and_index(
            layer, qkv, own, steps, norms, table, index.number, batch, asks=not plain
        )
        if plain:
            return self.attend_written(layer, query, batch)
        parts = []
        room = max(-(-batch.longest // spec.size), chosen)  # lists take as much as scores
        for tokens in cut_tokens(len(query), room, layer.kv_heads):
            some = query[tokens.start : tokens.stop]
            found = score_blocks(queries, index, batch, tokens, invariant=self._invariant)
            parts.append(self._attend_best(layer, some, found, tokens, index, batch))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_best(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        found: UnitScores,
        tokens: range,
        index: BlockIndex,
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Return attention [N, heads * head_dim] of queries [N, heads, head_dim] of `tokens`."""
        if layer.sinks is not None:
            raise ValueError("no kernel has sinks beside chosen blocks")
        spec, kv_heads = index.spec, layer.kv_heads
        listed = make_list(len(query) * kv_heads, spec.most * spec.size, query.device)
        select_tokens(found, batch, tokens, listed, most=spec.most, unit=spec.size, heads=kv_heads)
        lone = replace(layer, heads=layer.heads // kv_heads, kv_heads=1)
        key, value = (
            of[layer.index].view(-1, 1, layer.head_dim)
            for of in (batch.cache.key_slots, batch.cache.value_slots)
        )
        rows = query.reshape(-1, lone.heads, layer.head_dim)
        return self.attend_over(lone, rows, key, value, batch.over(*listed)).view(len(query), -1)


def score_blocks(
    queries: torch.Tensor,
    index: BlockIndex,
    batch: PagedBatch,
    tokens: range,
    *,
    invariant: bool = False,
) -> UnitScores:
    """Return the scores of blocks for the heads of the given tokens, one after another.

    See `layers.attention.block_index.score_blocks`. `queries`: [T, heads, dim]. Nothing is scored
    for tokens that see no more blocks than are chosen. `invariant`: decodes have the tile of
    prompts; see `batch_invariance.py`.
    """
    spec, (heads, dim) = index.spec, queries.shape[1:]
    count, room = len(tokens), -(-batch.longest // spec.size)
    scores = queries.new_empty((count * heads, room), dtype=torch.float32)
    visible = batch.contexts.new_empty(count * heads)
    each, padded = choose_tile_tokens(queries.dtype, heads, decodes=batch.decodes and not invariant)
    tiles = -(-count // each)
    block_scores.score_blocks[(tiles, count_programs(tiles, room, each=1))](
        scores,
        visible,
        queries,
        batch.cache.key_slots[index.number],
        *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
        *(tokens.start, count, room),
        *(queries.stride(0), queries.stride(1)),
        HEADS=heads,
        PADDED_HEADS=padded,
        DIM=dim,
        PADDED_DIM=pad_dim(dim),
        SIZE=spec.size,
        MOST=spec.most,
        LOCAL=spec.local,
        TOKENS=each,
        KEYS=min(KEYS, pad_dim(spec.size)),
        PAGE=batch.page,
        CODES=batch.cache.codes,
    )
    return UnitScores(scores, visible)


def choose_tile_tokens(dtype: torch.dtype, heads: int, *, decodes: bool) -> tuple[int, int]:
    """Return how many tokens a program scores, and for how many heads each; powers of two.

    Decodes have a program each: of several rows none shares its keys.
    """
    padded = next_power_of_2(heads)
    if decodes:
        return 1, max(_FEWEST, padded)
    lanes = _LANES if dtype.itemsize <= 2 else _WIDE_LANES
    return max(1, lanes // padded), padded
