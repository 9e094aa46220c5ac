"""What llama.cpp's converter makes of GLM 5.3 Flash; see `converted.py`."""

from __future__ import annotations

from typing import Any

from tests.shard.gguf.conversion import Array, Config, Tensors, common
from tests.shard.gguf.converted_states import modify_kimi

_INDEX = {
    "wq_b.weight": "indexer.attn_q_b.weight",
    "wk.weight": "indexer.attn_k.weight",
    "k_norm.weight": "indexer.k_norm.weight",
    "k_norm.bias": "indexer.k_norm.bias",
    "weights_proj.weight": "indexer.proj.weight",
    "index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "index_kpool_compress_ape": "indexer_compressor_ape.weight",
}


def describe(config: Config) -> dict[str, Any]:
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    limits = [config["swiglu_limit"]] * layers
    return common(config) | {
        "attention.head_count_kv": [int(kind != "linear_attention") for kind in kinds],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "kda.gate_lower_bound": config["linear_lower_bound"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "rope.dimension_count": 0,
        "attention.key_length": config["kv_lora_rank"],
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": config["qk_nope_head_dim"],
        "attention.value_length_mla": config["v_head_dim"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "attention.indexer.kpool": config["index_kpool"],
        "attention.indexer.kpool_select_tail": config["index_kpool_always_select_tail"],
        "attention.indexer.types": [kind == "full" for kind in config["indexer_types"]],
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": config["hc_eps"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_gating_func": 2,
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"],
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }


def modify(own: str, array: Array, config: Config) -> Tensors:
    """Of its text alone: its index, what mixes hidden states, and the rest as Kimi Linear's."""
    if not own.startswith(("model.language_model.", "lm_head.")):
        return
    own = own.replace("model.language_model.", "model.")
    place = ".".join(["blk", *own.split(".")[2:3]])
    _, _, index = own.partition(".indexer.")
    if index:
        yield f"{place}.{_INDEX[index]}", array
    elif ".hc_" in own:
        yield f"{place}.{own.split('.')[-1]}.weight", array
    elif own.endswith("e_score_correction_bias"):
        yield f"{place}.exp_probs_b.bias", array
    else:
        yield from modify_kimi(own, array, config)
