"""The matrices and norms of a decoder: their names, shapes, pieces and units.

Written once for every backend: nothing else derives a tensor's name or shape from a spec.
"""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.matrices.block_index import (
    block_index_pieces,
    block_index_refs,
    pooled_index_piece,
)
from tgi_trio.model.matrices.cross_attention import cross_attention_refs
from tgi_trio.model.matrices.latent import (
    index_refs,
    latent_qkv,
    latent_refs,
    log_scale_refs,
)
from tgi_trio.model.matrices.mixers import mixer_refs
from tgi_trio.model.matrices.mlp import (
    beside_refs,
    dense_mlp_refs,
    experts_refs,
    layer_matrix,
    norm_ref,
)
from tgi_trio.model.matrices.ngrams import ngrams_refs
from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    NormRef,
    Split,
    TensorRef,
    Units,
    VectorRef,
    run_of,
    split_inputs,
    split_outputs,
    whole_linear,
    whole_units,
)
from tgi_trio.model.matrices.roles import (
    AttentionRefs,
    ExpertsRefs,
    LayerRefs,
    MlpRefs,
    NormGateRefs,
    OuterRefs,
)
from tgi_trio.model.matrices.shared_block import shared_refs
from tgi_trio.model.matrices.shared_key import shared_key_qkv, shared_key_refs
from tgi_trio.model.matrices.streams import (
    last_gates_refs,
    last_hyper_refs,
    layer_gates_refs,
    layer_hyper_refs,
    layer_streams_refs,
    per_layer_input_refs,
    per_layer_inputs_refs,
    streams_refs,
)
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec


def outer_refs(spec: DecoderSpec) -> OuterRefs:
    """Return the parts of a decoder before and after its layers."""
    names, hidden = spec.names, spec.hidden_size
    rows, width = spec.vocab_size - spec.added_tokens, spec.embedding_width or hidden
    table = MatrixRef(f"{names.embedding}.weight", rows, width)
    head = MatrixRef(
        table.name if spec.tied_head else f"{names.head}.weight",
        rows - spec.extra_tokens,
        width,
        f"{names.head}.bias" if spec.head_bias else "",
    )
    added = names.added_embedding, names.added_embedding if spec.tied_head else names.added_head
    positions = None
    if spec.position_rows and not spec.sine_positions:
        rows = spec.position_rows
        positions = whole_linear(MatrixRef(f"{names.positions}.weight", rows, hidden))
    widened = narrowed = None
    if spec.embedding_width:
        widened = whole_linear(MatrixRef(f"{names.embedding_in}.weight", hidden, width))
        narrowed = whole_linear(MatrixRef(f"{names.embedding_out}.weight", width, hidden))
    return OuterRefs(
        embedding=_vocabulary(spec, table, added[0]),
        positions=positions,
        embedding_norm=_embedding_norm(spec),
        final_norm=norm_ref(spec, "", names.final_norm, hidden, kind=spec.outer_norm),
        head=_vocabulary(spec, head, added[1]),
        rotary_factors=_rotary_factors(spec),
        embedding_in=widened,
        embedding_out=narrowed,
        per_layer_inputs=per_layer_inputs_refs(spec, spec.per_layer_inputs)
        if spec.per_layer_inputs
        else None,
        streams=streams_refs(spec, spec.streams) if spec.streams else None,
        hyper=last_hyper_refs(spec, spec.hyper) if spec.hyper and spec.names.last_streams else None,
        gates=last_gates_refs(spec, spec.gated_streams) if spec.gated_streams else None,
    )


def table_refs(spec: DecoderSpec) -> list[LinearRef]:
    """Return the matrices of which rows are looked up by tokens."""
    outer = outer_refs(spec)
    layers = (layer_refs(spec, index) for index in range(len(spec.layers)))
    tables = [refs.ngrams.table for refs in layers if refs.ngrams is not None]
    return [
        outer.embedding,
        *([outer.per_layer_inputs.table] if outer.per_layer_inputs else []),
        *tables,
    ]


def _rotary_factors(spec: DecoderSpec) -> TensorRef | None:
    turning = (layer.rotary for layer in spec.layers if layer.rotary and layer.rotary.learned)
    rotary = next(turning, None)
    if rotary is None:
        return None
    pairs = rotary.dim // 2
    return TensorRef(spec.names.rotary_factors, (pairs,), whole_units(pairs))


def _embedding_norm(spec: DecoderSpec) -> NormRef | None:
    kind = spec.outer_norm
    if spec.normalised_embedding:
        return NormRef("", "", spec.hidden_size, spec.norm_eps, kind)
    return norm_ref(spec, "", spec.names.embedding_norm, spec.hidden_size, kind=kind)


def _vocabulary(spec: DecoderSpec, first: MatrixRef, added: str) -> LinearRef:
    """Return a row per token: those of a matrix, followed by those of `added` tokens."""
    table = split_outputs(first, "vocabulary")
    if not spec.added_tokens:
        return table
    more = MatrixRef(f"{added}.weight", spec.added_tokens, spec.hidden_size)
    before, whole = 0, first.rows + more.rows
    pieces = []
    for piece in (*table.pieces, *split_outputs(more, "vocabulary").pieces):
        pieces.append(replace(piece, outputs=replace(piece.outputs, within=(before, whole))))
        before += piece.matrix.rows
    return LinearRef(tuple(pieces))


def layer_refs(spec: DecoderSpec, index: int) -> LayerRefs:
    """Return the parts of layer number `index`."""
    hidden, layer = spec.hidden_size, spec.layers[index]
    if layer.names is not None:
        spec = replace(spec, names=layer.names)
    names = spec.names
    prefix, experts, mixer = names.layer.format(index), layer.experts, layer.mixer
    shared, block = layer.shared, prefix  # the prefix of attention, MLP and their norms
    if shared is not None:
        block = names.layer.format(shared.layer) + names.block
    mlp: MlpRefs | ExpertsRefs | None = None
    if layer.feeds:
        if experts and not (layer.beside or layer.later):
            mlp = experts_refs(spec, block, experts)
        else:
            mlp = dense_mlp_refs(spec, block, layer.mlp_width or spec.mlp_width)

    def norm(name: str, there: bool, size: int = hidden, eps: float = 0.0) -> NormRef | None:
        return norm_ref(spec, block, name, size, eps) if there else None

    mixes = layer.attends or mixer is not None or layer.cross_attention is not None
    return LayerRefs(
        attention=_attention(spec, block, layer) if layer.attends else None,
        mixer=mixer_refs(mixer, prefix + names.mixer, hidden) if mixer else None,
        mlp=mlp,
        attention_norm=norm(names.attention_norm, mixes, _attention_inputs(spec, layer)),
        mlp_norm=norm(names.mlp_norm, layer.feeds),
        attention_post_norm=norm(names.attention_post_norm, mixes, eps=spec.post_norm_eps),
        mlp_post_norm=norm(names.mlp_post_norm, layer.feeds, eps=spec.post_norm_eps),
        attention_sum_norm=norm(names.attention_sum_norm, mixes),
        mlp_sum_norm=norm(names.mlp_sum_norm, layer.feeds),
        beside=beside_refs(spec, prefix, experts) if experts and layer.beside else None,
        later=experts_refs(spec, prefix, experts) if experts and layer.later else None,
        per_layer_input=per_layer_input_refs(spec, prefix, spec.per_layer_inputs)
        if spec.per_layer_inputs
        else None,
        streams=layer_streams_refs(spec, prefix, spec.streams) if spec.streams else None,
        scale=VectorRef(prefix + names.layer_scale, 1) if names.layer_scale else None,
        shared=shared_refs(spec, shared, prefix, block) if shared else None,
        cross_attention=cross_attention_refs(spec, layer.cross_attention, prefix)
        if layer.cross_attention
        else None,
        hyper=layer_hyper_refs(spec, prefix, spec.hyper) if spec.hyper else None,
        gates=layer_gates_refs(spec, prefix, spec.gated_streams) if spec.gated_streams else None,
        ngrams=ngrams_refs(spec, prefix, layer.ngrams) if layer.ngrams else None,
        attention_norm_gate=_norm_gate(spec, prefix, names.attention_norm_gate),
        mlp_norm_gate=_norm_gate(spec, prefix, names.mlp_norm_gate),
    )


def _norm_gate(spec: DecoderSpec, prefix: str, name: str) -> NormGateRefs | None:
    if not name:
        return None
    hidden, rank, place = spec.hidden_size, spec.norm_gate_rank, prefix + name
    return NormGateRefs(
        down=whole_linear(MatrixRef(f"{place}down.weight", rank, hidden)),
        up=whole_linear(MatrixRef(f"{place}up.weight", hidden, rank)),
    )


# --- attention ------------------------------------------------------------------------------------


def _attention(spec: DecoderSpec, prefix: str, layer: LayerSpec) -> AttentionRefs:
    names, latent, reads_only = spec.names, spec.latent_of(layer), layer.reads_layer is not None
    heads, own = spec.sizes(layer).heads, spec.sizes(layer).value_dim
    sinks = VectorRef(prefix + names.sinks, heads) if names.sinks and layer.sinks else None
    if spec.shared_key is not None:
        shared = spec.shared_key
        width = shared.groups * shared.group_rank
        output = layer_matrix(spec, prefix + names.output, spec.hidden_size, width)
        return AttentionRefs(
            qkv=shared_key_qkv(spec, prefix, shared, layer),
            output=split_inputs(output, run_of("outputs", shared.groups, shared.group_rank)),
            latent=None,
            index=None,
            query_norm=None,
            key_norm=None,
            sinks=sinks,
            shared_key=shared_key_refs(spec, prefix, shared, layer),
        )
    index = spec.index_of(layer) if layer.chooses else None
    value_dim = latent.value_dim if latent else own
    output = layer_matrix(
        spec, prefix + names.output, spec.hidden_size, heads * value_dim, bias=spec.output_bias
    )
    query_norm, key_norm = _query_key_norms(spec, prefix, layer)
    chooses = layer.blocks or layer.pooled
    return AttentionRefs(
        qkv=latent_qkv(spec, prefix, latent, index, reads_only=reads_only)
        if latent
        else _qkv(spec, prefix, layer),
        output=split_inputs(output, run_of("heads", heads, value_dim)),
        latent=latent_refs(spec, prefix, latent, reads_only=reads_only) if latent else None,
        index=index_refs(spec, prefix, latent, index) if latent and index else None,
        blocks=block_index_refs(spec, prefix, chooses) if chooses else None,
        query_norm=query_norm,
        key_norm=key_norm,
        sinks=sinks,
        query_scale=log_scale_refs(
            prefix, (names.query_log_scale, names.query_log_bias), run_of("heads", heads)
        ),
        inner_norm=norm_ref(spec, prefix, names.attention_inner_norm, heads * value_dim),
    )


def _attention_inputs(spec: DecoderSpec, layer: LayerSpec) -> int:
    """Return the number of features that attention reads."""
    return 2 * spec.hidden_size if layer.shared else spec.hidden_size


def _qkv(spec: DecoderSpec, prefix: str, layer: LayerSpec) -> LinearRef:
    """Return the rows of query, key and value heads, of gates and a block index if there are any.

    If K and V are another layer's there are only queries; if values are the keys there are no
    values.
    """
    names, sizes, biased = spec.names, spec.sizes(layer), spec.qkv_bias
    hidden = _attention_inputs(spec, layer)
    heads, kv_heads, size = sizes.heads, sizes.kv_heads, sizes.dim
    if spec.qkv_layout == "separate":
        kinds: list[tuple[str, Split, int, int]] = [(names.query, "heads", heads, size)]
        if layer.reads_layer is None:
            kinds.append((names.key, "kv_heads", kv_heads, size))
            if not layer.keys_as_values:
                kinds.append((names.value, "kv_heads", kv_heads, sizes.value_dim))
        matrices = [
            layer_matrix(spec, prefix + name, count * each, hidden, bias=biased)
            for name, _, count, each in kinds
        ]
        units = [run_of(split, count, each) for _, split, count, each in kinds]
    else:
        rows = (heads + 2 * kv_heads) * size
        matrices = [layer_matrix(spec, prefix + names.qkv, rows, hidden, bias=biased)] * 3
        units = _grouped_units(spec) if spec.qkv_layout == "grouped" else _stacked_units(spec)
    if spec.gated_attention and names.output_gate:
        matrices = [*matrices, layer_matrix(spec, prefix + names.output_gate, heads * size, hidden)]
        units = [*units, run_of("heads", heads, size)]
    elif spec.gated_attention:
        rows = 2 * heads * size
        both = layer_matrix(spec, prefix + names.query, rows, hidden, bias=biased)
        matrices = [both, *matrices[1:], both]
        queries, gates = (Units("heads", range(i, rows, 2 * size), size) for i in (0, size))
        units = [queries, *units[1:], gates]
    if spec.gated_heads:
        matrices = [*matrices, layer_matrix(spec, prefix + names.head_gate, heads, hidden)]
        units = [*units, run_of("heads", heads)]
    pairs = zip(matrices, units, strict=True)
    pieces = [LinearPiece(matrix, rows, whole_units(hidden)) for matrix, rows in pairs]
    if layer.blocks is not None:
        pieces += block_index_pieces(spec, prefix, layer.blocks, kv_heads)
    if layer.pooled is not None:
        pieces.append(pooled_index_piece(spec, prefix, layer.pooled))
    return LinearRef(tuple(pieces))


def _stacked_units(spec: DecoderSpec) -> list[Units]:
    """Return the units of one matrix with all queries, then all keys, then all values."""
    size, heads, kv_heads = spec.head_dim, spec.heads, spec.kv_heads
    return [
        run_of("heads", heads, size),
        run_of("kv_heads", kv_heads, size, first=heads * size),
        run_of("kv_heads", kv_heads, size, first=(heads + kv_heads) * size),
    ]


def _grouped_units(spec: DecoderSpec) -> list[Units]:
    """Return the units of a matrix with queries, keys and values grouped by KV head."""
    size, each = spec.head_dim, spec.heads // spec.kv_heads
    group = (each + 2) * size  # rows of a KV head: its queries, its key, its value
    end = spec.kv_heads * group
    queries = [first + i * size for first in range(0, end, group) for i in range(each)]
    return [
        Units("heads", queries, size),
        Units("kv_heads", range(each * size, end, group), size),
        Units("kv_heads", range((each + 1) * size, end, group), size),
    ]


def _query_key_norms(
    spec: DecoderSpec, prefix: str, layer: LayerSpec
) -> tuple[NormRef | None, NormRef | None]:
    """Return the norms of queries and keys; None for keys of another layer."""
    names, size = spec.names, spec.sizes(layer).dim
    if spec.query_key_norm in ("none", "bare", "plain"):
        return None, None
    if spec.query_key_norm == "whole":
        return (
            norm_ref(spec, prefix, names.query_norm, spec.sizes(layer).heads * size),
            norm_ref(spec, prefix, names.key_norm, spec.sizes(layer).kv_heads * size),
        )
    query, key = prefix + names.query_norm, prefix + names.key_norm
    if spec.query_key_norm == "each":
        kinds: list[tuple[str, Split, int]] = [
            (query, "heads", spec.heads),
            (key, "kv_heads", spec.sizes(layer).kv_heads),
        ]
        query_norm, key_norm = (
            NormRef(f"{name}.weight", "", size, spec.norm_eps, heads=run_of(split, count))
            for name, split, count in kinds
        )
        return query_norm, key_norm
    biases = (f"{query}.bias", f"{key}.bias") if spec.query_key_norm_bias else ("", "")
    query_norm = NormRef(f"{query}.weight", biases[0], size, spec.norm_eps)
    if layer.reads_layer is not None:
        return query_norm, None
    return query_norm, NormRef(f"{key}.weight", biases[1], size, spec.norm_eps)


def normalises_plainly(spec: DecoderSpec, layer: LayerSpec) -> bool:
    """Return whether a layer's query and key heads are normalised without weights."""
    turns = layer.rotary is not None and layer.rotary.dim > 0
    return spec.query_key_norm == "plain" or (spec.query_key_norm == "bare" and turns)
