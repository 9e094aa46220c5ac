"""Other names by which config.json may state a family's numbers.

Source: `attribute_map` of transformers' configuration classes, which take either name. Only those
are here that the families' functions do not read themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tgi_trio.model.config import ModelConfig

_Names = Mapping[str, str]  # other name -> the one that the family's function reads

_GPT: Final[_Names] = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_MOSAIC: Final[_Names] = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}
_ROUTED: Final[_Names] = {"num_local_experts": "n_routed_experts"}
_SARVAM: Final[_Names] = {
    **_ROUTED,
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}
OTHER_NAMES: Final[Mapping[str, _Names]] = {
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "gptj", "openai-gpt"), _GPT),
    **dict.fromkeys(("dbrx", "mpt"), _MOSAIC),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _ROUTED),
    **dict.fromkeys(("hy_v4", "nemotron_h"), _ROUTED),
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v4": {**_ROUTED, "intermediate_size": "moe_intermediate_size"},
    "exaone": {
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        "num_layers": "num_hidden_layers",
    },
    "glm4_moe_lite": {"head_dim": "qk_rope_head_dim"},
    "gpt_neo": {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "hunyuan_v1_moe": {"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    "hunyuan_vl_text": {"attention_head_dim": "head_dim"},
    "kimi_linear": {
        "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token",
        "num_local_experts": "num_experts",
    },
    "lfm3": {"rms_norm_eps": "norm_eps"},
    "sarvam_mla": _SARVAM,
    "sarvam_moe": {**_SARVAM, "use_qkv_bias": "attention_bias"},
    "mixtral": {"num_experts": "num_local_experts"},
    "recurrent_gemma": {"sliding_window": "attention_window_size"},
    "xglm": {
        "hidden_size": "d_model",
        "num_attention_heads": "attention_heads",
        "num_hidden_layers": "num_layers",
    },
}


def read_other_names(config: ModelConfig) -> ModelConfig:
    """Return the config with what it states by other names alone under the family's own."""
    names = OTHER_NAMES.get(config.text_type, {})
    values = config.values
    found = {
        own: values[other]
        for other, own in names.items()
        if values.get(own) is None and values.get(other) is not None
    }
    return replace(config, values={**values, **found}) if found else config
