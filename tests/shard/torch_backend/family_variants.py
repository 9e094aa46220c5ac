"""Variants of families that take another path through their specs than `tiny_families` do."""

from __future__ import annotations

from typing import Any

from tgi_trio.testing.tiny_families import GEMMA3N_SPARSE, GEMMA4_E, GEMMA4_MOE

# DeepSeek's: scores are scaled as well.
SHARPER = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    ("llama", {"hidden_size": 512, "intermediate_size": 1024}),  # large enough to be packed
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96}),
    ("qwen3", {"attention_bias": True}),
    ("gemma", {"hidden_act": "silu"}),
    ("cohere_compass_text", {"head_dim": 32}),
    ("gemma3_text", {"attn_logit_softcapping": 1.7}),  # which Gemma 2 has
    ("phimoe", {"num_experts_per_tok": 3}),  # two are used, whatever it says
    ("phi3", {"sliding_window": 20}),
    ("stablelm", {"use_parallel_residual": True}),
    ("stablelm", {"qk_layernorm": True}),
    ("cohere", {"use_qk_norm": True}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", {"multi_query": False, "parallel_attn": False}),
    ("starcoder2", {"use_bias": False, "num_attention_heads": 4}),
    ("bloom", {"n_head": 6, "hidden_size": 96}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("olmoe", {"norm_topk_prob": True}),
    (  # no layer turns that sees everything; other norms, sums and weights
        "cohere2_moe",
        {
            "prefix_dense_sliding_window_pattern": 4,
            "rms_norm_eps": 1e-5,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "softmax",
        },
    ),
    ("afmoe", {"attention_bias": True, "mup_enabled": False}),
    ("laguna", {"gating": "per-element", "attention_bias": True}),
    ("granitemoe_swa", {"shared_intermediate_size": 0, "layer_rope_theta": None}),
    *((family, {"head_dim": 32}) for family in ("bamba", "cohere2", "phimoe", "smollm3")),
    ("dbrx", {"ffn_config": {"ffn_hidden_size": 48, "moe_normalize_expert_weights": None}}),
    ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "attention_bias": True}),
    ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True}),
    ("deepseek_v3", {"rope_parameters": SHARPER}),
    ("deepseek_v32", {"index_topk": 512}),  # more than there is
    (
        "deepseek_v4",
        {
            "index_topk": 512,
            "sliding_window": 20,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 20,
            "o_groups": 4,
            "rope_parameters": None,
            "tie_word_embeddings": True,
            "mlp_layer_types": ["moe", "hash_moe", "hash_moe", "moe"],
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        },
    ),
    ("minimax_m3_vl_text", {"index_topk_blocks": 64}),  # more than there are
    ("minimax_m3_vl_text", {"index_local_blocks": 2, "index_block_size": 7}),
    (  # of blocks wider than the cache's, none of them taken in any case
        "minimax_m3_vl_text",
        {"index_local_blocks": 0, "index_block_size": 24, "index_topk_blocks": 1},
    ),
    ("glm_moe_dsa", {"rope_parameters": SHARPER, "indexer_types": ["full", "shared", "shared"]}),
    (
        "hy_v4",
        {
            "index_topk": 512,
            "rope_parameters": SHARPER,
            "attention_bias": True,
            "norm_topk_prob": False,
            "hc_mult": 2,
        },
    ),
    (  # attention and an MLP alone
        "granitemoehybrid",
        {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
        },
    ),
    (  # nothing is normalised or scaled, and layers turn that see everything
        "llama4_text",
        {
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
        },
    ),
    ("hyperclovax", {"use_post_norm": False, "attention_multiplier": None, "mlp_bias": True}),
    ("granite_swa", {"layer_rope_theta": None, "attention_bias": True}),
    ("minicpm3", {"q_lora_rank": None, "scale_depth": None, "dim_model_base": None}),
    ("minicpm3", {"rope_parameters": SHARPER, "attention_bias": True, "mlp_bias": True}),
    ("youtu", {"rope_interleave": False, "rope_parameters": SHARPER}),
    ("gpt_neo", {"attention_types": [[["local"], 2]], "intermediate_size": 96}),
    ("biogpt", {"scale_embedding": False}),
    ("nanochat", {"final_logit_softcapping": None, "num_key_value_heads": 4}),
    ("nanochat", {"rope_parameters": SHARPER, "attention_bias": True}),
    ("openai-gpt", {"afn": "relu", "n_layer": 1, "tie_word_embeddings": False}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),  # as that of 350M
    ("opt", {"word_embed_proj_dim": 96, "tie_word_embeddings": False}),
    ("persimmon", {"qk_layernorm": False}),
    ("xglm", {"scale_embedding": False}),
    ("jais2", {"attention_bias": False, "mlp_bias": False}),
    ("llama4_text", {"rope_parameters": SHARPER}),  # heads are longer behind their turn
    ("gemma3n_text", GEMMA3N_SPARSE),
    (  # one block, which does not turn and whose queries stay as they are
        "zamba2",
        {
            "use_mem_rope": False,
            "use_shared_attention_adapter": False,
            "num_mem_blocks": 1,
            "add_bias_linear": True,
        },
    ),
    ("gemma4_text", GEMMA4_E),
    ("gemma4_text", GEMMA4_MOE),
    (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
        },
    ),
    ("nemotron_h", {"moe_latent_size": 40}),
    ("olmo_hybrid", {"rope_theta": None, "linear_allow_neg_eigval": False}),
    (  # blocks are longer than pages, and n-grams pairs
        "qwen4_exp_text",
        {
            **{"indexer_compress_ratio": 24, "indexer_budget": 24, "ngram_size": 2},
            **{"output_gate_type": "sigmoid", "attention_bias": True, "norm_topk_prob": False},
            **{"ple_layer_ids": [3], "tie_word_embeddings": True},
        },
    ),
    (  # kinds of layers, and the width of n-grams, are left out
        "qwen4_exp_text",
        {
            **{"num_hidden_layers": 4, "layer_types": None, "ple_embed_dim": None},
            **{"indexer_compress_ratio": 3, "indexer_budget": 9, "split_ngram_parts": 1},
            "rope_parameters": SHARPER | {"partial_rotary_factor": 0.5},
        },
    ),
    ("gpt_oss", {"swiglu_limit": 0.5, "attention_bias": False, "rope_parameters": SHARPER}),
)
