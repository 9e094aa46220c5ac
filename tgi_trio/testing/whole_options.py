"""The smallest models that read images as well: options of their wholes."""

from __future__ import annotations

from typing import Any

from tgi_trio.testing.checkpoints import VOCAB_SIZE

_PERCEIVER = {
    **{"resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2},
    "num_key_value_heads": 1,
}
_OMNI_AUDIO = {
    **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
    **{"num_mel_bins": 8, "output_dim": 64},
}
_PINPOINTS = {"image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]]}
BESIDE: dict[str, dict[str, Any]] = {  # options of the whole model
    "cohere2_vision": {"alignment_intermediate_size": 64},
    "deepseek_vl_hybrid": {
        "high_res_vision_config": {
            **{"hidden_size": 16, "mlp_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 32, "patch_size": 8, "window_size": 2, "global_attn_indexes": [1]},
            "output_channels": 16,
        },
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n": {
        **{"eoi_token_id": VOCAB_SIZE - 4, "vision_soft_tokens_per_image": 4},
        "audio_config": {
            **{"vocab_offset": VOCAB_SIZE - 2, "vocab_size": 2, "hidden_size": 16},
            **{"conf_num_hidden_layers": 1, "conf_num_attention_heads": 2},
        },
    },
    "granite_docling": {"density_router_hidden_size": 8},
    "granite4_vision": _PINPOINTS
    | {
        **{"downsample_rate": "1/2", "vision_feature_select_strategy": "full"},
        **{"deepstack_layer_map": [[0, 2], [-1, 0]], "spatial_target_layers": [1, 3, 4, 5]},
    },
    "idefics": {
        **{"use_resampler": True, "perceiver_config": _PERCEIVER | {"resampler_head_dim": 8}},
        **{"cross_layer_interval": 2, "qk_layer_norms": True, "additional_vocab_size": 2},
        "alpha_type": "vector",
    },
    "idefics2": {"perceiver_config": _PERCEIVER | {"hidden_size": 64, "resampler_head_dim": 8}},
    "kimi_k25": {"projection_hidden_size": 16},
    "lfm2_vl": {"projector_hidden_size": 32},
    "lfm3_vl": {"projector_hidden_size": 32},
    "llava_next": _PINPOINTS,
    "minicpm_ocr": {"insert_layer_id": 1},
    "minicpmv4_6": {"insert_layer_id": 1},
    "minicpmv4_7": {
        **{"insert_layer_id": 1, "image_start_id": 501, "image_end_id": 502},
        **{"slice_start_id": 503, "slice_end_id": 504, "newline_id": 505},
    },
    "minimax_m3_vl": {"projector_hidden_size": 16},
    "muse_glimmer": {"out_hidden_size": 64, "projector_hidden_size": 16},
    "llava_onevision": _PINPOINTS | {"vision_aspect_ratio": "anyres_max_1"},
    "llava_next_video": _PINPOINTS,
    "nemotron_h_omni": {"vision_hidden_size": 16, "projector_hidden_size": 16},
    "ovis2": {
        **{"hidden_size": 64, "vocab_size": VOCAB_SIZE},
        "visual_indicator_token_ids": list(range(VOCAB_SIZE - 5, VOCAB_SIZE)),
    },
    "paligemma": {"projection_dim": 64},
    "perception_lm": {"projector_pooling_ratio": 2},
    "pixtral": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "qwen2_5_omni_thinker": {"audio_config": _OMNI_AUDIO},
    "qwen3_omni_moe_thinker": {
        "position_id_per_seconds": 13,
        "audio_config": _OMNI_AUDIO | {"downsample_hidden_size": 4, "n_window_infer": 200},
    },
    "vipllava": {"vision_feature_layer": [-1, 0]},
}
