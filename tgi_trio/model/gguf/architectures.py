"""Architectures of GGUF files that are read: what each says of its config, and of its tensors.

A new one is a function that puts its metadata into the words of a family, and a row of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tgi_trio.model.families.llama_like import PROJECTIONS_APART
from tgi_trio.model.families.mixtures import EXPERTS_APART, GPT_OSS_ROTARY
from tgi_trio.model.gguf import (
    balanced,
    convolutions,
    delta_rules,
    gemmas,
    gpt_like,
    state_spaces,
)
from tgi_trio.model.gguf.deepseek import deepseek2
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    expert_width,
    read_count,
    read_experts,
    read_number,
    read_query_scale,
)

# The metadata, and what `config.py` made of its common keys -> what differs from that.
Convert = Callable[[GgufModel, Values], Values]
Roles = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of llama.cpp."""

    config: Convert
    # llama.cpp wants rotary pairs side by side: rows of queries and keys are moved.
    side_by_side: bool = False
    # It multiplies norms by the weight alone: the file has one more than the checkpoint.
    norms_plus_one: bool = False
    latent: bool = False  # keys and values are compressed
    # Names of tensors -> the fields of `Names`, where they are not those of `tensors.py`.
    roles: Roles = field(default_factory=dict)
    # And of what mixes tokens where a layer does not attend -> its part of the mixer's name.
    mixer: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)  # of others -> the name in a layer
    listed: Mapping[str, str] = field(default_factory=dict)  # lists in the metadata -> the same
    by_layer: tuple[str, ...] = ()  # of our numbers, those that may differ, 0 for layers without
    without: tuple[str, ...] = ()  # and those that the model has none of
    narrow_values: bool = False  # values may be shorter than keys


def _llama(model: GgufModel, values: Values) -> Values:
    """Llama and Mistral, which are one architecture there, and so is Mixtral."""
    if not model.get("expert_count"):
        return {"model_type": "llama"}
    return {
        "model_type": "mixtral",
        **read_experts(model),
        "intermediate_size": expert_width(model),
    }


def _plain(model_type: str) -> Callable[[GgufModel, Values], Values]:
    """Return what a family needs that has nothing of its own."""
    return lambda model, values: {"model_type": model_type}


def _baichuan(model: GgufModel, values: Values) -> Values:
    """Baichuan 1 and 2; llama.cpp tells the 13B models, which do not rotate, by their layers."""
    return {
        "model_type": "baichuan",
        PROJECTIONS_APART: True,
        "alibi": values["num_hidden_layers"] == 40,
    }


def _seed_oss(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "seed_oss",
        "attention_out_bias": "blk.0.attn_output.bias" in model.tensors,
    }


def _ernie4_5(model: GgufModel, values: Values) -> Values:
    return {"model_type": "ernie4_5", "use_bias": values["attention_bias"]}


def _nemotron(model: GgufModel, values: Values) -> Values:
    eps = model.get("attention.layer_norm_epsilon", 1e-5)
    return {"model_type": "nemotron", "norm_eps": eps}


def _gemma2(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "gemma2",
        "sliding_window": model.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(values, largest=46),
    }


def _gemma3(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "gemma3_text",
        "sliding_window": model.get("attention.sliding_window", 1024),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": model.get("rope.freq_base_swa", 10000.0),
        "rope_theta": values.get("rope_theta", 1000000.0),
        "final_logit_softcapping": model.get("final_logit_softcapping", 0.0),
        "query_pre_attn_scalar": _query_scalar(values, largest=62),
    }


def _query_scalar(values: Values, largest: int) -> float:
    """Return what scores are divided by the root of: a head's length, but in the largest model.

    No file says it; llama.cpp tells that model by its layers.
    """
    if values["num_hidden_layers"] == largest:
        return float(values["hidden_size"] / values["num_attention_heads"])
    return float(values["head_dim"])


def _phi3(model: GgufModel, values: Values) -> Values:
    return {"model_type": "phi3", "sliding_window": model.get("attention.sliding_window", 0)}


def _mistral3(model: GgufModel, values: Values) -> Values:
    """Ministral 3, whose queries are scaled by their position where the file says how far."""
    if model.get("expert_count"):
        raise ValueError("it has experts, which no model of its family has")
    return {"model_type": "ministral3", "sliding_window": None} | read_query_scale(
        model, values, sharper=read_number(model, "rope.scaling.yarn_log_multiplier", 0.0)
    )


def _llama4(model: GgufModel, values: Values) -> Values:
    """Llama 4, whose chunks and scales no file states; the largest does not norm its heads."""
    experts = read_experts(model, read_count(model, "interleave_moe_layer_step") - 1)
    every = model.get("attention.sliding_window") == 0  # then all see all, and know positions
    layers = values["num_hidden_layers"]
    return {
        "model_type": "llama4_text",
        EXPERTS_APART: True,
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": read_count(model, "expert_feed_forward_length"),
        "intermediate_size_mlp": values["intermediate_size"],
        "interleave_moe_layer_step": read_count(model, "interleave_moe_layer_step"),
        "use_qk_norm": experts["num_experts"] != 128,
        "attn_temperature_tuning": not every,
    } | ({"no_rope_layers": [1] * layers, "attention_chunk_size": None} if every else {})


def _apertus(model: GgufModel, values: Values) -> Values:
    for key in _XIELU:
        numbers = model.metadata.get(key)
        if not isinstance(numbers, list) or len(numbers) < values["num_hidden_layers"]:
            raise ValueError(f"its {key} names not all layers")
        if key not in model.lists or not all(map(math.isfinite, numbers)):
            raise ValueError(f"its {key} cannot be {numbers}")
    return {"model_type": "apertus", "mlp_bias": False} | (
        {} if values.get("rope_scaling") else {"rope_scaling": {"rope_type": "default"}}
    )


def _granite(model: GgufModel, values: Values) -> Values:
    keys = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    if missing := [key for key in keys if not model.get(key)]:
        raise ValueError(f"it has no {model.architecture}.{missing[0]}")
    return {"model_type": "granite"} | {ours: model.get(key) for key, ours in keys.items()}


def _granitemoe(model: GgufModel, values: Values) -> Values:
    return _granite(model, values) | balanced.granitemoe(model, values)


def _granitehybrid(model: GgufModel, values: Values) -> Values:
    return _granite(model, values) | state_spaces.granitehybrid(model, values)


def _olmo2(model: GgufModel, values: Values) -> Values:
    """OLMo 2, or 3, which has windows in the layers that its file names."""
    windows = _stated_windows(model, values)
    return {"model_type": "olmo3" if windows["sliding_window"] else "olmo2"} | windows


def _exaone4(model: GgufModel, values: Values) -> Values:
    return {"model_type": "exaone4"} | _stated_windows(model, values)


def _stated_windows(model: GgufModel, values: Values) -> Values:
    """Return the window, None without one, and which layers the file says have it."""
    window = model.get("attention.sliding_window")
    if not window:
        return {"sliding_window": None}
    pattern = model.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != values["num_hidden_layers"]:
        raise ValueError(
            f"its {model.architecture}.attention.sliding_window_pattern names not all layers"
        )
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return {"sliding_window": window, "layer_types": kinds}


def _phimoe(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "phimoe",
        "lm_head_bias": "output.bias" in model.tensors,
        "sliding_window": model.get("attention.sliding_window", 0),
        "intermediate_size": expert_width(model),
    } | read_experts(model)


def _starcoder2(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "starcoder2",
        "norm_epsilon": model.get("attention.layer_norm_epsilon", 1e-5),
        "use_bias": values["attention_bias"],
        "sliding_window": None,
    }


def _command_r(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "cohere",
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": model.get("logit_scale", 0.0625),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
    }


def _cohere2(model: GgufModel, values: Values) -> Values:
    """Every fourth layer sees all and knows no positions, as in every model of the family."""
    return {
        "model_type": "cohere2",
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": model.get("logit_scale", 0.0625),
        "sliding_window": model.get("attention.sliding_window", 4096),
        "sliding_window_pattern": 4,
    }


def _olmo(model: GgufModel, values: Values) -> Values:
    return {"model_type": "olmo", "clip_qkv": model.get("attention.clamp_kqv")}


def _phi2(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": False,
    }


def _stablelm(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "stablelm",
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", 1e-5),
        "use_parallel_residual": bool(model.get("use_parallel_residual", False)),
        "use_qkv_bias": values["attention_bias"],
        "qk_layernorm": any("attn_q_norm" in name for name in model.tensors),
    }


def _qwen2moe(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": expert_width(model),
        "shared_expert_intermediate_size": expert_width(model, "ffn_up_shexp"),
        "norm_topk_prob": False,
    } | read_experts(model)


def _qwen3moe(model: GgufModel, values: Values) -> Values:
    width = {"moe_intermediate_size": expert_width(model)}
    return {"model_type": "qwen3_moe", "norm_topk_prob": True} | width | read_experts(model)


def _olmoe(model: GgufModel, values: Values) -> Values:
    width = {"intermediate_size": expert_width(model)}
    return {"model_type": "olmoe", "norm_topk_prob": False} | width | read_experts(model)


def _gpt_oss(model: GgufModel, values: Values) -> Values:
    """gpt-oss. Of its rotary scaling the file states factor and length alone."""
    scaling = {} if "rope_scaling" not in values else GPT_OSS_ROTARY | values["rope_scaling"]
    return {
        "model_type": "gpt_oss",
        EXPERTS_APART: True,
        "intermediate_size": expert_width(model),
        "sliding_window": model.get("attention.sliding_window", 128),
        "rope_scaling": scaling or {"rope_type": "default"},
    } | read_experts(model)


def _dbrx(model: GgufModel, values: Values) -> Values:
    experts = read_experts(model)
    return {
        "model_type": "dbrx",
        EXPERTS_APART: True,
        "d_model": values["hidden_size"],
        "n_heads": values["num_attention_heads"],
        "n_layers": values["num_hidden_layers"],
        "max_seq_len": values["max_position_embeddings"],
        "attn_config": {
            "kv_n_heads": read_count(model, "attention.head_count_kv"),
            "clip_qkv": model.get("attention.clamp_kqv"),
            "rope_theta": values.get("rope_theta", 10000.0),
        },
        "ffn_config": {
            "ffn_hidden_size": expert_width(model),
            "moe_num_experts": experts["num_experts"],
            "moe_top_k": experts["num_experts_per_tok"],
        },
    }


_FALCON: Final[Roles] = {
    "attn_norm": ("mlp_norm", "attention_norm"),  # the MLP's, where there are two
    "attn_norm_2": ("attention_norm",),
}
_DEEPSEEK: Final[Roles] = {
    "attn_q_a": ("query_down",),
    "attn_q_a_norm": ("query_norm",),
    "attn_q_b": ("query_up",),
    "attn_kv_a_mqa": ("latent_down",),
    "attn_kv_a_norm": ("latent_norm",),
    "attn_kv_b": ("latent_up",),
}

_KV_HEADS: Final = ("num_key_value_heads",)  # 0 in layers that do not attend
_ONE_PART: Final = (*_KV_HEADS, "intermediate_size")  # and in those without an MLP
_NO_HEADS: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_XIELU: Final = {
    f"xielu.{number}": f"mlp.act_fn.{number}" for number in ("alpha_p", "alpha_n", "beta", "eps")
}
_LFM2: Final[Roles] = {"token_embd_norm": ("final_norm",)}  # so named in older files
_CONVOLUTION: Final = {
    "shortconv.conv": "conv",
    "shortconv.in_proj": "in_proj",
    "shortconv.out_proj": "out_proj",
}
_SHARED_MLP: Final[Roles] = {
    "ffn_gate_shexp": ("gate",),
    "ffn_up_shexp": ("up",),
    "ffn_down_shexp": ("down",),
}
_NORM_BEFORE_MLP: Final[Roles] = {"post_attention_norm": ("mlp_norm",)}
_DBRX: Final[Roles] = {"attn_output_norm": ("mlp_norm",)}

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(_llama, side_by_side=True),
    "baichuan": Architecture(_baichuan, side_by_side=True),
    "smollm3": Architecture(_plain("smollm3"), side_by_side=True),
    "mistral3": Architecture(_mistral3, side_by_side=True),
    "llama4": Architecture(_llama4),
    "apertus": Architecture(_apertus, listed=_XIELU),
    "arcee": Architecture(_plain("arcee"), side_by_side=True),
    "seed_oss": Architecture(_seed_oss, roles=_NORM_BEFORE_MLP),
    "nemotron": Architecture(_nemotron, norms_plus_one=True),
    "ernie4_5": Architecture(_ernie4_5),
    "exaone4": Architecture(_exaone4),
    "qwen2": Architecture(_plain("qwen2")),
    "qwen3": Architecture(_plain("qwen3")),
    # Of models that see, the text: three positions of a token are one there.
    "qwen2vl": Architecture(_plain("qwen2")),
    "qwen3vl": Architecture(_plain("qwen3")),
    "qwen3vlmoe": Architecture(_qwen3moe),
    "qwen3next": Architecture(
        delta_rules.qwen3next,
        norms_plus_one=True,
        roles=_NORM_BEFORE_MLP,
        mixer=delta_rules.QWEN3_NEXT,
    ),
    "qwen35": Architecture(
        delta_rules.qwen35, norms_plus_one=True, roles=_NORM_BEFORE_MLP, mixer=delta_rules.QWEN35
    ),
    "qwen35moe": Architecture(
        delta_rules.qwen35moe, norms_plus_one=True, roles=_NORM_BEFORE_MLP, mixer=delta_rules.QWEN35
    ),
    "kimi-linear": Architecture(
        delta_rules.kimi_linear,
        latent=True,
        roles=_DEEPSEEK,
        mixer=delta_rules.KIMI,
        by_layer=_KV_HEADS,
    ),
    "glm4": Architecture(_plain("glm4")),
    "gemma": Architecture(_plain("gemma"), norms_plus_one=True),
    "gemma2": Architecture(_gemma2, norms_plus_one=True),
    "gemma3": Architecture(_gemma3, norms_plus_one=True),
    "gemma3n": Architecture(gemmas.gemma3n, by_layer=("intermediate_size",), parts=gemmas.STREAMS),
    "gemma4": Architecture(gemmas.gemma4, by_layer=("intermediate_size", "num_key_value_heads")),
    "phi3": Architecture(_phi3),
    "granite": Architecture(_granite, side_by_side=True),
    "olmo2": Architecture(_olmo2),
    "starcoder2": Architecture(_starcoder2),
    "command-r": Architecture(_command_r),
    "cohere2": Architecture(_cohere2),
    "olmo": Architecture(_olmo, side_by_side=True),
    "phi2": Architecture(_phi2),
    "stablelm": Architecture(_stablelm),
    "qwen2moe": Architecture(_qwen2moe),
    "qwen3moe": Architecture(_qwen3moe),
    "olmoe": Architecture(_olmoe),
    "phimoe": Architecture(_phimoe),
    "gpt-oss": Architecture(_gpt_oss, roles=_NORM_BEFORE_MLP),
    "dbrx": Architecture(_dbrx, roles=_DBRX),
    "glm4moe": Architecture(balanced.glm4moe, roles=_NORM_BEFORE_MLP),
    "dots1": Architecture(balanced.dots1),
    "ernie4_5-moe": Architecture(balanced.ernie4_5_moe),
    "minimax-m2": Architecture(balanced.minimax_m2),
    "hunyuan-dense": Architecture(_plain("hunyuan_v1_dense")),
    "hunyuan-moe": Architecture(balanced.hunyuan_moe),
    "granitemoe": Architecture(_granitemoe, side_by_side=True),
    "granitehybrid": Architecture(
        _granitehybrid,
        side_by_side=True,
        by_layer=_KV_HEADS,
        roles=_SHARED_MLP,
        mixer=state_spaces.MAMBA2,
    ),
    "falcon-h1": Architecture(state_spaces.falcon_h1, mixer=state_spaces.MAMBA2),
    "nemotron_h": Architecture(
        state_spaces.nemotron_h, by_layer=_ONE_PART, mixer=state_spaces.MAMBA2
    ),
    "nemotron_h_moe": Architecture(
        state_spaces.nemotron_h, by_layer=_ONE_PART, mixer=state_spaces.MAMBA2
    ),
    "jamba": Architecture(state_spaces.jamba, by_layer=_KV_HEADS, mixer=state_spaces.MAMBA1),
    "mamba": Architecture(state_spaces.mamba, without=_NO_HEADS, mixer=state_spaces.MAMBA1),
    "mamba2": Architecture(state_spaces.mamba2, without=_NO_HEADS, mixer=state_spaces.MAMBA2),
    "lfm2": Architecture(convolutions.lfm2, by_layer=_KV_HEADS, roles=_LFM2, mixer=_CONVOLUTION),
    "lfm2moe": Architecture(
        convolutions.lfm2moe, by_layer=_KV_HEADS, roles=_LFM2, mixer=_CONVOLUTION
    ),
    "mimo2": Architecture(balanced.mimo2, by_layer=("num_key_value_heads",), narrow_values=True),
    "deepseek2": Architecture(deepseek2, latent=True, roles=_DEEPSEEK),
    "mistral4": Architecture(deepseek2, latent=True, roles=_DEEPSEEK),
    "gpt2": Architecture(gpt_like.gpt2),
    "starcoder": Architecture(gpt_like.starcoder),
    "gptneox": Architecture(gpt_like.gptneox),
    "bloom": Architecture(gpt_like.bloom),
    "falcon": Architecture(gpt_like.falcon, roles=_FALCON),
    "mpt": Architecture(gpt_like.mpt),
}
