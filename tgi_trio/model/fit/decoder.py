"""The models that the generic decoder computes: the spec's fields that it reads, and their values.

No torch in this file: other models are refused before anything is loaded.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.claims import ANY, CONVOLVED, Claims, every_field, find_unclaimed, only
from tgi_trio.model.fit.name_claims import NAMES
from tgi_trio.model.matrices import mixers as mixer_matrices
from tgi_trio.model.specs.activations import LEARNED, PLAIN
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.gated_streams import GatedStreamsSpec
from tgi_trio.model.specs.ngrams import NgramsSpec
from tgi_trio.model.specs.pooled_index import PooledIndexSpec

_ROTARY_KINDS = (
    "default",
    "linear",
    "dynamic",
    "llama3",
    "yarn",
    "longrope",
    "proportional",
    "divided",
)

CLAIMS: Final[Claims] = {
    **NAMES,
    **mixer_matrices.FIELDS,
    "DeltaRule.layout": only(
        *("grouped", "stacked", "mixed", "separate", "compressed", "low rank", "full rank"),
        refusal="layout {!r} of a delta rule is not known",
    ),
    "DeltaRule.gate": only("silu", "sigmoid", refusal="gate {!r} of a delta rule is not known"),
    "Mamba2.norm": only(
        *("none", "before gate", "behind gate"), refusal="norm {!r} of a Mamba is not known"
    ),
    "Mamba1.norm": only(
        *("none", "plain", "weighted"), refusal="norm {!r} of a first Mamba is not known"
    ),
    "DeltaRule.activation": CONVOLVED,
    "Mamba1.activation": CONVOLVED,
    "Mamba2.activation": CONVOLVED,
    "RecurrentGate.activation": only(
        *PLAIN, refusal=f"activation {{!r}} is not known; known are {', '.join(PLAIN)}"
    ),
    "DecoderSpec.family": ANY,
    "DecoderSpec.vocab_size": ANY,
    "DecoderSpec.hidden_size": ANY,
    "DecoderSpec.heads": ANY,
    "DecoderSpec.kv_heads": ANY,
    "DecoderSpec.head_dim": ANY,
    "DecoderSpec.mlp_width": ANY,
    "DecoderSpec.layers": ANY,
    "DecoderSpec.mtp": ANY,
    "DecoderSpec.names": ANY,
    "DecoderSpec.norm": only(
        *("rms", "rms_plus_one", "layer", "layer_plus_one"), refusal="norm {!r} is not known"
    ),
    "DecoderSpec.norm_eps": ANY,
    "DecoderSpec.post_norm_eps": ANY,
    "DecoderSpec.outer_norm": only(
        *(None, "rms", "rms_plus_one", "layer", "layer_plus_one"), refusal="norm {!r} is not known"
    ),
    "DecoderSpec.norm_bias": ANY,
    "DecoderSpec.norm_weight": ANY,
    "DecoderSpec.parallel": ANY,
    "DecoderSpec.query_key_norm": only(
        *("none", "head", "each", "whole", "bare", "plain"),
        refusal="query and key norm {!r} is not known",
    ),
    "DecoderSpec.gated_attention": ANY,
    "DecoderSpec.gated_heads": ANY,
    "DecoderSpec.gate_activation": only("sigmoid", "softplus", refusal="gates by {!r}"),
    "DecoderSpec.gated_values": ANY,
    "DecoderSpec.norm_gate_rank": ANY,
    "DecoderSpec.query_key_norm_bias": ANY,
    "DecoderSpec.norm_after_rotary": ANY,
    "DecoderSpec.qkv_layout": only(
        "separate", "stacked", "grouped", refusal="layout {!r} of queries and keys is not known"
    ),
    "DecoderSpec.qkv_bias": ANY,
    "DecoderSpec.output_bias": ANY,
    "DecoderSpec.mlp_bias": ANY,
    "DecoderSpec.head_bias": ANY,
    "DecoderSpec.transposed": ANY,
    "DecoderSpec.gated": ANY,
    "DecoderSpec.activation": only(
        *(*PLAIN, LEARNED),
        refusal=f"activation {{!r}} is not known; known are {', '.join((*PLAIN, LEARNED))}",
    ),
    "DecoderSpec.tied_head": ANY,
    "DecoderSpec.extra_tokens": ANY,
    "DecoderSpec.added_tokens": ANY,
    "DecoderSpec.embedding_width": ANY,
    "DecoderSpec.normalised_head": ANY,
    "DecoderSpec.normalised_embedding": ANY,
    "DecoderSpec.position_rows": ANY,
    "DecoderSpec.position_offset": ANY,
    "DecoderSpec.sine_positions": ANY,
    "DecoderSpec.alibi": ANY,
    "DecoderSpec.alibi_scale": ANY,
    "DecoderSpec.attention_soft_cap": ANY,
    "DecoderSpec.final_soft_cap": ANY,
    "DecoderSpec.embedding_scale": ANY,
    "DecoderSpec.residual_scale": ANY,
    "DecoderSpec.attention_scale": ANY,
    "DecoderSpec.gate_scale": ANY,
    "DecoderSpec.mlp_limit": ANY,
    "DecoderSpec.mlp_raised": ANY,
    "DecoderSpec.mlp_scale": ANY,
    "DecoderSpec.logit_scale": ANY,
    "DecoderSpec.attention_input_scale": ANY,
    "DecoderSpec.head_input_scale": ANY,
    "DecoderSpec.qkv_clip": ANY,
    "DecoderSpec.latent": ANY,
    "LatentSpec.rank": ANY,
    "LatentSpec.query_rank": ANY,
    "LatentSpec.plain_dim": ANY,
    "LatentSpec.rotary_dim": ANY,
    "LatentSpec.value_dim": ANY,
    "LatentSpec.bias": ANY,
    "LatentSpec.scale": ANY,
    "LatentSpec.doubled": ANY,
    "LatentSpec.norm_eps": ANY,
    "DecoderSpec.index": ANY,
    "IndexSpec.heads": ANY,
    "IndexSpec.dim": ANY,
    "IndexSpec.most": ANY,
    "IndexSpec.pool": ANY,
    "IndexSpec.rotary": ANY,
    "IndexSpec.last": ANY,
    "IndexSpec.norm_eps": ANY,
    "IndexSpec.reads_input": ANY,
    "DecoderSpec.shared_key": ANY,
    "SharedKeySpec.query_rank": ANY,
    "SharedKeySpec.groups": ANY,
    "SharedKeySpec.group_rank": ANY,
    "LayerSpec.compression": ANY,
    "CompressionSpec.rate": ANY,
    "CompressionSpec.overlaps": ANY,
    "CompressionSpec.index": ANY,
    "DecoderSpec.hyper": ANY,
    "HyperSpec.count": ANY,
    "HyperSpec.iterations": ANY,
    "HyperSpec.eps": ANY,
    "HyperSpec.added": ANY,
    "HyperSpec.added_eps": ANY,
    "LayerSpec.scale": ANY,
    "LayerSpec.window": ANY,
    "LayerSpec.chunk": ANY,
    "LayerSpec.chooses": ANY,
    "LayerSpec.ahead": ANY,
    "LayerSpec.rotary": ANY,
    "LayerSpec.experts": ANY,
    "LayerSpec.mixer": ANY,
    "LayerSpec.blocks": ANY,
    "LayerSpec.pooled": ANY,
    "DecoderSpec.gated_streams": ANY,
    "LayerSpec.ngrams": ANY,
    **every_field(PooledIndexSpec, GatedStreamsSpec, NgramsSpec),
    "BlockIndexSpec.dim": ANY,
    "BlockIndexSpec.size": ANY,
    "BlockIndexSpec.most": ANY,
    "BlockIndexSpec.local": ANY,
    "LayerSpec.attends": ANY,
    "LayerSpec.feeds": ANY,
    "LayerSpec.cross_attention": ANY,
    "CrossAttentionSpec.blind": only(
        "reads all", "feeds", refusal="tokens before all images that {!r} are not known"
    ),
    "CrossAttentionSpec.together": ANY,
    "CrossAttentionSpec.gate_shape": ANY,
    "CrossAttentionSpec.query_norm": ANY,
    "LayerSpec.sizes": ANY,
    "LayerSpec.keys_as_values": ANY,
    "LayerSpec.reads_layer": ANY,
    "LayerSpec.latent": ANY,
    "LayerSpec.index": ANY,
    "LayerSpec.index_place": ANY,
    "LayerSpec.sinks": ANY,
    "LayerSpec.mlp_width": ANY,
    "LayerSpec.beside": ANY,
    "LayerSpec.later": ANY,
    "LayerSpec.sparsity": ANY,
    "DecoderSpec.streams": ANY,
    "StreamsSpec.count": ANY,
    "StreamsSpec.active": ANY,
    "StreamsSpec.scaled": ANY,
    "StreamsSpec.detour_rank": ANY,
    "HeadSizes.kv_heads": ANY,
    "HeadSizes.dim": ANY,
    "HeadSizes.value_dim": ANY,
    "HeadSizes.heads": ANY,
    "DecoderSpec.value_norm": ANY,
    "DecoderSpec.value_scale": ANY,
    "DecoderSpec.per_layer_inputs": ANY,
    "PerLayerInputsSpec.width": ANY,
    "PerLayerInputsSpec.rows": ANY,
    "PerLayerInputsSpec.image_token": ANY,
    "LayerSpec.names": ANY,
    "LayerSpec.shared": ANY,
    "SharedBlock.layer": ANY,
    "SharedBlock.use": ANY,
    "SharedBlock.rank": ANY,
    "SharedBlock.attention_rank": ANY,
    "RotarySpec.dim": ANY,
    "RotarySpec.theta": ANY,
    "RotarySpec.kind": only(
        *_ROTARY_KINDS,
        refusal=f"rotary scaling {{!r}} is not known; known are {', '.join(_ROTARY_KINDS)}",
    ),
    "RotarySpec.interleaved": ANY,
    "RotarySpec.backwards": ANY,
    "RotarySpec.max_positions": ANY,
    "RotarySpec.sections": ANY,
    "RotarySpec.sections_alternate": ANY,
    "RotarySpec.parameters": ANY,  # `positions/rotary_frequencies.py` reads them
    "RotarySpec.query_scale": ANY,
    "RotarySpec.log_positions": ANY,
    "RotarySpec.learned": ANY,
    "QueryScale.beta": ANY,
    "QueryScale.step": ANY,
    "QueryScale.offset": ANY,
    "ExpertsSpec.count": ANY,
    "ExpertsSpec.per_token": ANY,
    "ExpertsSpec.width": ANY,
    "ExpertsSpec.normalise": ANY,
    "ExpertsSpec.shared_width": ANY,
    "ExpertsSpec.latent_width": ANY,
    "ExpertsSpec.routing": only(
        *("softmax", "biased-softmax", "sparse-mixer", "grouped-softmax"),
        *("grouped-sigmoid", "sigmoid", "sqrt-softplus"),
        refusal="routing {!r} to experts is not known",
    ),
    "ExpertsSpec.jitter": ANY,
    "ExpertsSpec.groups": ANY,
    "ExpertsSpec.groups_used": ANY,
    "ExpertsSpec.scale": ANY,
    "ExpertsSpec.result_scale": ANY,
    "ExpertsSpec.stacked": ANY,
    "ExpertsSpec.gate_up": only(
        "turns", "halves", "rows", refusal="layout {!r} of experts is not known"
    ),
    "ExpertsSpec.biased": ANY,
    "ExpertsSpec.weighs_inputs": ANY,
    "ExpertsSpec.limit": ANY,
    "ExpertsSpec.raised": ANY,
    "ExpertsSpec.bounds_opened": ANY,
    "ExpertsSpec.shared_limit": ANY,
    "ExpertsSpec.by_token": ANY,
    "ExpertsSpec.logit_cap": ANY,
    "ExpertsSpec.idle": ANY,
}


def check_supported(spec: DecoderSpec) -> None:
    """Raise ModelLoadError for a model that the decoder cannot compute."""
    if reason := find_unclaimed(spec, CLAIMS):
        raise ModelLoadError(
            f"config.json asks of model type {spec.family!r} what nobody has built here: {reason}."
        )
