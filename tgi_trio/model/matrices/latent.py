"""The matrices of latent attention, and of an index over latents."""

from __future__ import annotations

from tgi_trio.model.matrices.mlp import layer_matrix, norm_ref
from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    NormRef,
    TensorRef,
    Units,
    run_of,
    split_outputs,
    whole_linear,
    whole_units,
)
from tgi_trio.model.matrices.roles import IndexRefs, LatentRefs, LogScaleRefs
from tgi_trio.model.specs.decoder import DecoderSpec, IndexSpec, LatentSpec


def latent_qkv(
    spec: DecoderSpec,
    prefix: str,
    latent: LatentSpec,
    index: IndexSpec | None,
    *,
    reads_only: bool = False,
) -> LinearRef:
    """Return the rows of queries or their compression, of the latent, and of the rotated key.

    The latter two are missing in a layer that `reads_only` those of another.

    With an index, those of its key and of its heads' weights follow, and of weights in a run; last
    come gates of values or of heads.
    """
    names, hidden, size = spec.names, spec.hidden_size, latent.plain_dim + latent.rotary_dim
    if latent.query_rank:
        rank = latent.query_rank
        query = layer_matrix(spec, prefix + names.query_down, rank, hidden, bias=latent.bias)
        units = whole_units(rank)
    else:
        query = layer_matrix(spec, prefix + names.query, spec.heads * size, hidden)
        units = run_of("heads", spec.heads, size)
    width = latent.rank + latent.rotary_dim
    inputs = whole_units(hidden)
    pieces = [LinearPiece(query, units, inputs)]
    if not reads_only:
        down = layer_matrix(spec, prefix + names.latent_down, width, hidden, bias=latent.bias)
        pieces.append(LinearPiece(down, whole_units(width), inputs))
    if index is not None:
        for name, rows in ((names.index_key, index.dim), (names.index_weights, index.heads)):
            own = layer_matrix(spec, prefix + name, rows, hidden)
            pieces.append(LinearPiece(own, whole_units(rows), inputs))
        if index.pool:
            gate = MatrixRef(prefix + names.index_pool_gate, index.dim, hidden)
            pieces.append(LinearPiece(gate, whole_units(index.dim), inputs))
    if spec.gated_values and not latent.doubled:
        width = spec.heads * latent.value_dim
        gate = layer_matrix(spec, prefix + names.value_gate, width, hidden)
        pieces.append(LinearPiece(gate, run_of("heads", spec.heads, latent.value_dim), inputs))
    elif spec.gated_heads:
        gate = layer_matrix(spec, prefix + names.head_gate, spec.heads, hidden)
        pieces.append(LinearPiece(gate, run_of("heads", spec.heads), inputs))
    return LinearRef(tuple(pieces))


def index_refs(spec: DecoderSpec, prefix: str, latent: LatentSpec, index: IndexSpec) -> IndexRefs:
    """Return what follows an index's first projection in the layer at `prefix`."""
    names, key = spec.names, prefix + spec.names.index_norm
    inputs = spec.hidden_size if index.reads_input else latent.query_rank
    up = layer_matrix(spec, prefix + names.index_query, index.heads * index.dim, inputs)
    before, norm = prefix + names.index_query_norm, None
    if index.reads_input:
        norm = NormRef(f"{before}.weight", f"{before}.bias", inputs, index.norm_eps, "layer")
    return IndexRefs(
        query_up=whole_linear(up),
        key_norm=NormRef(f"{key}.weight", f"{key}.bias", index.dim, index.norm_eps),
        pool_bias=_pool_bias(spec, prefix, index),
        query_norm=norm,
        query_scale=log_scale_refs(
            prefix, (names.index_log_scale, names.index_log_bias), whole_units(index.heads)
        ),
    )


def log_scale_refs(prefix: str, names: tuple[str, str], heads: Units) -> LogScaleRefs | None:
    """Return how queries of `heads`, one unit each, are scaled by position; None: they are not."""
    if not names[0]:
        return None
    shape = (len(heads.starts) * heads.size,)
    scale, bias = (TensorRef(prefix + name, shape, heads) for name in names)
    return LogScaleRefs(scale, bias)


def _pool_bias(spec: DecoderSpec, prefix: str, index: IndexSpec) -> TensorRef | None:
    if not index.pool:
        return None
    shape = (index.pool, index.dim)
    return TensorRef(prefix + spec.names.index_pool_bias, shape, whole_units(index.pool))


def latent_refs(
    spec: DecoderSpec, prefix: str, latent: LatentSpec, *, reads_only: bool = False
) -> LatentRefs:
    """Return what follows the first projection in the layer at `prefix`; see `latent_qkv`."""
    names, heads = spec.names, spec.heads
    query_up = query_norm = gate_up = None
    if rank := latent.query_rank:
        size = latent.plain_dim + latent.rotary_dim
        if latent.doubled:
            query_up, gate_up = _doubled(spec, prefix, latent, size)
        else:
            matrix = layer_matrix(spec, prefix + names.query_up, heads * size, rank)
            query_up = split_outputs(matrix, "heads", size)
        query_norm = norm_ref(spec, prefix, names.query_norm, rank, latent.norm_eps)
    each = latent.plain_dim + latent.value_dim
    latent_norm = None
    if not reads_only:
        latent_norm = norm_ref(spec, prefix, names.latent_norm, latent.rank, latent.norm_eps)
    if latent_norm is None and not reads_only:
        raise ValueError(f"{spec.family}: names lack latent_norm")
    return LatentRefs(
        query_up=query_up,
        gate_up=gate_up,
        query_norm=query_norm,
        latent_norm=latent_norm,
        up=split_outputs(
            layer_matrix(spec, prefix + names.latent_up, heads * each, latent.rank), "heads", each
        ),
    )


def _doubled(
    spec: DecoderSpec, prefix: str, latent: LatentSpec, size: int
) -> tuple[LinearRef, LinearRef]:
    """Return queries and gates, which one matrix has by turns; see `LatentSpec.doubled`."""
    each, inputs = size + latent.value_dim, 2 * latent.query_rank
    rows = spec.heads * each
    both = layer_matrix(spec, prefix + spec.names.query_up, rows, inputs)
    queries = Units("heads", range(0, rows, each), size)
    gates = Units("heads", range(size, rows, each), latent.value_dim)
    whole = whole_units(inputs)
    return (
        LinearRef((LinearPiece(both, queries, whole),)),
        LinearRef((LinearPiece(both, gates, whole),)),
    )
