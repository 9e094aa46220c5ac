"""What an index beside latents makes of projections, in few launches: its keys and its queries.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.projecting import describe_latents
from tgi_trio.shard.torch_backend.attention.selecting import Asking
from tgi_trio.shard.torch_backend.attention.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels import indexed_latents
from tgi_trio.shard.torch_backend.layers.heads import RotaryTable
from tgi_trio.shard.torch_backend.layers.index import TokenIndex
from tgi_trio.shard.torch_backend.layers.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.rotary import Rotary


class Turn(NamedTuple):
    """A rotary embedding, with a step's table."""

    rotary: Rotary
    table: RotaryTable


def write_indexed_keys(
    projected: torch.Tensor,
    latent: LatentProjections,
    turning: Turn,
    index: TokenIndex,
    index_turning: Turn,
    key: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float = 1.0,
    codes: str = "",
) -> torch.Tensor:
    """Return queries; write keys, those of the index too.

    Compressed queries [T, query_rank] are normalised, others [T, heads * size] as projected.
    `projected`: [T, ...] as for `LatentProjections`, then as for `TokenIndex.split`, with
    contiguous rows; `key`: [slots, 1, at least rank + rotary_dim + kept], one layer of the cache,
    in the format `codes` with a `scale`; `slots`: int64 [T].
    """
    if latent.reads_only:
        return write_index_keys(
            projected, latent, index, index_turning, key, slots, scale=scale, codes=codes
        )
    spec, norm, (rotary, table) = latent.spec, index.key_norm, index_turning
    width = projected.shape[1] - index.width - spec.rank - spec.rotary_dim
    query = projected[:, :width]
    if latent.query_up is not None:
        query = torch.empty((len(projected), width), dtype=projected.dtype, device=projected.device)
    norms, eps, constants = describe_latents(latent, turning.rotary, projected, key, width)
    programs = 2 if latent.query_up is None else 3
    indexed_latents.write_indexed_latents[(len(projected), programs)](
        *(key, query, projected, *turning.table[:2], *table[:2], slots),
        *(*norms, norm.weight, norm.bias),
        *(*eps, norm.eps),
        scale,
        projected.stride(0),
        **constants,
        INDEX=index.spec.dim,
        PADDED_INDEX=pad_dim(index.spec.dim),
        HEADS=index.spec.heads,
        INDEX_ROTARY=rotary.spec.dim,
        BEGIN=index.begin,
        INDEX_INTERLEAVED=rotary.spec.interleaved,
        POOLS=index.spec.pool > 0,
        COMPRESSES=latent.query_up is not None,
        CODES=codes,
    )
    return query


def write_index_keys(
    projected: torch.Tensor,
    latent: LatentProjections,
    index: TokenIndex,
    turning: Turn,
    key: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    codes: str,
) -> torch.Tensor:
    """Do what `write_indexed_keys` does where latents are another layer's: for the index alone."""
    norm, (rotary, table), width = index.key_norm, turning, projected.shape[1] - index.width
    indexed_latents.write_index_keys[(len(projected),)](
        *(key[..., index.place_in(latent.spec)], projected[:, width:], *table[:2], slots),
        *(norm.weight, norm.bias, norm.eps, scale, key.stride(0), projected.stride(0)),
        DIM=index.spec.dim,
        PADDED_DIM=pad_dim(index.spec.dim),
        ROTARY=rotary.spec.dim,
        BEGIN=index.begin,
        INTERLEAVED=rotary.spec.interleaved,
        CODES=codes,
    )
    return projected[:, :width]


def expand_both(
    latent: LatentProjections, index: TokenIndex, compressed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return expanded queries [T, heads * size], and those of an index, [T, heads, dim].

    None unless one launch makes both of compressed queries.
    """
    joined = index.joined
    if joined is None or not joined.serves(latent.query_up, index.query_up):
        return None
    both, own = joined.whole(compressed), index.spec.heads * index.spec.dim
    query, asked = both.split((both.shape[1] - own, own), dim=-1)
    return query, index.by_head(asked)


def ask_index(
    projected: torch.Tensor, queries: torch.Tensor, index: TokenIndex, turning: Turn
) -> Asking:
    """Return an index's queries, which are scaled and rotated as they are read, and their weights.

    `projected` as for `write_indexed_keys`; `queries`: those of `TokenIndex.project`.
    """
    rotary, table = turning
    return Asking(
        queries,
        index.split(projected)[2],
        table,
        begin=index.begin,
        interleaved=rotary.spec.interleaved,
        scale=index.query_scale,
    )


def average_runs(
    index: TokenIndex, keys: torch.Tensor, batch: PagedBatch, scale: float, like: torch.Tensor
) -> None:
    """Write the keys of runs that end in this step, each in the place of its last token's key.

    `keys`: [slots, 2 * dim], a view of one layer of the cache, with the `scale` of 8-bit numbers;
    `like`: of the model's dtype.
    """
    spec, bias = index.spec, index.pool_bias
    indexed_latents.average_runs[(len(batch.slots),)](
        keys,
        keys if bias is None else bias,
        like,
        *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
        scale,
        keys.stride(0),
        DIM=spec.dim,
        PADDED_DIM=pad_dim(spec.dim),
        RUN=spec.pool,
        PADDED_RUN=1 << (spec.pool - 1).bit_length(),
        HAS_BIAS=bias is not None,
        PAGE=batch.page,
        CODES=batch.cache.codes,
    )
