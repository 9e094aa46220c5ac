"""The matrices of attention to one key per token, and of what makes entries of runs of tokens."""

from __future__ import annotations

from tgi_trio.model.matrices.mlp import layer_matrix
from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    NormRef,
    TensorRef,
    split_outputs,
    whole_linear,
    whole_units,
)
from tgi_trio.model.matrices.roles import CompressorRefs, SharedKeyRefs
from tgi_trio.model.specs.decoder import CompressionSpec, DecoderSpec, LayerSpec, SharedKeySpec

_KEYS, _WEIGHTS, _BIAS, _NORM = "kv_proj", "gate_proj", "position_bias", "kv_norm"


def shared_key_qkv(
    spec: DecoderSpec, prefix: str, shared: SharedKeySpec, layer: LayerSpec
) -> LinearRef:
    """Return the rows of the compressed query and of the key of the layer at `prefix`.

    Then those that compressors read, for each what is averaged and then weights; and those of the
    weights of an index's heads.
    """
    names, dim, compression = spec.names, spec.head_dim, layer.compression
    rows = [(names.query_down, shared.query_rank), (names.key, dim)]
    if compression is not None:
        width = compression.width(dim)
        rows += [(names.compressor + _KEYS, width), (names.compressor + _WEIGHTS, width)]
        if (index := compression.index) is not None:
            place, width = names.index_compressor, compression.width(index.dim)
            rows += [(place + _KEYS, width), (place + _WEIGHTS, width)]
            rows.append((names.index_weights, index.heads))
    pieces = []
    for name, count in rows:
        matrix = layer_matrix(spec, prefix + name, count, spec.hidden_size)
        pieces.append(LinearPiece(matrix, whole_units(count), whole_units(spec.hidden_size)))
    return LinearRef(tuple(pieces))


def shared_key_refs(
    spec: DecoderSpec, prefix: str, shared: SharedKeySpec, layer: LayerSpec
) -> SharedKeyRefs:
    """Return what follows the first projection in the layer at `prefix`."""
    names, dim, compression = spec.names, spec.head_dim, layer.compression
    query_up = layer_matrix(spec, prefix + names.query_up, spec.heads * dim, shared.query_rank)
    rows, inputs = shared.groups * shared.group_rank, spec.heads * dim // shared.groups
    output_down = layer_matrix(spec, prefix + names.output_down, rows, inputs)
    compressor = index_compressor = index_query = None
    if compression is not None:
        compressor = _compressor(spec, prefix + names.compressor, compression, dim)
        if (index := compression.index) is not None:
            place, size = prefix + names.index_compressor, index.heads * index.dim
            index_compressor = _compressor(spec, place, compression, index.dim)
            matrix = layer_matrix(spec, prefix + names.index_query, size, shared.query_rank)
            index_query = whole_linear(matrix)
    return SharedKeyRefs(
        query_norm=_norm(spec, prefix + names.query_norm, shared.query_rank),
        query_up=split_outputs(query_up, "heads", dim),
        key_norm=_norm(spec, prefix + names.key_norm, dim),
        output_down=split_outputs(output_down, "outputs", shared.group_rank),
        compressor=compressor,
        index_compressor=index_compressor,
        index_query=index_query,
    )


def _compressor(
    spec: DecoderSpec, place: str, compression: CompressionSpec, dim: int
) -> CompressorRefs:
    shape = (compression.rate, compression.width(dim))
    return CompressorRefs(
        bias=TensorRef(place + _BIAS, shape, whole_units(compression.rate)),
        norm=_norm(spec, place + _NORM, dim),
    )


def _norm(spec: DecoderSpec, path: str, size: int) -> NormRef:
    return NormRef(f"{path}.weight", "", size, spec.norm_eps)
