"""Writing what attention by an index reads: K and V, and the index's keys, in kernels.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Final

import torch

from tgi_trio.shard.torch_backend.attention.interface import AttentionLayer
from tgi_trio.shard.torch_backend.attention.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.projecting import count_heads, write_projected
from tgi_trio.shard.torch_backend.attention.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.index_keys import join_blocks, write_index_heads
from tgi_trio.shard.torch_backend.layers.heads import HeadSteps, RotaryTable
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.rotary import Rotary

BESIDE: Final = 16  # tokens of a block whose keys are read at a time


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
    finished: bool = True,
) -> torch.Tensor:
    """Return queries [T, heads, dim], normalised and rotated; write keys to their slots.

    `projected`: [T, (heads + 1) * dim], with contiguous rows: queries, then the key. `norms`: RMS,
    of queries and of the key. `number`: the layer of the cache, with keys of this `scale`. If not
    `asks`, the queries' memory is left as it is; if not `finished`, keys are written as they are
    projected.
    """
    query_norm, key_norm = norms
    (dim,), tokens = key_norm.shape, len(projected)
    heads = projected.shape[1] // dim - 1
    turns = rotary is not None and table is not None
    cos, sin = (table.cos, table.sin) if turns and table is not None else (projected, projected)
    query = torch.empty((tokens, heads, dim), dtype=projected.dtype, device=projected.device)
    block = count_heads(dim)
    write_index_heads[(tokens, 1 + (-(-heads // block) if asks else 0))](
        query,
        batch.cache.key_slots[number],
        projected,
        cos,
        sin,
        batch.slots,
        query_norm.weight,
        key_norm.weight,
        query_norm.eps,
        key_norm.eps,
        scale,
        projected.stride(0),
        HEADS=heads,
        DIM=dim,
        PADDED_DIM=pad_dim(dim),
        ROTARY=rotary.spec.dim if rotary is not None and turns else 0,
        INTERLEAVED=rotary is not None and rotary.spec.interleaved,
        PLAIN_KEY=not finished,
        CODES=batch.cache.codes,
        BLOCK=block,
    )
    return query


def join_keys(
    norm: Norm,
    rotary: Rotary,
    every: RotaryTable,
    number: int,
    batch: PagedBatch,
    scale: float,
    size: int,
) -> None:
    """Write the keys of blocks of `size` tokens that a step completes, over their last tokens'.

    The keys of the step's tokens lie in layer `number` of the cache. `norm`: RMS, of a block's key;
    `every`: the rotations of all positions, in the dtype of the model. A block turns as its first
    token does, by its position or, where these have several parts, by `KVCache.turns`.
    """
    (dim,), turns, axes = norm.shape, batch.cache.turns, rotary.axes_of_numbers
    join_blocks[(len(batch.slots),)](
        batch.cache.key_slots[number],
        every.cos,
        every.sin,
        batch.slots if turns is None else turns,
        batch.slots if axes is None else axes,
        batch.slots,
        *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
        norm.weight,
        norm.eps,
        scale,
        every.cos,
        DIM=dim,
        PADDED_DIM=pad_dim(dim),
        ROTARY=rotary.spec.dim,
        INTERLEAVED=rotary.spec.interleaved,
        SIZE=size,
        BESIDE=min(BESIDE, pad_dim(size)),
        TURNS=turns is not None and axes is not None,
        PAGE=batch.page,
        CODES=batch.cache.codes,
    )
