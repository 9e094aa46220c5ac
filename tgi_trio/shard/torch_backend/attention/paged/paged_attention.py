"""Paged attention on a GPU by our own Triton kernels: the backend of K and V, and of latents (MLA).

K and V have any dtype, head size, window and chunk, soft caps, linear biases and sinks. A step's
inputs are in one block of memory, filled by a single copy, so that decode steps can be captured as
CUDA graphs (see `shard/torch_backend/recordings/decode_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.attention.interface import (
    AttentionLayer,
    CapturableAttention,
    DecodePlaces,
    HeadPlaces,
)
from tgi_trio.shard.torch_backend.attention.paged.kernel_choice import (
    choose_kernel,
    choose_latent_kernel,
)
from tgi_trio.shard.torch_backend.attention.paged.kv_writing import (
    absorb_queries,
    write_latent_keys,
    write_projected,
)
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.paged.spans import Spans, divide_into_spans
from tgi_trio.shard.torch_backend.attention.paged.split_kv import DividedTiles, divide_work
from tgi_trio.shard.torch_backend.attention.paged.tiles import (
    Tile,
    choose_latent_spans_tile,
    choose_latent_tile,
    choose_spans_tile,
    choose_tile,
    pad_dim,
)
from tgi_trio.shard.torch_backend.attention.paged.tiling import (
    DeviceTiling,
    HostTiling,
    Share,
    Tiles,
)
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.layers.attention.beside_heads import BesideHeads
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.log_scale import LogScale
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.staging import Array, Staging, rest, split
from tgi_trio.shard.torch_backend.torch_device import generation, overlap


class PagedAttention(CapturableAttention):
    """See CapturableAttention."""

    name = "triton"

    def __init__(self, device: torch.device, *, invariant: bool = False) -> None:
        """`invariant`: results do not depend on the step; see `batch_invariance.py`."""
        self._invariant = invariant
        self._generation = generation(device)
        self._staging = Staging(device)
        self._tile_staging = Staging(device)

    def prepare(self, plan: StepPlan, cache: KVCache) -> PagedBatch:
        arrays, longest = self.arrays(plan), int(plan.context_lengths.max())
        if plan.visible is None:
            return self._batch(plan, cache, self._staging.upload(arrays), longest)
        *views, lasts = self._staging.upload([*arrays, plan.visible.astype(np.int32)])
        return self._batch(plan, cache, views, longest, lasts)

    def arrays(self, plan: StepPlan) -> list[Array]:
        """See CapturableAttention."""
        arrays = _fixed(plan)
        arrays.append(plan.block_tables)
        return arrays

    def reserve(
        self, plan: StepPlan, cache: KVCache, memory: torch.Tensor, *, decodes: bool = True
    ) -> PagedBatch:
        """See CapturableAttention."""
        fixed = _fixed(plan)
        views = [*split(memory, fixed), rest(memory, fixed, torch.int32)]
        # The tables of later plans may be wider than this one's: as wide as there is memory for.
        width = views[-1].numel() // len(plan.context_lengths)
        batch = self._batch(plan, cache, views, width * BLOCK_SIZE)
        if not decodes:
            batch.decodes = False
            batch.tiling = DeviceTiling(batch.query_starts, len(plan.token_ids))
        return batch

    def places(self, batch: PagedBatch) -> DecodePlaces:
        """See CapturableAttention."""
        return DecodePlaces(batch.slots, batch.contexts, batch.tables, batch.width)

    def _batch(
        self,
        plan: StepPlan,
        cache: KVCache,
        views: Sequence[torch.Tensor],
        longest: int,
        lasts: torch.Tensor | None = None,
    ) -> PagedBatch:
        slots, contexts, query_starts, width, tables = views
        counts = np.diff(plan.query_starts)
        return PagedBatch(
            cache=cache,
            slots=slots,
            tables=tables,
            width=width,
            contexts=contexts,
            query_starts=query_starts,
            tiling=HostTiling(counts, self._tile_staging),
            decodes=len(counts) == len(plan.token_ids),
            lasts=lasts,
            longest=longest,
        )

    def attend(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: PagedBatch,
    ) -> torch.Tensor:
        cache, slots = batch.cache, batch.slots
        if layer.reads_only:
            return self.attend_written(layer, query, batch)
        if cache.codes:
            cache.write(layer.index, slots, key, value, layer.kv_scales)
        else:
            cache.key_slots[layer.index].index_copy_(0, slots, key)
            if not layer.value_dim:
                cache.value_slots[layer.index].index_copy_(0, slots, value)
        return self.attend_written(layer, query, batch)

    def attend_projected(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        steps: HeadSteps,
        table: RotaryTable | None,
        batch: PagedBatch,
        gates: torch.Tensor | None = None,
        beside: BesideHeads | None = None,
    ) -> torch.Tensor:
        places = _places(layer, batch)
        scales, codes = layer.kv_scales, batch.cache.codes
        query = write_projected(
            qkv, steps, table, *places, scales=scales, codes=codes, beside=beside
        )
        return self.attend_written(layer, query, batch, gates)

    def head_places(self, layer: AttentionLayer, batch: PagedBatch) -> HeadPlaces | None:
        """See AttentionBackend. None where K and V are quantised."""
        return None if batch.cache.codes else _places(layer, batch)

    def attend_latents(
        self,
        layer: AttentionLayer,
        projected: torch.Tensor,
        latent: LatentProjections,
        rotary: Rotary,
        table: RotaryTable,
        batch: PagedBatch,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        latent.scale(projected, table)
        key = batch.cache.key_slots[layer.index]
        stored, codes = layer.kv_scales[0], batch.cache.codes
        compressed = write_latent_keys(
            projected, latent, rotary, table, key, batch.slots, scale=stored, codes=codes
        )
        query, scale = latent.expand(compressed, projected), None
        if table.query_scale is not None and self._invariant:
            query = query * table.query_scale[:, 0]  # spans are of queries as they are
        elif table.query_scale is not None:
            scale, table = latent.same_scale, table._replace(logs=table.query_scale)
        query, ends = absorb_queries(latent, query)
        work = self._attend_latents(layer, query, ends, batch, (rotary, table), scale)
        return latent.values(work.hand_on(latent), gates)

    def attend_written(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        batch: PagedBatch,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        if layer.value_dim:
            query, ends = query.split((layer.value_dim, layer.head_dim - layer.value_dim), dim=-1)
            return self._attend_latents(layer, query, ends, batch, None).merge(gates)
        key, value = batch.cache.key_slots[layer.index], batch.cache.value_slots[layer.index]
        return self.attend_over(layer, query, key, value, batch, gates)

    def attend_over(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: PagedBatch,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute `attend_written` over K and V [slots, kv_heads, head_dim] of a cache."""
        shares = self._share(layer, query, batch)
        count = sum(len(tiles.rows) for _, tiles in shares)
        work = self._divide(layer, query, count, batch.cache.value_dim(layer.index), batch)
        for tile, tiles in shares:
            self._attend_tiles(layer, query, key, value, batch, tile, tiles, work, gates)
        return work.merge(gates)

    def _share(
        self, layer: AttentionLayer, query: torch.Tensor, batch: PagedBatch
    ) -> list[tuple[Tile, Tiles]]:
        """Return the tiles of all rows; beside prompts, small rows have tiles of their own kind.

        Tiles of prompts are large: a decode would leave most of one empty.
        """
        group, tiling = layer.heads // layer.kv_heads, batch.tiling

        def tile_of(decodes: int) -> Tile:
            sizes = layer.head_dim, batch.cache.value_dim(layer.index)
            kind, eight_bits = self._generation, bool(batch.cache.codes)
            return choose_tile(query.dtype, *sizes, kind, decodes=decodes, eight_bits=eight_bits)

        if self._invariant:
            tile = choose_spans_tile(
                query.dtype, layer.head_dim, batch.cache.value_dim(layer.index)
            )
            return [(tile, tiling.tiles(tile.lanes, group))]
        tile, few = tile_of(len(query) if batch.decodes else 0), tile_of(len(query))
        if not group <= few.lanes < tile.lanes:
            return [(tile, tiling.tiles(tile.lanes, group))]
        shares = [
            (tile, tiling.tiles(tile.lanes, group, Share(above=few.lanes))),
            (few, tiling.tiles(few.lanes, group, Share(upto=few.lanes))),
        ]
        return [each for each in shares if len(each[1].rows)]

    def _attend_tiles(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: PagedBatch,
        tile: Tile,
        tiles: Tiles,
        work: DividedTiles | Spans,
        gates: torch.Tensor | None,
    ) -> None:
        """Launch attention over some tiles of a step."""
        # The kernel reads tables before it waits, and lists of chosen tokens are made in the step.
        early = overlap(query.device) if batch.page > 1 else {"OVERLAPS": False}
        lasts = batch.lasts if layer.ahead else None
        value_dim = batch.cache.value_dim(layer.index)
        kernel, opening, constants = choose_kernel(work, gates)
        kernel[(len(tiles.rows), layer.kv_heads, work.programs)](
            *work.room,
            *(query, key, value),
            *(batch.tables, batch.width, batch.contexts, batch.query_starts),
            *tiles,
            work.bests if layer.slopes is None else layer.slopes,
            work.bests if layer.sinks is None else layer.sinks,
            batch.contexts if lasts is None else lasts,
            *opening,
            layer.scale * layer.kv_scales[0] if batch.cache.codes else layer.scale,
            layer.kv_scales[1],
            layer.soft_cap,
            query.stride(0),
            query.stride(1),
            *(gate.stride(0) for gate in opening),
            KV_HEADS=layer.kv_heads,
            GROUP=layer.heads // layer.kv_heads,
            DIM=layer.head_dim,
            PADDED_DIM=pad_dim(layer.head_dim),
            VALUE=value_dim,
            PADDED_VALUE=pad_dim(value_dim),
            PAGE=batch.page,
            LANES=tile.lanes,
            KEYS=tile.keys,
            **constants,
            WINDOW=layer.window,
            CHUNK=layer.chunk,
            SOFT_CAP=layer.soft_cap > 0,
            ALIBI=layer.slopes is not None,
            SINKS=layer.sinks is not None,
            AHEAD=lasts is not None,
            CODES=batch.cache.codes,
            **early,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _attend_latents(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        ends: torch.Tensor,
        batch: PagedBatch,
        turning: tuple[Rotary, RotaryTable] | None,
        scale: LogScale | None = None,
    ) -> DividedTiles | Spans:
        """Attend to keys whose beginnings are their values; return where [T, heads, value_dim] lie.

        `query`: [T, heads, value_dim], with `ends` that still have to be rotated by `turning`. The
        layer's rows of the cache may be wider than both. `scale`: of queries, where the sums of
        spans need not be in their order.
        """
        rotary, cos, sin, logs = None, query, query, None
        if turning is not None:
            rotary, (cos, sin, _, logs) = turning
        rank, turned = layer.value_dim, ends.shape[-1]
        tile = choose_latent_tile(query.dtype, layer.heads, decodes=batch.decodes)
        if self._invariant:
            tile = choose_latent_spans_tile(query.dtype)
        tiles = batch.tiling.tiles(tile.lanes, layer.heads)
        work = self._divide(layer, query, len(tiles.rows), rank, batch)
        kernel, scaling, constants = choose_latent_kernel(work, scale, logs)
        kernel[(len(tiles.rows), 1, work.programs)](
            *work.room,
            *(query, ends, cos, sin),
            batch.cache.key_slots[layer.index],
            batch.tables,
            batch.width,
            batch.contexts,
            batch.query_starts,
            *tiles,
            work.bests if layer.sinks is None else layer.sinks,
            *scaling,
            layer.scale * layer.kv_scales[0] if batch.cache.codes else layer.scale,
            layer.kv_scales[0],
            *query.stride()[:2],
            *ends.stride()[:2],
            HEADS=layer.heads,
            RANK=rank,
            PADDED_RANK=pad_dim(rank),
            ROTARY=turned,
            PADDED_ROTARY=pad_dim(turned),
            WIDTH=layer.head_dim,
            ROTATES=rotary is not None,
            INTERLEAVED=rotary is not None and rotary.spec.interleaved,
            PAGE=batch.page,
            LANES=tile.lanes,
            KEYS=tile.keys,
            **constants,
            SINKS=layer.sinks is not None,
            CODES=batch.cache.codes,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return work

    def _divide(
        self, layer: AttentionLayer, query: torch.Tensor, tiles: int, dim: int, batch: PagedBatch
    ) -> DividedTiles | Spans:
        """Return room for the results, [T, heads, dim], of so many tiles."""
        if self._invariant:
            return divide_into_spans(layer, query, tiles, dim, batch.longest)
        return divide_work(layer, query, tiles, dim)


def _places(layer: AttentionLayer, batch: PagedBatch) -> HeadPlaces:
    cache = batch.cache
    return HeadPlaces(cache.key_slots[layer.index], cache.value_slots[layer.index], batch.slots)


def _fixed(plan: StepPlan) -> list[Array]:
    """Return what a plan tells the kernels besides its block tables."""
    width = _only(plan.block_tables.shape[1])
    return [plan.kv_slots, plan.context_lengths, plan.query_starts, width]


@lru_cache(maxsize=256)
def _only(value: int) -> NDArray[np.int32]:
    """Return int32 [1], which nobody may write to."""
    found = np.array([value], np.int32)
    found.flags.writeable = False
    return found
