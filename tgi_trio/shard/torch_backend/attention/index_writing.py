"""Writing what attention by an index reads: K and V, and the index's keys, in kernels.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.projecting import count_heads, write_projected
from tgi_trio.shard.torch_backend.attention.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.index_keys import write_index_heads
from tgi_trio.shard.torch_backend.layers.heads import HeadSteps, RotaryTable
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.rotary import Rotary

BESIDE: Final = 16  # tokens of a block whose keys are read at a time


class Blocks(NamedTuple):
    """Blocks of tokens that have a key each."""

    size: int
    every: RotaryTable  # the rotations of all positions, in the dtype of the model


def write_heads(
    layer: AttentionLayer,
    qkv: torch.Tensor,
    steps: HeadSteps,
    table: RotaryTable | None,
    batch: PagedBatch,
) -> torch.Tensor:
    """Return queries [T, heads, head_dim] of projections `qkv`; write keys and values.

    `qkv`: [T, all heads * head_dim], with contiguous rows; see `AttentionBackend.attend_projected`.
    """
    cache, scales = batch.cache, layer.kv_scales
    places = cache.key_slots[layer.index], cache.value_slots[layer.index], batch.slots
    return write_projected(qkv, steps, table, *places, scales=scales, codes=cache.codes)


def write_index(
    projected: torch.Tensor,
    norms: tuple[Norm, Norm],
    rotary: Rotary | None,
    table: RotaryTable | None,
    number: int,
    batch: PagedBatch,
    scale: float,
    *,
    asks: bool = True,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """Return queries [T, heads, dim], normalised and rotated; write keys to their slots.

    `projected`: [T, (heads + 1) * dim], with contiguous rows: queries, then the key. `norms`: RMS,
    of queries and of the key. `number`: the layer of the cache, with keys of this `scale`. If not
    `asks`, the queries' memory is left as it is.

    With `blocks` keys are written as they are projected, and those of blocks that the step
    completes over their last tokens'. A block turns as its first token does, by its position or,
    where these have several parts, by `KVCache.turns`.
    """
    query_norm, key_norm = norms
    (dim,), tokens = key_norm.shape, len(projected)
    heads = projected.shape[1] // dim - 1
    turns = rotary is not None and table is not None
    cos, sin = (table.cos, table.sin) if turns and table is not None else (projected, projected)
    query = torch.empty((tokens, heads, dim), dtype=projected.dtype, device=projected.device)
    block, keys = count_heads(dim), batch.cache.key_slots[number]
    vectors, constants = _describe_blocks(blocks, rotary, cos, keys, batch)
    write_index_heads[(tokens, 1 + (-(-heads // block) if asks else 0))](
        query,
        keys,
        projected,
        cos,
        sin,
        batch.slots,
        query_norm.weight,
        key_norm.weight,
        *vectors,
        *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
        query_norm.eps,
        key_norm.eps,
        scale,
        projected.stride(0),
        HEADS=heads,
        DIM=dim,
        PADDED_DIM=pad_dim(dim),
        ROTARY=rotary.spec.dim if rotary is not None and turns else 0,
        INTERLEAVED=rotary is not None and rotary.spec.interleaved,
        **constants,
        PAGE=batch.page,
        CODES=batch.cache.codes,
        BLOCK=block,
    )
    return query


def _describe_blocks(
    blocks: Blocks | None,
    rotary: Rotary | None,
    cos: torch.Tensor,
    keys: torch.Tensor,
    batch: PagedBatch,
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return what `write_index_heads` reads of blocks, and constants; `cos`, `keys`: its own."""
    if blocks is None:
        return (cos, cos, keys, batch.slots), {"SIZE": 0, "BESIDE": 0, "TURNS": False}
    size, every = blocks
    constants = {"SIZE": size, "BESIDE": min(BESIDE, pad_dim(size))}
    turns, axes = batch.cache.turns, None if rotary is None else rotary.axes_of_numbers
    if turns is None or axes is None:
        return (every.cos, every.sin, keys, batch.slots), constants | {"TURNS": False}
    return (every.cos, every.sin, turns, axes), constants | {"TURNS": True}
