"""Options of the tiny checkpoints' configurations, by family: newer families.

They extend the table in `checkpoints.py`, which has the options common to all families.
"""

from __future__ import annotations

from typing import Any, Final

ABSENT: Final = object()  # removes one of the common options

_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 16,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
# Layers without a window have wider heads, and keys as values.
GEMMA4: Final[dict[str, Any]] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
}
# Like Gemma 4 E2B: each layer has embeddings of its own, the last layers no keys and values.
GEMMA4_E: Final[dict[str, Any]] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 512,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
# Like Gemma 4 26B-A4B: experts beside an MLP.
GEMMA4_MOE: Final[dict[str, Any]] = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
# Sparse activations, as in Gemma 3n's first layers, and MLPs of different widths.
GEMMA3N_SPARSE: Final[dict[str, Any]] = {
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0],
    "intermediate_size": [128, 96, 128, 64],
}
# Queries are scaled by position, from position 8 on.
_SHARPER: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_GRANITE: dict[str, Any] = {
    "num_local_experts": 4,
    "intermediate_size": 48,
    "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "afmoe": _EXPERTS
    | {
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "num_experts": 4,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "apertus": {},
    "exaone": {},
    "arcee": {},
    "biogpt": {"num_key_value_heads": ABSENT},
    "cwm": {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 24},
    "cohere_compass_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "logit_scale": 0.5,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0},
            "full_attention": None,
        },
    },
    "cohere2_moe": {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "sliding_window": 24,
        "intermediate_size": 48,
        "prefix_dense_intermediate_size": 64,
        "num_experts": 4,
        "num_shared_experts": 2,
        "expert_selection_fn": "sigmoid",
    },
    "deepseek_v4": {  # prompts are longer than windows, and have more entries than are selected
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 12,
        "sliding_window": 8,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 24},
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 5,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "moe_intermediate_size": 32,
        "intermediate_size": ABSENT,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.7,
        "hc_sinkhorn_iters": 3,  # of 20, each of which is interpreted for every token
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "dots1": _EXPERTS
    | {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "ernie4_5": {"head_dim": 16, "use_bias": True},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
    },
    "exaone_moe": _EXPERTS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "num_experts": 4,
        "n_group": 2,
        "topk_group": 1,
    },
    "exaone4": {"num_hidden_layers": 4, "sliding_window": 24},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48},
    "flint": _EXPERTS
    | {
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 24,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 500,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
    },
    "gemma4_text": GEMMA4 | {"final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": GEMMA4,
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": _EXPERTS
    | {
        "n_routed_experts": 4,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "sarvam_moe": _EXPERTS | {"num_hidden_layers": 3, "n_routed_experts": 4},
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt_neo": {
        "num_hidden_layers": ABSENT,
        "num_attention_heads": ABSENT,
        "num_key_value_heads": ABSENT,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 24,
    },
    "granite_swa": {
        "num_hidden_layers": 5,
        "sliding_window": 24,
        "layer_rope_theta": [0, 10000.0, 500.0, 0, 10000.0],
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.8,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE | {"shared_intermediate_size": 40},
    "granitemoe_swa": _GRANITE
    | {
        "num_hidden_layers": 3,
        "shared_intermediate_size": 40,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "layer_rope_theta": [0, 10000.0, 500000.0],
    },
    "helium": {"num_key_value_heads": 4, "head_dim": 16, "mlp_bias": True},
    "hyperclovax": {
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.8,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    },
    "hy_v3": _EXPERTS | {"num_experts": 4, "num_local_experts": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "internlm3": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "laguna": _EXPERTS
    | {
        "num_hidden_layers": 3,
        "num_attention_heads_per_layer": [4, 8, 8],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 24,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        "moe_routed_scaling_factor": 1.5,
        "moe_router_logit_softcapping": 2.0,
    },
    "mellum": _EXPERTS
    | {
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse", "dense"],
    },
    "kolibri1": _EXPERTS
    | {
        "num_local_experts": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": False,
    },
    "iquestcoder": {"head_dim": 16},
    "jais2": {},
    "ministral": {
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {"head_dim": 16, "rope_parameters": _SHARPER},
    "mimo_v2_flash": {
        "head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 5000000.0), ("sliding_attention", 10000.0))
        },
    },
    "mistral4": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "rope_parameters": _SHARPER | {"partial_rotary_factor": 0.5},
    },
    "minicpm3": _LATENT,
    "minimax_m2": {"num_local_experts": 4, "intermediate_size": 48, "head_dim": 16}
    | {"num_experts_per_tok": 2},
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "swiglu_limit": 1.5,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 24,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
    "nanochat": {},
    "openai-gpt": {"vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "persimmon": {"num_key_value_heads": ABSENT},
    "xglm": {
        "vocab_size": 512,
        "d_model": 64,
        "ffn_dim": 128,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 512,
        "pad_token_id": 1,
    },
    "nemotron": {"mlp_bias": True},
    "seed_oss": {"head_dim": 16},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 16, "num_attention_heads": ABSENT},
    "vaultgemma": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24},
    "solar_open": _EXPERTS | {"n_routed_experts": 4, "routed_scaling_factor": 1.5},
    # as it loads, transformers zeroes the row of padding, which is the head's as well
    "youtu": _LATENT | {"pad_token_id": None},
    "smollm3": {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
}
