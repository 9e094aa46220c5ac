"""Names of tensors in a family's published files that differ from those in `families/names.py`.

The latter are transformers' names of its modules; transformers renames tensors when it reads a
file, and some again when it writes one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

# By family: what is replaced in each name, one after another.
_DEEPSEEK_V4: Final = (
    (r"^embed\.", "embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^hc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.ape$", ".position_bias"),
    (r"\.(self_attn|compressor|indexer)\.norm\.", r".\1.kv_norm."),
    (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.wq_([ab])\.", r".q_\1_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.(shared_experts|experts\.\d+)\.w1\.", r".\1.gate_proj."),
    (r"\.(shared_experts|experts\.\d+)\.w2\.", r".\1.down_proj."),
    (r"\.(shared_experts|experts\.\d+)\.w3\.", r".\1.up_proj."),
    (r"(?<!_hc)\.scale$", ".weight_scale_inv"),
)
_HY_V4: Final = (
    (r"\.hc_pre\.hc_", ".hc_"),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
    (r"\.hc_attn_layer\.hc_(fn|base|scale)$", r".attn_hc.\1"),
    (r"\.hc_mlp_layer\.hc_(fn|base|scale)$", r".ffn_hc.\1"),
    (r"(^|\.)hc_head_(fn|base|scale)$", r"\1hc_\2"),
)
_MISTRAL_LARGE4: Final = (
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^lerope\.alpha$", "model.rotary_emb.alpha"),
    (r"^norm\.", "model.norm."),
    (r"^output\.", "lm_head."),
    (r"^layers\.", "model.layers."),
    (r"^(model\.layers\.\d+)\.attention\.", r"\1.self_attn."),
    (r"^(model\.layers\.\d+)\.attention_norm\.", r"\1.input_layernorm."),
    (r"^(model\.layers\.\d+)\.ffn_norm\.", r"\1.post_attention_layernorm."),
    (r"\.self_attn\.wq\.", ".self_attn.q_proj."),
    (r"\.self_attn\.wkv_a_with_mqa\.", ".self_attn.kv_a_proj_with_mqa."),
    (r"\.self_attn\.kv_a_norm\.", ".self_attn.kv_a_layernorm."),
    (r"\.self_attn\.wkv_b\.", ".self_attn.kv_b_proj."),
    (r"\.self_attn\.wo\.", ".self_attn.o_proj."),
    (r"\.ssmax_scaling\.s$", ".softmax_scaling.scale"),
    (r"\.ssmax_scaling\.b$", ".softmax_scaling.bias"),
    (r"^(model\.layers\.\d+)\.feed_forward\.", r"\1.mlp."),
    (r"^(model\.layers\.\d+)\.(gate|shared_experts|experts)\.", r"\1.mlp.\2."),
    (r"(\.mlp\..*?)\bw1\.", r"\1gate_proj."),
    (r"(\.mlp\..*?)\bw2\.", r"\1down_proj."),
    (r"(\.mlp\..*?)\bw3\.", r"\1up_proj."),
)
_PHI4: Final = ((r"\.base_layer\.", "."),)  # as it was published first
_FAMILIES: Final[Mapping[str, Sequence[tuple[re.Pattern[str], str]]]] = {
    "deepseek_v4": [(re.compile(found), name) for found, name in _DEEPSEEK_V4],
    "mistral_large4": [(re.compile(found), name) for found, name in _MISTRAL_LARGE4],
    "phi4_multimodal": [(re.compile(found), name) for found, name in _PHI4],
    "hy_v4": [(re.compile(found), name) for found, name in _HY_V4],
}


def rename_family(tensors: Mapping[str, T], family: str) -> dict[str, T]:
    """Return a checkpoint's tensors by the names of `families/names.py`."""
    changes = _FAMILIES.get(family, ())
    renamed = {}
    for name, stored in tensors.items():
        for found, other in changes:
            name = found.sub(other, name)
        renamed[name] = stored
    return renamed
