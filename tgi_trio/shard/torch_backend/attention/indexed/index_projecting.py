"""What an index beside latents makes of projections, in few launches: its keys and its queries.

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.indexed.selecting import Asking
from tgi_trio.shard.torch_backend.attention.paged.kv_writing import describe_latents
from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.attention import indexed_latents
from tgi_trio.shard.torch_backend.layers.attention.index import TokenIndex
from tgi_trio.shard.torch_backend.layers.attention.latent import LatentProjections
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.padding import next_power_of_2


class StepRotary(NamedTuple):
    """A rotary embedding, with a step's table."""

    rotary: Rotary
    table: RotaryTable


class ProjectedQueries(NamedTuple):
    """What is made of projections beside keys."""

    # [T, ...]: compressed queries, normalised (and behind that as they are, `LatentSpec.doubled`),
    # or queries as projected
    query: torch.Tensor
    asking: torch.Tensor | None  # [T, hidden]: what the index multiplies, where that is no query


def write_indexed_keys(
    projected: torch.Tensor,
    latent: LatentProjections,
    turning: StepRotary,
    index: TokenIndex,
    index_turning: StepRotary,
    key: torch.Tensor,
    batch: PagedBatch,
    hidden: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
) -> ProjectedQueries:
    """Write keys, those of the index and of its runs too; normalise what queries are made of.

    `projected`: [T, ...] as for `LatentProjections`, then as for `TokenIndex.split`, with
    contiguous rows; `key`: [slots, 1, at least rank + rotary_dim + kept], one layer of the cache,
    whose 8-bit numbers have a `scale`; `hidden` [T, hidden]: the layer's input, if the index reads
    it.
    """
    if latent.reads_only:
        return _write_index_keys(
            projected, latent, index, index_turning, key, batch, hidden, scale=scale
        )
    spec, norm, (rotary, table) = latent.spec, index.key_norm, index_turning
    width = projected.shape[1] - index.width - spec.rank - spec.rotary_dim
    query, compresses = projected[:, :width], latent.query_up is not None
    doubles = compresses and spec.doubled
    if compresses:
        query = projected.new_empty(len(projected), width * (2 if doubles else 1))
    norms, eps, constants = describe_latents(latent, turning.rotary, projected, key, width)
    index_queries, vectors, inner_eps, asking = _describe_asking(index, hidden, projected)
    run, bias = index.spec.pool, index.pool_bias
    programs = 2 + compresses + (asking["HIDDEN"] > 0)
    indexed_latents.write_indexed_latents[(len(projected), programs)](
        *(key, query, *vectors[:2], projected, *turning.table[:2], *table[:2], batch.slots),
        projected if bias is None else bias,
        *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
        *(*norms[:2], *vectors[2:], *norms[2:], norm.weight, norm.bias),
        *(*eps, norm.eps, inner_eps),
        scale,
        projected.stride(0),
        **constants,
        INDEX=index.spec.dim,
        PADDED_INDEX=pad_dim(index.spec.dim),
        HEADS=index.spec.heads,
        INDEX_ROTARY=rotary.spec.dim,
        BEGIN=index.begin,
        INDEX_INTERLEAVED=rotary.spec.interleaved,
        RUN=run,
        PADDED_RUN=next_power_of_2(run) if run else 0,
        RUN_BIAS=bias is not None,
        PAGE=batch.page,
        COMPRESSES=compresses,
        DOUBLES=doubles,
        **asking,
        CODES=batch.cache.codes,
    )
    return ProjectedQueries(query, index_queries)


def _write_index_keys(
    projected: torch.Tensor,
    latent: LatentProjections,
    index: TokenIndex,
    turning: StepRotary,
    key: torch.Tensor,
    batch: PagedBatch,
    hidden: torch.Tensor | None,
    *,
    scale: float,
) -> ProjectedQueries:
    """Do what `write_indexed_keys` does where latents are another layer's: for the index alone."""
    norm, (rotary, table), width = index.key_norm, turning, projected.shape[1] - index.width
    index_queries, vectors, eps, asking = _describe_asking(index, hidden, projected)
    indexed_latents.write_index_keys[(len(projected), 2 if asking["HIDDEN"] else 1)](
        *(key[..., index.place_in(latent.spec)], *vectors[:2], projected[:, width:]),
        *(*table[:2], batch.slots, norm.weight, norm.bias, *vectors[2:]),
        *(norm.eps, eps, scale, key.stride(0), projected.stride(0)),
        DIM=index.spec.dim,
        PADDED_DIM=pad_dim(index.spec.dim),
        ROTARY=rotary.spec.dim,
        BEGIN=index.begin,
        INTERLEAVED=rotary.spec.interleaved,
        **asking,
        CODES=batch.cache.codes,
    )
    return ProjectedQueries(projected[:, :width], index_queries)


def _describe_asking(
    index: TokenIndex, hidden: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor | None, tuple[torch.Tensor, ...], float, dict[str, Any]]:
    """Return what an index multiplies if it reads the layer's input, to be written; what kernels
    need to know of its norm: that, the input, weights, eps, constants. `like` stands for tensors
    that are missing.
    """
    norm = index.query_norm
    if hidden is None or norm is None:
        none: dict[str, Any] = {"HIDDEN": 0, "PADDED_HIDDEN": 0, "ASKING_KIND": ""}
        return hidden, (like,) * 4, 0.0, none | {"ASKING_GAIN": False, "ASKING_BIAS": False}
    index_queries, size = (
        torch.empty_like(hidden, memory_format=torch.contiguous_format),
        hidden.shape[1],
    )
    constants = {"HIDDEN": size, "PADDED_HIDDEN": pad_dim(size), "ASKING_KIND": norm.kind}
    constants |= {"ASKING_GAIN": norm.weight is not None, "ASKING_BIAS": norm.bias is not None}
    weights = (like if vector is None else vector for vector in (norm.weight, norm.bias))
    return index_queries, (index_queries, hidden.contiguous(), *weights), norm.eps, constants


def expand_both(
    latent: LatentProjections, index: TokenIndex, compressed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return expanded queries [T, heads * size], and those of an index, [T, heads, dim].

    None unless one launch makes both of compressed queries.
    """
    joined = index.joined
    if joined is None or not joined.serves(latent.query_up, index.query_up):
        return None
    query, index_queries = joined.multiply(compressed)
    return query, index.by_head(index_queries)


def ask_index(
    projected: torch.Tensor, queries: torch.Tensor, index: TokenIndex, turning: StepRotary
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
