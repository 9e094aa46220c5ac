"""Writing the one key per token, and entries, to the cache before attention (DeepSeek V4).

Imported only where Triton is installed.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from tgi_trio.shard.torch_backend.attention.paged.paged_batch import PagedBatch
from tgi_trio.shard.torch_backend.attention.paged.tiles import pad_dim
from tgi_trio.shard.torch_backend.kernels.attention.shared_key import write_shared_keys
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable
from tgi_trio.shard.torch_backend.layers.attention.shared_key import SharedKey
from tgi_trio.shard.torch_backend.padding import next_power_of_2
from tgi_trio.shard.torch_backend.torch_device import overlap

COPIED: Final = 1024  # numbers that a program copies
_AVERAGED: Final = 4096  # numbers of tokens that a program averages at a time


class SharedKeyQueries(NamedTuple):
    """What the queries of a step's tokens are made of."""

    compressed: torch.Tensor  # [T, query_rank], normalised
    weights: torch.Tensor  # float32 [T, heads] of an index; without one there are none


class EntryPlaces(NamedTuple):
    """Where a layer's rows of the cache have what concerns entries, counted in numbers."""

    kept: int  # what they are made of
    made: int  # an entry, in the row of its run's last token
    index_kept: int
    index_made: int

    @classmethod
    def of(cls, shared: SharedKey) -> EntryPlaces:
        """Return the places of a layer; of what it does not have, the end of its rows."""
        kept, made, index_kept, index_made = (shared.dim,) * 4
        if shared.entries is not None:
            own, index = shared.entries.compressor, shared.entries.index
            made = kept + own.last.start
            index_kept = index_made = kept + 2 * own.width
            index_made += 0 if index is None else index.compressor.last.start
        return cls(kept, made, index_kept, index_made)


def write_keys(
    projected: torch.Tensor,
    shared: SharedKey,
    turning: Rotary,
    table: RotaryTable,
    keys: torch.Tensor,
    batch: PagedBatch,
) -> SharedKeyQueries:
    """Write keys, what entries are made of, and those of runs that end; return the rest.

    `projected`: [T, outputs] of the layer's first linear, with contiguous rows; `keys`: [slots,
    numbers], one layer of the cache. `turning`: the rotation, which must not depend on the
    sequence's length where there are entries.
    """
    sizes, tokens = shared.sizes(projected.shape[1]), len(projected)
    compressed = projected.new_empty((tokens, sizes.query))
    weights = projected.new_empty((tokens, sizes.heads), dtype=torch.float32)
    vectors, eps, constants = _describe_entries(shared, turning)
    programs = 2 + -(-sizes.kept // COPIED) + constants["ENTRIES"]
    write_shared_keys[(tokens, programs)](
        *(keys, compressed, weights, projected, table.cos, table.sin, batch.slots),
        *(batch.tables, batch.width, batch.contexts, batch.query_starts, batch.token_rows()),
        *vectors,
        *(shared.query_norm.weight, shared.key_norm.weight),
        *(shared.query_norm.eps, shared.key_norm.eps, *eps),
        *(turning.scale, projected.stride(0)),
        QUERY=sizes.query,
        PADDED_QUERY=pad_dim(sizes.query),
        DIM=shared.dim,
        PADDED_DIM=pad_dim(shared.dim),
        ROTARY=turning.spec.dim,
        KEPT=sizes.kept,
        HEADS=sizes.heads,
        PADDED_HEADS=pad_dim(sizes.heads) if sizes.heads else 0,
        KIND=shared.key_norm.kind,
        BLOCK=COPIED,
        **constants,
        PAGE=batch.page,
        **overlap(projected.device),
    )
    return SharedKeyQueries(compressed, weights)


def _describe_entries(
    shared: SharedKey, turning: Rotary
) -> tuple[tuple[torch.Tensor | None, ...], tuple[float, float], dict[str, Any]]:
    """Return what the kernel needs to know of entries: tensors, eps of norms and constants."""
    entries, norm = shared.entries, shared.key_norm
    if entries is None:
        weight = norm.weight
        none = dict.fromkeys(("RATE", "AVERAGED", "INDEX_BEGIN", "INDEX_AVERAGED"), 0)
        none |= {"ENTRIES": 0, "INDEX_DIM": 0, "INDEX_PADDED_DIM": 0}
        return (weight,) * 5, (norm.eps, norm.eps), none | {"OVERLAPPING": False}
    own, places, spec = entries.compressor, EntryPlaces.of(shared), entries.spec
    tokens = 2 * spec.rate if spec.overlaps else spec.rate
    index = own if entries.index is None else entries.index.compressor
    vectors = (turning.frequencies, own.bias, own.norm.weight, index.bias, index.norm.weight)
    constants = {
        **{"ENTRIES": len(entries.compressors()), "RATE": spec.rate},
        **{"OVERLAPPING": spec.overlaps, "AVERAGED": count_averaged(tokens, own.dim)},
        **{"INDEX_DIM": index.dim, "INDEX_PADDED_DIM": pad_dim(index.dim)},
        "INDEX_BEGIN": places.index_kept - places.kept,
        "INDEX_AVERAGED": count_averaged(tokens, index.dim),
    }
    return vectors, (own.norm.eps, index.norm.eps), constants


def count_averaged(tokens: int, dim: int) -> int:
    """Return how many of the tokens of an entry a program reads at a time, a power of two."""
    return min(max(1, _AVERAGED // pad_dim(dim)), next_power_of_2(tokens))
