"""Cases of older architectures: which family they are, and what files of theirs can hold."""

from __future__ import annotations

from typing import Any

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

OLMO3: dict[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
DEEPSEEK: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}

GPT_OSS: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}

EXAONE4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}

# Architecture -> our family, and what its checkpoint is given that such files can hold.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 32}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "baichuan": ("llama", {"head_dim": 16}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "arcee": ("arcee", {}),
    "bitnet": ("bitnet", {"tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}),
    "nemotron": ("nemotron", {}),
    "ernie4_5": ("ernie4_5", {}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "exaone4-windows": ("exaone4", EXAONE4),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen2vl": ("qwen2", {}),
    "qwen3vl": ("qwen3", {}),
    "qwen3vlmoe": ("qwen3_moe", {"norm_topk_prob": True}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "head_dim": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 16,
            "head_dim": 16,
            "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
        },
    ),
    "phi3": ("phi3", {}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "command-r": ("cohere", {}),
    "command-r-plus": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo3": ("olmo3", {"rope_parameters": OLMO3}),
    "phi2": ("phi", {}),
    "stablelm": ("stablelm", {"use_parallel_residual": False}),
    "stablelm-12b": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "qwen2moe": ("qwen2_moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "olmoe": ("olmoe", {"norm_topk_prob": False}),
    "phimoe": ("phimoe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-yarn": ("gpt_oss", {"rope_parameters": GPT_OSS}),
    "dbrx": ("dbrx", {}),
    "glm4moe": ("glm4_moe", {"use_qk_norm": True}),
    "dots1": ("dots1", {}),
    "ernie4_5-moe": ("ernie4_5_moe", {}),
    "minimax-m2": ("minimax_m2", {}),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "hunyuan-moe": ("hunyuan_v1_moe", {}),
    "granitemoe": ("granitemoe", {}),
    "granitehybrid": ("granitemoehybrid", {}),
    "granitehybrid-dense": ("granitemoehybrid", {"num_local_experts": 0}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", {}),
    "deepseek2": ("deepseek_v2", {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "deepseek2-groups": ("deepseek_v2", {"rope_parameters": DEEPSEEK}),
    "deepseek2-old": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek3": ("deepseek_v3", {}),
    "deepseek2-flash": ("glm4_moe_lite", {}),
    "gpt2": ("gpt2", {}),
    "starcoder": ("gpt_bigcode", {}),
    "gptneox": ("gpt_neox", {}),
    "gptneox-serial": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "bloom": ("bloom", {}),
    "falcon": ("falcon", {"new_decoder_architecture": False}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "mpt": ("mpt", {}),
}
# Cases that are not called as their architecture is.
ARCHITECTURE = {
    "mixtral": "llama",
    "llama3": "llama",
    "olmo3": "olmo2",
    "command-r-plus": "command-r",
    "stablelm-12b": "stablelm",
    "deepseek2-groups": "deepseek2",
    "deepseek2-old": "deepseek2",
    "deepseek3": "deepseek2",
    "deepseek2-flash": "deepseek2",
    "gptneox-serial": "gptneox",
    "gpt-oss-yarn": "gpt-oss",
    "exaone4-windows": "exaone4",
    "granitehybrid-dense": "granitehybrid",
    "falcon-40b": "falcon",
    "falcon-11b": "falcon",
}
