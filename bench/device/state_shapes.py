"""Shapes whose layers keep a state per sequence: a few of each kind, without attention.

Sources: transformers' defaults for their config.json, with the sizes of the models that are named.
Vocabularies are small, since the layers are what is measured of them.
"""

from __future__ import annotations

from typing import Any, Final

_VOCABULARY: Final = 32768
# Layers of Qwen 3.5 9B; of Qwen 3 Next's family all that have delta rules are like these.
_DELTAS: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        **{"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"}
    },
}
# Mamba Codestral 7B.
_MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "hidden_size": 4096,
    "num_hidden_layers": 8,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "expand": 2,
    "conv_kernel": 4,
    "chunk_size": 256,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 32768,
}
_MAMBA1: dict[str, Any] = {
    "model_type": "falcon_mamba",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "state_size": 16,
    "time_step_rank": 256,
    "expand": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "mixer_rms_eps": 1e-6,
    "max_position_embeddings": 32768,
}
# RecurrentGemma 2B.
_GATES: dict[str, Any] = {
    "model_type": "recurrent_gemma",
    "hidden_size": 2560,
    "intermediate_size": 15360,
    "num_hidden_layers": 6,
    "block_types": ["recurrent"],
    "lru_width": 2560,
    "conv1d_width": 4,
    "num_attention_heads": 10,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "attention_window_size": 2048,
    "hidden_activation": "gelu_pytorch_tanh",
    "logits_soft_cap": 30.0,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        **{"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
    },
}
_EVERY: Final = {"deltas": _DELTAS, "mamba2": _MAMBA2, "mamba1": _MAMBA1, "gates": _GATES}
# An interpreter takes milliseconds for a program.
_SMALL: dict[str, dict[str, Any]] = {
    "deltas": {
        **{"layer_types": ["linear_attention"], "intermediate_size": 32, "head_dim": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_key_heads": 1},
        **{"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "mamba1": {"intermediate_size": 64, "state_size": 8, "time_step_rank": 4},
    "gates": {
        **{"intermediate_size": 64, "lru_width": 32, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 16},
    },
}
_DRY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
STATES: Final = tuple(_EVERY)
STATE_SHAPES: Final = {
    **{name: values | {"vocab_size": _VOCABULARY} for name, values in _EVERY.items()},
    **{f"dry {name}": values | _DRY | _SMALL[name] for name, values in _EVERY.items()},
}
