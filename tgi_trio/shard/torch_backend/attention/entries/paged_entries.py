"""Attention to the keys of a window and to entries on a GPU, by kernels of ours (DeepSeek V4).

What a step's tokens see, and which runs of tokens end in it, is found on the device from the plan's
own tables, so that steps can be recorded. `reference_entries.py` says what is kept in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from tgi_trio.shard.torch_backend.attention.entries.entries_kernel import (
    attend_entries,
    attend_entry_spans,
)
from tgi_trio.shard.torch_backend.attention.entries.shared_keys import (
    EntryPlaces,
    write_keys,
)
from tgi_trio.shard.torch_backend.attention.indexed.selecting import (
    Asking,
    Selection,
    cut_tokens,
    score_units,
    select_best,
)
from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged.paged_attention import PagedAttention
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.paged.spans import Spans, divide_into_spans
from tgi_trio.shard.torch_backend.attention.paged.split_kv import DividedTiles, divide_work
from tgi_trio.shard.torch_backend.attention.paged.tiles import (
    Tile,
    choose_entries_tile,
    choose_entry_spans_tile,
    pad_dim,
)
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.attention.shared_key import EntryIndex, SharedKey
from tgi_trio.shard.torch_backend.torch_device import limit_registers, overlap

# Of a thread, in half precision: all there are. By itself the assembler takes fewer, and spills.
REGISTERS: Final = 255


class PagedEntriesAttention(PagedAttention):
    """See CapturableAttention."""

    def attend_shared_key(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        shared: SharedKey,
        turning: Rotary,
        table: RotaryTable,
        batch: PagedBatch,
    ) -> torch.Tensor:
        keys, entries = batch.cache.key_slots[layer.index][:, 0], shared.entries
        written = write_keys(projected, shared, turning, table, keys, batch)
        index = None if entries is None else entries.index
        query, index_queries = _expand(shared, index, written.compressed)
        query = query.unflatten(-1, (layer.heads, shared.dim))
        tile, work = self._plan(layer, shared, query, batch)
        own = _Attending(layer, shared, query, turning, table, keys, batch, tile, work)
        if index is None or index_queries is None:
            own.launch(range(len(query)), None)
        else:
            own.launch_by_index(index, index_queries, written.weights, invariant=self._invariant)
        return work.merge().view_as(query)

    def _plan(
        self, layer: AttentionLayer, shared: SharedKey, query: torch.Tensor, batch: PagedBatch
    ) -> tuple[Tile, DividedTiles | Spans]:
        """Return the tile of a step's programs, and room for what they find."""
        entries, chosen = shared.entries, shared.entries is not None and bool(shared.entries.index)
        choose = choose_entry_spans_tile if self._invariant else choose_entries_tile
        tile = choose(query.dtype, layer.heads, chosen=chosen)
        tiles = len(query) * -(-layer.heads // tile.lanes)
        if not self._invariant:
            return tile, divide_work(layer, query, tiles, shared.dim)
        most = 0 if entries is None else batch.longest // entries.spec.rate
        places = min(batch.longest, layer.window) + min(most, layer.most if chosen else most)
        return tile, divide_into_spans(layer, query, tiles, shared.dim, places)


def _choose_kernel(work: DividedTiles | Spans) -> tuple[Any, dict[str, Any]]:
    """Return the kernel that attends to entries, and constants."""
    kernel = attend_entries if isinstance(work, DividedTiles) else attend_entry_spans
    return kernel, work.constants


def _expand(
    shared: SharedKey, index: EntryIndex | None, compressed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return expanded queries [T, heads * dim], and those of an index if there is one."""
    if index is None:
        return shared.query_up(compressed), None
    if index.joined is not None and index.joined.serves(shared.query_up, index.query_up):
        return index.joined.multiply(compressed)
    return shared.query_up(compressed), index.query_up(compressed)


@dataclass(frozen=True, slots=True)
class _Attending:
    """Attention of a step's tokens in one layer."""

    layer: AttentionLayer
    shared: SharedKey
    query: torch.Tensor  # [T, heads, dim], neither normalised nor rotated yet; tokens lie apart
    turning: Rotary
    table: RotaryTable
    keys: torch.Tensor  # [slots, numbers], one layer of the cache
    batch: PagedBatch
    tile: Tile
    work: DividedTiles | Spans

    def launch_by_index(
        self,
        index: EntryIndex,
        index_queries: torch.Tensor,
        weights: torch.Tensor,
        *,
        invariant: bool,
    ) -> None:
        """Launch attention to the entries that an index chooses, for some tokens at a time.

        `index_queries`: the index's queries [T, heads * dim], and `weights` [T, heads] of its
        heads.
        `invariant`: see `score_units`.
        """
        rate, most, dim = len(index.compressor.bias), self.layer.most, index.compressor.dim
        index_queries = index_queries.unflatten(-1, (index.heads, dim))
        begin = dim - self.turning.spec.dim
        asking = Asking(index_queries, weights, self.table, begin=begin, interleaved=True)
        place = EntryPlaces.of(self.shared).index_made
        made = self.keys[:, place : place + dim]
        for tokens in cut_tokens(len(index_queries), self.batch.longest // rate):
            found = score_units(
                *(asking, made, self.batch, tokens), unit=rate, most=most, invariant=invariant
            )
            self.launch(tokens, select_best(found, most, self.batch))

    def launch(self, tokens: range, chosen: Selection | None) -> None:
        """Launch attention of some tokens to `chosen` entries; None: to all of them."""
        layer, batch, tile, work = self.layer, self.batch, self.tile, self.work
        entries = self.shared.entries
        units, found = (batch.contexts, batch.contexts) if chosen is None else chosen
        kernel, constants = _choose_kernel(work)
        kernel[(len(tokens) * -(-layer.heads // tile.lanes), 1, work.programs)](
            *work.room,
            *(self.query, self.table.cos, self.table.sin, self.keys),
            *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
            *(units, found),
            work.bests if layer.sinks is None else layer.sinks,
            *(tokens.start, layer.scale, self.shared.eps),
            HEADS=layer.heads,
            DIM=self.shared.dim,
            PADDED_DIM=pad_dim(self.shared.dim),
            ROTARY=self.turning.spec.dim,
            QUERY=self.query.stride(0),
            STRIDE=self.keys.stride(0),
            WINDOW=layer.window,
            RATE=0 if entries is None else entries.spec.rate,
            ENTRY=EntryPlaces.of(self.shared).made,
            MOST=0 if chosen is None else layer.most,
            SINKS=layer.sinks is not None,
            PAGE=batch.page,
            LANES=tile.lanes,
            KEYS=tile.keys,
            **constants,
            **overlap(self.query.device),
            **({} if self.query.dtype is torch.float32 else limit_registers(REGISTERS)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
