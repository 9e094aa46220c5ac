"""GLM 5.3 Flash: its metadata in the family's terms, and the places of its tensors."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    check_sigmoid,
    read_by_layer,
    read_count,
    read_counted_experts,
    read_expert_scale,
    read_first_sparse,
    read_limit,
    read_number,
    read_own_layers,
)

_TYPES: Final = "attention.indexer.types"  # of layers: whether they have their own choice
# Roles with their ending -> names in a layer.
PARTS: Final = {
    "indexer_compressor_gate.weight": "self_attn.indexer.index_kpool_compress_gate",
    "indexer_compressor_ape.weight": "self_attn.indexer.index_kpool_compress_ape",
    **{
        f"hc_{part}_{number}.weight": f"hc_{part}_{number}"
        for part in ("attn", "ffn")
        for number in ("fn", "base", "scale")
    },
}


def glm5_next(model: GgufModel, values: Values) -> Values:
    """GLM 5.3 Flash; layers with a KV head have latent attention, and the others a delta rule."""
    check_sigmoid(model)
    if model.get("rope.dimension_count", 0):
        raise ValueError("it turns by position")
    layers = read_own_layers(model, values)
    own = {"num_hidden_layers": layers, "num_nextn_predict_layers": 0}
    first = read_first_sparse(model, values | own)
    heads = read_by_layer(model, "attention.head_count_kv", layers)
    types = [1] * layers
    if model.get(_TYPES) is not None:
        types = read_by_layer(model, _TYPES, layers)
    return own | {
        "model_type": "glm5_next_text",
        SEPARATE_EXPERTS: True,
        "num_key_value_heads": values["num_attention_heads"],
        "layer_types": ["indexed_attention" if each else "linear_attention" for each in heads],
        "mlp_layer_types": ["dense"] * first + ["sparse"] * (layers - first),
        "indexer_types": ["full" if each else "shared" for each in types],
        "attention_bias": False,
        "q_lora_rank": read_count(model, "attention.q_lora_rank"),
        "kv_lora_rank": read_count(model, "attention.kv_lora_rank"),
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": read_count(model, "attention.key_length_mla"),
        "v_head_dim": read_count(model, "attention.value_length_mla"),
        "index_n_heads": read_count(model, "attention.indexer.head_count"),
        "index_head_dim": read_count(model, "attention.indexer.key_length"),
        "index_topk": read_count(model, "attention.indexer.top_k"),
        "index_kpool": read_count(model, "attention.indexer.kpool"),
        "index_kpool_always_select_tail": bool(
            model.get("attention.indexer.kpool_select_tail", True)
        ),
        "linear_num_heads": values["num_attention_heads"],
        "linear_head_dim": read_count(model, "kda.head_dim"),
        "linear_conv_kernel_dim": read_count(model, "ssm.conv_kernel"),
        "linear_lower_bound": model.get("kda.gate_lower_bound"),
        "hc_mult": read_count(model, "hyper_connection.count"),
        "hc_sinkhorn_iters": read_count(model, "hyper_connection.sinkhorn_iterations"),
        "hc_eps": read_number(model, "hyper_connection.epsilon", 1e-6),
        "swiglu_limit": read_limit(model, layers),
        "routed_scaling_factor": read_expert_scale(model),
        "norm_topk_prob": bool(model.get("expert_weights_norm", False)),
    } | read_counted_experts(
        model, first, "n_routed_experts", "num_experts_per_tok", "n_shared_experts"
    )  # fmt: skip
