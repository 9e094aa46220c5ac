"""Sparse attention over blocks of tokens that an index chooses by one key of each, in kernels.

See `reference_pooled.py`. Beside a step's keys, those of the blocks are written that it completes,
which the device finds by itself. Where no row has more whole blocks than are chosen, this is plain
attention; in a recording, whose rows change, the kernels find that out for each row, as they do
where batch invariance is kept (see `paged_blocks.py`). Imported only where Triton is installed.
"""

from __future__ import annotations

import torch

from tgi_trio.shard.torch_backend.attention.indexed.index_writing import (
    Blocks,
    write_heads_and_index,
)
from tgi_trio.shard.torch_backend.attention.indexed.selecting import (
    Asking,
    cut_tokens,
    make_list,
    score_units,
    select_tokens,
)
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.pooled_index import PooledIndex
from tgi_trio.shard.torch_backend.layers.attention.rotary import RotaryTable


class PagedPooled(PagedAttention):
    """See `AttentionBackend.attend_pooled`."""

    def attend_pooled(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        index_queries: torch.Tensor,
        steps: HeadSteps,
        index: PooledIndex,
        table: RotaryTable | None,
        batch: PagedBatch,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rotary, spec = steps.rotary, index.spec
        if rotary is None or table is None:
            raise ValueError(f"layer {layer.index} of the cache has an index, and no positions")
        short = batch.longest // spec.size <= spec.most
        plain = short and not self._invariant
        norms, number = (index.query_norm, index.key_norm), index.number
        blocks = Blocks(spec.size, rotary.every(batch.longest, projected.dtype))
        query, queries = write_heads_and_index(
            *(layer, projected, index_queries, steps, norms, table, number, batch),
            asks=not plain,
            blocks=blocks,
        )
        if plain:
            return self.attend_written(layer, query, batch, gates)
        parts = []
        keys = batch.cache.key_slots[number][:, 0]
        width = (spec.most + 1) * spec.size - 1
        room = max(batch.longest // spec.size, width)  # lists take as much as scores
        for tokens in cut_tokens(len(query), room):
            found = score_units(
                Asking(queries, None),
                keys,
                batch,
                tokens,
                unit=spec.size,
                most=spec.most,
                invariant=self._invariant,
            )
            listed = make_list(len(tokens), width, query.device)
            select_tokens(found, batch, tokens, listed, most=spec.most, unit=spec.size, tail=True)
            some, opening = query[tokens.start : tokens.stop], gates
            if gates is not None:
                opening = gates[tokens.start : tokens.stop]
            parts.append(self.attend_written(layer, some, batch.over(*listed), opening))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
