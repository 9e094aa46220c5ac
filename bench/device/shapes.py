"""Shapes of models that are measured on a device: what their config.json would say."""

from __future__ import annotations

from typing import Any, Final

from bench.device.state_shapes import STATE_SHAPES
from bench.harness.checkpoints import SHAPES as SMALL_SHAPES

# Sources: config.json of Llama-3.1-8B and of Qwen3-30B-A3B, 4 of whose 48 layers are made.
_EIGHT_BILLION: dict[str, Any] = SMALL_SHAPES["L"] | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
_MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
# Models that attend to what an index chooses: a few layers of DeepSeek-V3.2, of MiniMax-M3 and of
# DeepSeek-V4 Flash, by transformers' defaults for their config.json, with dense MLPs or few
# experts, since attention over long contexts is what is measured of them.
_TOKENS: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 2048,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
}
_BLOCKS: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "num_hidden_layers": 3,
    "mlp_layer_types": ["dense"] * 3,
    "layer_types": ["minimax_m3_sparse"] * 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
    "vocab_size": 200064,
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 5000000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
}
_ENTRIES: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["moe"] * 2,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "partial_rotary_factor": 0.125,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "compress_rope_theta": 160000.0,
    "tie_word_embeddings": False,
}
# An interpreter takes milliseconds for a program.
_DRY: dict[str, Any] = SMALL_SHAPES["tiny"] | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
}
_DRY_HEADS: dict[str, Any] = {"num_attention_heads": 4, "vocab_size": 64, "hidden_size": 64}
_DRY_TOKENS = _TOKENS | {
    **_DRY_HEADS,
    **{"num_hidden_layers": 1, "first_k_dense_replace": 1, "intermediate_size": 32},
    **{"q_lora_rank": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16},
    **{"v_head_dim": 16, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 4},
}
_DRY_BLOCKS = _BLOCKS | {
    **_DRY_HEADS,
    **{"num_hidden_layers": 1, "mlp_layer_types": ["dense"], "layer_types": ["minimax_m3_sparse"]},
    **{"dense_intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 16},
    **{"index_n_heads": 2, "index_head_dim": 32, "index_block_size": 2, "index_topk_blocks": 2},
}
_DRY_ENTRIES = _ENTRIES | {
    **_DRY_HEADS,
    **{"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"head_dim": 32, "qk_rope_head_dim": 8, "partial_rotary_factor": 0.25, "q_lora_rank": 16},
    **{"o_groups": 2, "o_lora_rank": 16, "sliding_window": 4, "index_n_heads": 16},
    **{"index_head_dim": 16, "index_topk": 1},
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
}
_DRY_MIXTURE = _MIXTURE | {
    **_DRY_HEADS,
    **{"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32},
    **{"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}
SHAPES: Final = {
    "dry": _DRY,
    "tiny": SMALL_SHAPES["tiny"],
    "1B": SMALL_SHAPES["L"],
    "8B": _EIGHT_BILLION,
    "mixture": _MIXTURE,
    "tokens": _TOKENS,
    "blocks": _BLOCKS,
    "entries": _ENTRIES,
    "dry tokens": _DRY_TOKENS,
    "dry blocks": _DRY_BLOCKS,
    "dry entries": _DRY_ENTRIES,
    "dry mixture": _DRY_MIXTURE,
    **STATE_SHAPES,
}
LONG: Final = ("tokens", "blocks", "entries")  # whose attention is measured over long contexts
