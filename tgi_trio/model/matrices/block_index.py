"""The matrices of indexes that choose the blocks of tokens that are attended to."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.model.matrices.mlp import layer_matrix
from tgi_trio.model.matrices.references import LinearPiece, NormRef, run_of, whole_units
from tgi_trio.model.matrices.roles import BlockIndexRefs
from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.pooled_index import PooledIndexSpec


def block_index_pieces(
    spec: DecoderSpec, prefix: str, index: BlockIndexSpec, kv_heads: int
) -> Iterator[LinearPiece]:
    """Yield what a block index projects of its input: a query for each KV head, and its key."""
    names, hidden, dim = spec.names, spec.hidden_size, index.dim
    query = layer_matrix(spec, prefix + names.index_query, kv_heads * dim, hidden)
    yield LinearPiece(query, run_of("kv_heads", kv_heads, dim), whole_units(hidden))
    key = layer_matrix(spec, prefix + names.index_key, dim, hidden)
    yield LinearPiece(key, whole_units(dim), whole_units(hidden))


def pooled_index_piece(spec: DecoderSpec, prefix: str, index: PooledIndexSpec) -> LinearPiece:
    """Return what a pooled index projects of its input: all queries, then its key."""
    rows = (index.heads + 1) * index.dim
    both = layer_matrix(spec, prefix + spec.names.index_query, rows, spec.hidden_size)
    return LinearPiece(both, whole_units(rows), whole_units(spec.hidden_size))


def block_index_refs(
    spec: DecoderSpec, prefix: str, index: BlockIndexSpec | PooledIndexSpec
) -> BlockIndexRefs:
    """Return the norms of an index of blocks."""
    query, key = (
        NormRef(f"{prefix}{name}.weight", "", index.dim, spec.norm_eps)
        for name in (spec.names.index_query_norm, spec.names.index_norm)
    )
    return BlockIndexRefs(query, key)
