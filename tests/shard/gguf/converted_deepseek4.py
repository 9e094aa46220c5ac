"""What llama.cpp's converter makes of DeepSeek V4; see `converted.py`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.shard.gguf.conversion import Array, Config, Tensors, common

# Names in a layer, or outside of them -> llama.cpp's.
_NAMES = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn.wq_a": "attn_q_a",
    "attn.q_norm": "attn_q_a_norm",
    "attn.wq_b": "attn_q_b",
    "attn.wkv": "attn_kv",
    "attn.norm": "attn_kv_a_norm",
    "attn.wo_a": "attn_output_a",
    "attn.wo_b": "attn_output_b",
    "attn.attn_sink": "attn_sinks",
    "attn.compressor.wkv": "attn_compressor_kv",
    "attn.compressor.wgate": "attn_compressor_gate",
    "attn.compressor.ape": "attn_compressor_ape",
    "attn.compressor.norm": "attn_compressor_norm",
    "attn.indexer.compressor.wkv": "indexer_compressor_kv",
    "attn.indexer.compressor.wgate": "indexer_compressor_gate",
    "attn.indexer.compressor.ape": "indexer_compressor_ape",
    "attn.indexer.compressor.norm": "indexer_compressor_norm",
    "attn.indexer.wq_b": "indexer.attn_q_b",
    "attn.indexer.weights_proj": "indexer.proj",
    "ffn.gate": "ffn_gate_inp",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid",
    "ffn.experts.w1": "ffn_gate_exps",
    "ffn.experts.w2": "ffn_down_exps",
    "ffn.experts.w3": "ffn_up_exps",
    "ffn.shared_experts.w1": "ffn_gate_shexp",
    "ffn.shared_experts.w2": "ffn_down_shexp",
    "ffn.shared_experts.w3": "ffn_up_shexp",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "hc_head.hc_fn": "output_hc_fn",
    "hc_head.hc_base": "output_hc_base",
    "hc_head.hc_scale": "output_hc_scale",
    **{
        name: name
        for part in ("attn", "ffn")
        for name in (f"hc_{part}_fn", f"hc_{part}_base", f"hc_{part}_scale")
    },
}


def describe(config: Config) -> dict[str, Any]:
    rope, layers = config["rope_parameters"], config["num_hidden_layers"]
    rates = config["compress_rates"]
    head = config["head_dim"]
    said = common(dict(config) | {"rope_parameters": rope["compress"]})
    limits = [config["swiglu_limit"]] * layers
    return said | {
        "feed_forward_length": config["moe_intermediate_size"],
        "rope.freq_base": rope["main"]["rope_theta"],
        "rope.dimension_count": int(head * rope["main"]["partial_rotary_factor"]),
        "attention.compress_rope_freq_base": rope["compress"]["rope_theta"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.output_group_count": config["o_groups"],
        "attention.output_lora_rank": config["o_lora_rank"],
        "attention.sliding_window": config["sliding_window"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        "attention.compress_ratios": [rates.get(kind, 0) for kind in config["layer_types"]],
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": config["hc_eps"],
        "hash_layer_count": config["mlp_layer_types"].count("hash_moe"),
        "expert_count": config["n_routed_experts"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": 1,
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "expert_weights_scale": config["routed_scaling_factor"],
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }


def modify(own: str, array: Array, config: Config) -> Tensors:
    """Tables of experts are whole numbers."""
    found = re.fullmatch(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+?)(\.weight)?", own)
    assert found is not None
    place = "" if found[1] is None else f"blk.{found[1]}."
    if found[2].endswith("tid2eid"):
        array = array.astype(np.int32)
    if own.endswith("ffn.gate.bias"):
        yield f"{place}exp_probs_b.bias", array
    else:
        yield f"{place}{_NAMES[found[2]]}.weight", array
