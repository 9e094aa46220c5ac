"""Dense families that are Llama, Granite or GLM by names of their own; transformers has none.

Their files come with code, which is not run. Sources: that code, and vLLM's and llama.cpp's of it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.expert_layers import set_experts
from tgi_trio.model.families.glm import PAIRS_IN_HALVES, glm4
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec

# ChatGLM's names -> those that transformers gave GLM-4's numbers.
_CHATGLM: Final = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "layernorm_epsilon": "rms_norm_eps",
    "add_qkv_bias": "attention_bias",
}
# What a config.json of ChatGLM says, for other layers than these.
_OTHER_CHATGLM: Final = (
    *("apply_residual_connection_post_layernorm", "add_bias_linear", "pre_seq_len"),
    *("quantization_bit", "vision_config", "position_encoding_2d"),
)
_CHATGLM_2_AND_3_VOCABULARY: Final = 65024
_CHATGLM_3_RATIOS: Final = (1, 50, 500)  # of 8,192, 32,768 and 131,072 tokens


def internlm2(config: ModelConfig) -> DecoderSpec:
    """InternLM 2 and 2.5 (Shanghai AI Laboratory 2024): `bias` is that of all of attention."""
    biased = bool(config.get("bias", True))
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    values = {**config.values, "head_dim": hidden // heads}
    return llama_spec(
        replace(config, values=values),
        names=names.INTERNLM2,
        qkv_layout="grouped",
        qkv_bias=biased,
        output_bias=biased,
    )


def internlm(config: ModelConfig) -> DecoderSpec:
    """InternLM 1 (2023), openPangu Embedded (Huawei 2025): `bias` is that of all of attention."""
    turning = config.get("rotary")  # InternLM's; what else it says is of longer sequences
    if isinstance(turning, dict) and turning.get("base"):
        config = replace(config, values={**config.values, "rope_theta": turning["base"]})
    biased = bool(config.get("bias", True))
    return llama_spec(config, qkv_bias=biased, output_bias=biased)


def xverse(config: ModelConfig) -> DecoderSpec | None:
    """XVERSE (2023), but for its mixture, whose files have the same type."""
    return None if config.get("num_experts") else llama_spec(config)


def orion(config: ModelConfig) -> DecoderSpec:
    """Orion 14B (OrionStar 2024): norms are LayerNorms with biases."""
    return llama_spec(
        config,
        norm="layer",
        norm_bias=True,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )


def minicpm(config: ModelConfig) -> DecoderSpec | None:
    """MiniCPM 1, 2, 4 and 4.1 (OpenBMB 2024 and 2025), scaled as Granite is; one has experts.

    None for layers of linear attention.
    """
    if config.get("mixer_types"):
        return None
    layers, hidden = int(config.need("num_hidden_layers")), int(config.need("hidden_size"))
    before_head = float(config.get("dim_model_base", 1)) / hidden
    spec = llama_spec(
        _with_one_set_of_divisors(config),
        embedding_scale=float(config.get("scale_emb", 1)),
        residual_scale=float(config.get("scale_depth", 1)) / math.sqrt(layers),
        logit_scale=before_head,
        head_input_scale=before_head,
        tied_head=bool(config.get("tie_word_embeddings", True)),
        **attention_bias(config),
    )
    count = int(config.get("num_experts", 0))
    if not count:
        return spec
    experts = ExpertsSpec(
        count=count,
        per_token=int(config.need("num_experts_per_tok")),
        width=spec.mlp_width,
        normalise=True,
    )
    return set_experts(replace(spec, names=names.MINICPM_MOE), experts)


def _with_one_set_of_divisors(config: ModelConfig) -> ModelConfig:
    """Return the config with the divisors of LongRoPE with which all positions turn.

    Its own code makes a table for the longest sequence at once: short ones turn with the long
    divisors as well where sequences may be longer than the original ones.
    """
    stated = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(stated, dict) or (stated.get("rope_type") or stated.get("type")) not in (
        "longrope",
        "su",
    ):
        return config
    original = config.get("original_max_position_embeddings") or stated.get(
        "original_max_position_embeddings", config.trained_positions
    )
    own = stated.get("long_factor" if config.trained_positions > original else "short_factor")
    one: dict[str, Any] = {**stated, "factor": None, "short_factor": own, "long_factor": own}
    return replace(config, values={**config.values, "rope_parameters": None, "rope_scaling": one})


def chatglm(config: ModelConfig) -> DecoderSpec | None:
    """ChatGLM 2 and 3, GLM-4 9B and CodeGeeX 4 (Zhipu AI 2023 and 2024): GLM in other names.

    None for the first ChatGLM, whose prompts see themselves as a whole, and for models that see.
    Raises ModelLoadError for a version that cannot be told.
    """
    other = any(config.get(name) for name in _OTHER_CHATGLM)
    if other or not (config.get("rmsnorm", True) and config.get("post_layer_norm", True)):
        return None
    if not config.get("ffn_hidden_size"):
        return None
    config = _named_as_glm(config)
    return replace(
        glm4(config),
        names=names.CHATGLM,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        qkv_layout="stacked" if config.get("multi_query_attention", False) else "grouped",
        activation="silu",
    )


def _named_as_glm(config: ModelConfig) -> ModelConfig:
    ratio = config.get("rope_ratio", 1)
    if config.vocab_size == _CHATGLM_2_AND_3_VOCABULARY and ratio not in _CHATGLM_3_RATIOS:
        raise ModelLoadError(
            f"{config.folder / 'config.json'} says rope_ratio {ratio!r}: ChatGLM 2 divides "
            "positions by it, ChatGLM 3 multiplies the base of its rotation by it, and nothing "
            "here says which of both this is. ChatGLM 3 is served with the ratios of its "
            f"publishers ({', '.join(map(str, _CHATGLM_3_RATIOS))})."
        )
    heads, size = int(config.need("num_attention_heads")), config.get("kv_channels", 128)
    shared = config.get("multi_query_attention", False)
    values: dict[str, Any] = {
        **config.values,
        **{theirs: config.get(own) for own, theirs in _CHATGLM.items()},
        "head_dim": size,
        "num_key_value_heads": config.need("multi_query_group_num") if shared else heads,
        "attention_bias": bool(config.get("add_qkv_bias", False)),
        "rope_theta": 10000.0 * ratio,
        PAIRS_IN_HALVES: not config.get("original_rope", True),
    }
    return replace(config, values=values)
