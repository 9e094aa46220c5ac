"""The matrices of a layer with cross-attention to images."""

from __future__ import annotations

from tgi_trio.model.matrices.mlp import layer_matrix
from tgi_trio.model.matrices.references import (
    NormRef,
    TensorRef,
    run_of,
    split_inputs,
    split_outputs,
    whole_units,
)
from tgi_trio.model.matrices.roles import CrossAttentionRefs
from tgi_trio.model.specs.decoder import CrossAttentionSpec, DecoderSpec


def cross_attention_refs(
    spec: DecoderSpec, cross_attention: CrossAttentionSpec, prefix: str
) -> CrossAttentionRefs:
    """Return the text's side of a cross-attention at `prefix`; keys and values are the tower's."""
    names, heads, size, shape = spec.names, spec.heads, spec.head_dim, cross_attention.gate_shape
    query = layer_matrix(spec, prefix + names.query, heads * size, spec.hidden_size)
    output = layer_matrix(spec, prefix + names.output, spec.hidden_size, heads * size)
    norm = NormRef(f"{prefix}{names.query_norm}.weight", "", size, spec.norm_eps)
    return CrossAttentionRefs(
        query=split_outputs(query, "heads", size),
        query_norm=norm if cross_attention.query_norm else None,
        output=split_inputs(output, run_of("heads", heads, size)),
        gate=TensorRef(prefix + names.attention_gate, shape, whole_units(shape[0])),
        mlp_gate=TensorRef(prefix + names.mlp_gate, shape, whole_units(shape[0])),
    )
