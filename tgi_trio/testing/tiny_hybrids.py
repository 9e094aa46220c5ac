"""Options of the tiny checkpoints' configurations, by family: families with states.

They extend the table in `checkpoints.py`, which has the options common to all families. Chunks of
scans are shorter than prompts.
"""

from __future__ import annotations

from typing import Any, Final

from tgi_trio.testing.tiny_families import ABSENT

_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_DELTA: dict[str, Any] = {  # the last of four layers has attention, the others the delta rule
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "bamba": {
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "falcon_h1": {
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.9,
        "embedding_multiplier": 1.5,
        "key_multiplier": 0.6,
        "lm_head_multiplier": 0.7,
        "mlp_multipliers": [0.9, 1.2],
        "ssm_in_multiplier": 1.3,
        "ssm_multipliers": [0.5, 0.8, 1.2, 1.1, 0.9],
        "ssm_out_multiplier": 0.75,
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "shared_intermediate_size": 48,
        "mamba_n_groups": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.8,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "jamba": _MOE
    | {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["sparse"] * 4,  # a dense one is saved under a name unknown on the hub
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "olmo_hybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "nemotron_h": {
        "num_hidden_layers": ABSENT,
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _MOE
    | _DELTA
    | {"shared_expert_intermediate_size": 32, "intermediate_size": ABSENT},
    "qwen4_exp_text": _MOE
    | _DELTA
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "shared_expert_intermediate_size": 32,
        "intermediate_size": ABSENT,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "hc_count": 3,
        "hc_lowrank": 24,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 3,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "lfm3": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        "head_dim": 32,
        "sliding_window": 24,
    },
    "lfm2_moe": _MOE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "conv_bias": True,
    },
    "qwen3_next": _MOE | _DELTA | {"shared_expert_intermediate_size": 32},
    "zamba2": {  # three layers use two shared blocks: the last has the first one's
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", *["hybrid"] * 2],
        "num_hidden_layers": 5,
        "num_key_value_heads": ABSENT,
        "head_dim": ABSENT,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "adapter_rank": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 16,
        "chunk_size": 16,
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "lru_width": 64,
        "attention_window_size": 32,
    },
}
