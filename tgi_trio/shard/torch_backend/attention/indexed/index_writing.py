"""Writing what attention by an index reads: K and V, and the index's keys, in kernels.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged.kv_writing import count_heads, prepare_heads
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.attention import index_keys as kernels
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.torch_device import overlap

BESIDE: Final = 16  # tokens of a block whose keys are read at a time


class Blocks(NamedTuple):
    """Blocks of tokens that have a key each."""

    size: int
    every: RotaryTable  # the rotations of all positions, in the dtype of the model


class BlockQueries(NamedTuple):
    """Queries, normalised and rotated."""

    query: torch.Tensor  # [T, heads, head_dim]
    index_queries: torch.Tensor  # [T, heads, dim] of an index


def write_heads_and_index(
    layer: AttentionLayer,
    qkv: torch.Tensor,
    index_queries: torch.Tensor,
    steps: HeadSteps,
    norms: tuple[Norm, Norm],
    table: RotaryTable | None,
    number: int,
    batch: PagedBatch,
    *,
    asks: bool = True,
    blocks: Blocks | None = None,
) -> BlockQueries:
    """Return queries of attention and of an index; write their keys, and values, to their slots.

    `qkv`: [T, all heads * head_dim], with contiguous rows; see `AttentionBackend.attend_projected`.
    `index_queries`: [T, (heads + 1) * dim], likewise: queries of the index, then its key, which
    turn as attention's. `norms`: RMS, of both. `number`: the layer of the cache with the index's
    keys, whose scale is that of the layer's. If not `asks`, the memory of the index's queries is
    left as it is.

    With `blocks` keys are written as they are projected, and those of blocks that the step
    completes over their last tokens'. A block turns as its first token does, by its position or,
    where these have several parts, by `KVCache.turns`.
    """
    query_norm, key_norm = norms
    (dim,), tokens, cache = key_norm.shape, len(index_queries), batch.cache
    places = cache.key_slots[layer.index], cache.value_slots[layer.index], batch.slots
    own = prepare_heads(qkv, steps, table, *places, scales=layer.kv_scales, codes=cache.codes)
    heads, rotary = index_queries.shape[1] // dim - 1, steps.rotary
    query = torch.empty(
        (tokens, heads, dim), dtype=index_queries.dtype, device=index_queries.device
    )
    block, keys, cos = count_heads(dim), cache.key_slots[number], own.arguments[4]
    vectors, constants = _describe_blocks(blocks, rotary, cos, keys, batch)
    programs = own.programs + 1 + (-(-heads // block) if asks else 0)
    kernels.write_heads_and_index[(tokens, programs)](
        *own.arguments,
        *(query, keys, index_queries, query_norm.weight, key_norm.weight),
        *vectors,
        *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
        *(query_norm.eps, key_norm.eps, index_queries.stride(0)),
        **own.constants,
        PROGRAMS=own.programs,
        INDEX_HEADS=heads,
        INDEX_DIM=dim,
        INDEX_PADDED_DIM=pad_dim(dim),
        INDEX_BLOCK=block,
        **constants,
        PAGE=batch.page,
        **overlap(index_queries.device),
    )
    return BlockQueries(own.query, query)


def _describe_blocks(
    blocks: Blocks | None,
    rotary: Rotary | None,
    cos: torch.Tensor,
    keys: torch.Tensor,
    batch: PagedBatch,
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return what the kernel reads of blocks, and constants; `cos`, `keys`: its own."""
    if blocks is None:
        return (cos, cos, keys, batch.slots), {"SIZE": 0, "BESIDE": 0, "TURNS": False}
    size, every = blocks
    constants = {"SIZE": size, "BESIDE": min(BESIDE, pad_dim(size))}
    turns, axes = batch.cache.turns, None if rotary is None else rotary.axes_of_numbers
    if turns is None or axes is None:
        return (every.cos, every.sin, keys, batch.slots), constants | {"TURNS": False}
    return (every.cos, every.sin, turns, axes), constants | {"TURNS": True}
