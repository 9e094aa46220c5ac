"""Cases of newer architectures: which family they are, and what files of theirs can hold."""

from __future__ import annotations

from typing import Any

from tests.shard.gguf.cases_first import LLAMA3
from tgi_trio.testing.tiny_families import GEMMA3N_SPARSE, GEMMA4_E, GEMMA4_MOE

PLAIN_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
STEP = {
    "full_attention": LLAMA3 | {"partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
THREE_OF_FOUR = [*["sliding_attention"] * 3, "full_attention"]
UNSCALED = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
MINICPM3 = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 16}
LLAMA4 = {  # what no file states is as llama.cpp has it
    "num_hidden_layers": 4,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "no_rope_layer_interval": 4,
}
FALCON_NORM = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
NEMOTRON_LATENT = {"layers_block_type": ["mamba", "moe", "attention"], "moe_latent_size": 16}
SEEING = (
    "step3p7",
    "muse_glimmer",
    "glm5_next",
)  # families whose checkpoints have more than a text
# Architecture, with what tells cases of one apart -> our family, and what its checkpoint is given.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3next": ("qwen3_next", {}),
    "qwen35": ("qwen3_5_text", {}),
    "qwen35moe": ("qwen3_5_moe_text", {}),
    "kimi-linear": ("kimi_linear", {}),
    "gemma3n": ("gemma3n_text", GEMMA3N_SPARSE | {"vocab_size_per_layer_input": 512}),
    "gemma4": ("gemma4_text", {}),
    "gemma4 of few": ("gemma4_text", GEMMA4_E),
    "gemma4 with experts": ("gemma4_text", GEMMA4_MOE),
    "falcon-h1": ("falcon_h1", {}),
    "falcon-h1 with a norm": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]}),
    "nemotron_h_moe": ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "moe"]}),
    "nemotron_h_moe compressed": ("nemotron_h", NEMOTRON_LATENT),
    "jamba": ("jamba", {}),
    "mamba": ("mamba", {}),
    "mamba falcon": ("falcon_mamba", {}),
    "mamba2": ("mamba2", {}),
    "mistral3": ("ministral3", {}),
    "mistral4": ("mistral4", {}),
    "llama4": ("llama4_text", LLAMA4),
    "apertus": ("apertus", {"rope_parameters": PLAIN_ROTARY}),
    "mimo2": ("mimo_v2_flash", {"routed_scaling_factor": 1.0}),
    "deepseek32": ("deepseek_v32", {}),
    "glm-dsa": ("glm_moe_dsa", {}),
    "glm4 that sees": ("glm4", {"partial_rotary_factor": 0.5}),
    "hy_v3": ("hy_v3", {}),
    "granitehybrid bamba": ("bamba", {}),
    "exaone-moe": ("exaone_moe", {}),
    "afmoe": (
        "afmoe",
        {"num_hidden_layers": 5, "layer_types": [*THREE_OF_FOUR, "sliding_attention"]},
    ),
    "cohere2moe": ("cohere2_moe", {"norm_topk_prob": True}),
    "mellum": (
        "mellum",
        {
            "num_hidden_layers": 4,
            "layer_types": THREE_OF_FOUR,
            "mlp_layer_types": ["sparse"] * 4,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN_ROTARY},
        },
    ),
    "laguna": ("laguna", {"moe_router_logit_softcapping": 0.0}),
    "laguna with wide gates": (
        "laguna",
        {
            "moe_router_logit_softcapping": 0.0,
            "gating": "per-element",
            "rope_parameters": {
                "full_attention": YARN | {"partial_rotary_factor": 0.5, "attention_factor": 1.0},
                "sliding_attention": PLAIN_ROTARY | {"partial_rotary_factor": 1.0},
            },
        },
    ),
    "step35": ("step3p7", {"rope_parameters": STEP}),
    "muse-glimmer": (
        "muse_glimmer",
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "layer_rope_theta": [1e4, 1e4, 0],
            "post_norm_eps": 1e-8,
        },
    ),
    "minimax-m3": ("minimax_m3_vl_text", {"swiglu_limit": 7.0}),
    "deepseek4": ("deepseek_v4", {}),
    "glm5-next": (
        "glm5_next",
        {"linear_num_heads": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    ),
    "granite_swa": ("granite_swa", {"layer_rope_theta": [0, 1e4, 1e4, 0, 1e4]}),
    "granite_swa with experts": ("granitemoe_swa", {"layer_rope_theta": [1e4] * 3}),
    "granitemoe beside an MLP": ("granitemoeshared", {}),
    "bailingmoe": ("granitemoeshared", UNSCALED | {"shared_intermediate_size": 96}),
    "bailingmoe2": ("glm4_moe", {"use_qk_norm": True, "attention_bias": False}),
    "jais2": ("jais2", {}),
    "chatglm": ("glm", {}),
    "chatglm joined": ("glm", {}),
    "minicpm3": ("minicpm3", MINICPM3),
    "deepseek2 without experts": ("youtu", {}),
    "internlm2": ("llama", {}),
    "xverse": ("llama", {"num_key_value_heads": 4}),
    "exaone": ("llama", {"rope_parameters": LLAMA3}),
    "pangu-embedded": ("llama", {"attention_bias": True}),
    "minicpm": ("granite", {"attention_multiplier": 0.25}),
    "orion": ("stablelm", {"rope_parameters": PLAIN_ROTARY | {"partial_rotary_factor": 1.0}}),
    "maincoder": ("hunyuan_v1_dense", {}),
}
