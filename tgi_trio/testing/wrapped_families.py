"""The smallest models that read images as well: options of their texts and towers."""

from __future__ import annotations

from typing import Any

from tgi_trio.testing import tiny_families, tiny_hybrids
from tgi_trio.testing.checkpoints import VOCAB_SIZE

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_GEMMA4_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
_THREE_POSITIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# Of a token's place, and of its image's column, row and number.
_NUMBERED = {
    **{"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 100.0, "factor": 1.0},
    "mrope_section": [2, 1, 3, 2],
}
_HALF = {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_IN_TURNS = _THREE_POSITIONS | {"mrope_interleaved": True}
_DELTA: dict[str, Any] = {
    **{"num_hidden_layers": 3, "head_dim": 16, "rope_parameters": _IN_TURNS | _HALF},
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
_COHERE2: dict[str, Any] = {
    **{"model_type": "cohere2", "sliding_window": 24},
    **{"layer_types": ["sliding_attention", "full_attention"]},
    "logit_scale": 1.0,  # newer classes of text and images in transformers do not multiply by it
}
_CLIP = _VISION | {"model_type": "clip_vision_model"}
_PIXTRAL = _VISION | {"model_type": "pixtral", "head_dim": 8}
_MINICPM_VISION = _VISION | {"num_hidden_layers": 3, "patch_size": 4}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model"}
_SAM: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 16},
    **{"image_size": 128, "window_size": 3, "global_attn_indexes": [1]},
    **{"output_channels": 16, "downsample_channels": [16, 16]},
}
_DEEPSEEK_MOE: dict[str, Any] = {
    **{"n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"]},
    **{"num_key_value_heads": 4, "n_group": 1, "topk_group": 1},
}

# By family, the differences from TEXT, with the text's type if a family allows several, and the
# options of the vision tower.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "aya_vision": (_COHERE2, _SIGLIP),
    "cohere2_vision": (_COHERE2, _SIGLIP),
    "cohere_compass": (tiny_families.FAMILIES["cohere_compass_text"], _QWEN_VISION),
    "exaone4_5": (
        {"model_type": "exaone4"} | tiny_families.FAMILIES["exaone4"],
        _QWEN_VISION | {"num_key_value_heads": 1},
    ),
    "fast_vlm": (
        {"model_type": "qwen2"},
        {
            **{"architecture": "fastvit_mci3", "hidden_size": 64, "model_type": "timm_wrapper"},
            "model_args": {"inference_mode": True, "layers": [1] * 5, "embed_dims": [32] * 5},
        },
    ),
    "fuyu": ({"model_type": "persimmon"}, {}),
    "gemma3": ({"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24}, _SIGLIP),
    "gemma3n": (
        tiny_families.FAMILIES["gemma3n_text"] | {"vocab_size_per_layer_input": 100},
        {
            **{"vocab_offset": VOCAB_SIZE - 4, "vocab_size": 2},
            "model_args": {"channel_multiplier": 0.05, "msfa_output_resolution": 2},
        },
    ),
    "gemma4": (tiny_families.GEMMA4 | tiny_families.GEMMA4_E, _GEMMA4_VISION),
    "gemma4_unified": (
        tiny_families.GEMMA4
        | {
            **{"num_hidden_layers": 4, "intermediate_size": 96},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 16, "mm_posemb_size": 16}
        | {"output_proj_dims": 16},
    ),
    "deepseek_ocr2": (
        _DEEPSEEK_MOE,
        {
            "sam_config": _SAM | {"mlp_dim": 16},
            "encoder_config": {
                **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
                **{"num_attention_heads": 2, "num_key_value_heads": 1},
            },
        },
    ),
    "deepseek_vl": ({"model_type": "llama"}, _SIGLIP),
    "deepseek_vl_hybrid": ({"model_type": "llama"}, _SIGLIP),
    "glm46v": ({"model_type": "glm4v_text", "rope_parameters": _THREE_POSITIONS}, _QWEN_VISION),
    "glm4v": ({"rope_parameters": _THREE_POSITIONS}, _QWEN_VISION | {"hidden_size": 16}),
    "glm4v_moe": (
        {
            **{"rope_parameters": _THREE_POSITIONS | _HALF},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        },
        _QWEN_VISION,
    ),
    "glm5_next": (
        {
            **{"num_hidden_layers": 4, "num_key_value_heads": 4, "linear_num_heads": 2},
            "layer_types": ["linear_attention", *["indexed_attention"] * 2, "linear_attention"],
            "indexer_types": ["full", "full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            **{"linear_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 12},
            **{"qk_nope_head_dim": 20, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "swiglu_limit": 1.5},
            **{"hc_mult": 2, "hc_sinkhorn_iters": 3},
            **{"index_topk": 12, "index_kpool": 4, "index_head_dim": 16, "index_n_heads": 16},
        },
        _QWEN_VISION | {"projection_intermediate_size": 16},
    ),
    "glm_ocr": ({"rope_parameters": _THREE_POSITIONS}, _QWEN_VISION),
    "glmga": ({"rope_parameters": _THREE_POSITIONS}, _QWEN_VISION),
    "got_ocr2": ({"model_type": "qwen2"}, _SAM | {"image_size": 64, "patch_size": 8}),
    "granite_docling": (
        {
            **{"num_hidden_layers": 3, "embedding_multiplier": 3.0, "residual_multiplier": 0.8},
            **{"attention_multiplier": 0.2, "logits_scaling": 2.0},
        },
        {
            **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3},
            **{"num_attention_heads": 2, "image_size": 16, "patch_size": 4, "scale_factor": 2},
            **{"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
        },
    ),
    "granite4_vision": (
        {
            **{"num_hidden_layers": 6, "embedding_multiplier": 3.0, "residual_multiplier": 0.8},
            **{"attention_multiplier": 0.2, "logits_scaling": 2.0},
        },
        _SIGLIP | {"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 4},
    ),
    "hyperclovax_vision_v2": (
        {"model_type": "hyperclovax"} | tiny_families.FAMILIES["hyperclovax"],
        _QWEN_VISION | {"model_type": "qwen2_5_vl_vision", "out_hidden_size": 24},
    ),
    "hunyuan_vl": (
        {"head_dim": 16, "rope_parameters": _NUMBERED},
        _VISION
        | {"num_hidden_layers": 2, "patch_size": 4, "spatial_merge_size": 2, "max_image_size": 24},
    ),
    "idefics": ({"num_hidden_layers": 4}, _VISION | {"embed_dim": 16}),
    "idefics2": ({"model_type": "mistral"}, _VISION),
    "idefics3": ({"model_type": "llama"}, _VISION),
    "internvl": ({"model_type": "qwen2"}, _VISION | {"image_size": [16, 16], "patch_size": [8, 8]}),
    "nemotron_h_omni": (
        {"model_type": "nemotron_h", "max_position_embeddings": 512}
        | tiny_hybrids.FAMILIES["nemotron_h"],
        {
            **{"model_type": "radio", "hidden_size": 16, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "patch_size": 4, "image_size": 16, "max_img_size": 32},
            **{"num_cls_tokens": 1, "num_registers": 1, "summary_idxs": [0]},
            "video_temporal_patch_size": 2,
        },
    ),
    "llama4": (
        {
            **{"head_dim": 16, "intermediate_size": 48, "intermediate_size_mlp": 64},
            **{"num_local_experts": 4, "interleave_moe_layer_step": 2, "attention_chunk_size": 24},
        },
        {
            **{"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2},
            **{"num_hidden_layers": 1, "image_size": 16, "patch_size": 8, "vision_output_dim": 16},
            **{"projector_input_dim": 16, "projector_output_dim": 16},
        },
    ),
    "kimi_k25": (
        {
            **{"model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 1},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 12, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "n_group": 4, "topk_group": 2},
        },
        {
            **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        },
    ),
    "lfm2_vl": (
        {
            **{"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "block_auto_adjust_ff_dim": False,
        },
        {
            **{"model_type": "siglip2_vision_model", "hidden_size": 16, "intermediate_size": 16},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_patches": 16},
            **{"patch_size": 4, "vision_use_head": False},
        },
    ),
    "lfm3_vl": (
        {
            **{"model_type": "lfm3", "layer_types": ["conv", "full_attention"]},
            **{"head_dim": 16, "sliding_window": 24},
        },
        {
            **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3},
            **{"num_attention_heads": 2, "num_key_value_heads": 1, "patch_size": 4},
        },
    ),
    "lighton_ocr": ({"model_type": "qwen3", "head_dim": 16}, _PIXTRAL),
    "llava": ({"model_type": "mistral", "sliding_window": None}, _CLIP),
    "llava_next": ({"model_type": "llama"}, _CLIP),
    "llava_onevision": ({"model_type": "qwen2"}, _SIGLIP),
    "llava_next_video": ({"model_type": "llama"}, _CLIP),
    "minicpm_ocr": ({"model_type": "qwen3_5_text"} | _DELTA, _MINICPM_VISION),
    "minicpmv4_6": ({"model_type": "qwen3_5_text"} | _DELTA, _MINICPM_VISION),
    "minicpmv4_7": ({"model_type": "qwen3_5_text"} | _DELTA, _MINICPM_VISION),
    "minimax_m3_vl": (
        tiny_families.FAMILIES["minimax_m3_vl_text"],
        _VISION | {"hidden_size": 24, "spatial_merge_size": 2},
    ),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        _PIXTRAL,
    ),
    "mistral_large4": (
        {
            **{"num_hidden_layers": 5, "num_key_value_heads": 4, "first_k_dense_replace": 1},
            **{"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"index_topk": 12, "index_head_dim": 16, "index_n_heads": 16},
            # The last layers read the latents of the first ones; the very last has no index.
            **{"no_rope_layers": [1, 0, 1, 0, 1], "kv_source_layers": [0, 1, 0, 1, 0]},
            "indexer_types": ["full", "full", "full", "full", "shared"],
            **{"final_logit_softcapping": 5.0, "routed_scaling_factor": 1.5},
        },
        _PIXTRAL,
    ),
    "mllama": (
        {
            "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        {
            **{"hidden_size": 16, "intermediate_size": 16, "attention_heads": 2, "image_size": 16},
            **{"num_hidden_layers": 1, "num_global_layers": 1, "patch_size": 8},
            **{"intermediate_layers_indices": [0], "vision_output_dim": 32, "max_num_tiles": 2},
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
    ),
    "muse_glimmer": (
        {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 24, "qk_scale_factor": 1.5}
        | {"final_logit_softcapping": 5.0, "output_multiplier": 0.5}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {"layer_rope_theta": [1e4, 1e4, 0], "post_norm_eps": 1e-2},
        _VISION | {"pos_emb_height": 4, "pos_emb_width": 4},
    ),
    "ovis2": ({"model_type": "qwen2"}, _VISION | {"vocab_size": 24}),
    "paddleocr_vl": (
        {"head_dim": 16, "rope_parameters": _THREE_POSITIONS},
        _VISION | {"patch_size": 4, "spatial_merge_size": 2},
    ),
    "paligemma": ({"model_type": "gemma2", "head_dim": 16}, _SIGLIP),
    "perception_lm": (
        {"model_type": "llama"},
        {
            **{"architecture": "vit_pe_lang_large_patch14_448", "model_type": "timm_wrapper"},
            "model_args": {
                **{"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4},
                **{"img_size": [16, 16], "ref_feat_shape": [4, 4], "global_pool": ""},
            },
        },
    ),
    "pixtral": (
        {"model_type": "mistral", "sliding_window": None},
        _PIXTRAL,
    ),
    "qwen2_5_omni_thinker": (
        {"rope_parameters": _THREE_POSITIONS},
        _QWEN_VISION | {"patch_size": 14},
    ),
    "qianfan_ocr": (
        {"model_type": "qwen3", "head_dim": 16},
        _VISION | {"image_size": [16, 16], "patch_size": [8, 8]},
    ),
    "qwen2_5_vl": ({"rope_parameters": _THREE_POSITIONS}, _QWEN_VISION),
    "qwen2_vl": ({"rope_parameters": _THREE_POSITIONS}, _QWEN_VISION | {"hidden_size": 64}),
    "qwen3_5": (_DELTA, _QWEN_VISION),
    "qwen3_5_moe": (
        _DELTA
        | {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            "shared_expert_intermediate_size": 32,
        },
        _QWEN_VISION,
    ),
    "qwen4_exp": (
        tiny_hybrids.FAMILIES["qwen4_exp_text"] | {"rope_parameters": _IN_TURNS | _HALF},
        _QWEN_VISION,
    ),
    "qwen3_omni_moe_thinker": (
        {
            **{"head_dim": 16, "rope_parameters": _IN_TURNS, "moe_intermediate_size": 32},
            **{"num_experts": 4, "num_experts_per_tok": 2},
        },
        _QWEN_VISION | {"patch_size": 16},
    ),
    "qwen3_vl": ({"head_dim": 16, "rope_parameters": _IN_TURNS}, _QWEN_VISION),
    "qwen3_vl_moe": (
        {
            **{"head_dim": 16, "rope_parameters": _IN_TURNS, "moe_intermediate_size": 32},
            **{"num_experts": 4, "num_experts_per_tok": 2},
        },
        _QWEN_VISION,
    ),
    "smolvlm": ({"model_type": "llama"}, _VISION),
    "step3p7": (
        {
            **{"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 24},
            **{"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            **{"num_sliding_attention_heads": 8, "mlp_layer_types": ["dense", "sparse", "sparse"]},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"share_expert_dim": 48, "moe_router_scaling_factor": 1.5},
            **{"swiglu_limits": [0.0, 0.0, 0.2], "swiglu_limits_shared": [0.0, 0.1, 0.3]},
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"image_size": 16, "patch_size": 4, "mlp_ratio": 1.0},
        },
    ),
    "unlimited_ocr": (
        _DEEPSEEK_MOE | {"layer_types": ["full_attention"] * 2},
        {"sam_config": _SAM, "encoder_config": _VISION | {"image_size": 32}},
    ),
    "vipllava": ({"model_type": "llama"}, _CLIP),
}
