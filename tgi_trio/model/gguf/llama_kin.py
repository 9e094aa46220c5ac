"""Llama and its dense relatives: metadata in their families' terms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from tgi_trio.model.families.llama_like import NORMS_STACKED, SEPARATE_PROJECTIONS
from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    expert_width,
    read_count,
    read_experts,
    read_number,
    read_own_layers,
    read_query_scale,
    read_windows,
)

# Apertus' activation parameters, which are metadata -> their names in a layer.
XIELU: Final = {
    f"xielu.{number}": f"mlp.act_fn.{number}" for number in ("alpha_p", "alpha_n", "beta", "eps")
}


def llama(model: GgufModel, values: Values) -> Values:
    """Llama, Mistral and Mixtral, which are one architecture in GGUF."""
    if not model.get("expert_count"):
        return {"model_type": "llama"}
    return {
        "model_type": "mixtral",
        **read_experts(model),
        "intermediate_size": expert_width(model),
    }


def plain(model_type: str) -> Callable[[GgufModel, Values], Values]:
    """Return the function of a family that needs only its name."""
    return lambda model, values: {"model_type": model_type}


def xverse(model: GgufModel, values: Values) -> Values:
    """XVERSE; the converter mixes up the rows of keys that several heads share."""
    if values.get("num_key_value_heads", 0) not in (0, values["num_attention_heads"]):
        raise ValueError("its heads share keys")
    return {"model_type": "llama"}


def minicpm(model: GgufModel, values: Values) -> Values:
    """MiniCPM 1, 2 and 4, scaled as Granite is; older files do not state their scales."""
    layers, hidden = values["num_hidden_layers"], values["hidden_size"]
    return {
        "model_type": "granite",
        "attention_multiplier": values["head_dim"] ** -0.5,
        "embedding_multiplier": read_number(model, "embedding_scale", 12.0),
        "residual_multiplier": read_number(model, "residual_scale", 1.4 / math.sqrt(layers)),
        "logits_scaling": read_number(model, "logit_scale", hidden / 256),
    }


def orion(model: GgufModel, values: Values) -> Values:
    """Orion: StableLM's layers, in which whole heads turn."""
    return stablelm(model, values) | {"use_parallel_residual": False}


def baichuan(model: GgufModel, values: Values) -> Values:
    """Baichuan 1 and 2; as in llama.cpp, 40 layers mean a 13B model, which does not rotate."""
    return {
        "model_type": "baichuan",
        SEPARATE_PROJECTIONS: True,
        "alibi": values["num_hidden_layers"] == 40,
    }


def seed_oss(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "seed_oss",
        "attention_out_bias": "blk.0.attn_output.bias" in model.tensors,
    }


def ernie4_5(model: GgufModel, values: Values) -> Values:
    return {"model_type": "ernie4_5", "use_bias": values["attention_bias"]}


def nemotron(model: GgufModel, values: Values) -> Values:
    eps = model.get("attention.layer_norm_epsilon", 1e-5)
    return {"model_type": "nemotron", "norm_eps": eps}


def phi3(model: GgufModel, values: Values) -> Values:
    return {"model_type": "phi3", "sliding_window": model.get("attention.sliding_window", 0)}


def mistral3(model: GgufModel, values: Values) -> Values:
    """Ministral 3, whose queries are scaled by their position if the file states the scale."""
    if model.get("expert_count"):
        raise ValueError("it has experts, which no model of its family has")
    return {"model_type": "ministral3", "sliding_window": None} | read_query_scale(
        model, values, sharper=read_number(model, "rope.scaling.yarn_log_multiplier", 0.0)
    )


def llama4(model: GgufModel, values: Values) -> Values:
    """Llama 4; files do not state chunks and scales; the largest model does not normalise heads."""
    experts = read_experts(model, read_count(model, "interleave_moe_layer_step") - 1)
    # then all layers have full attention and positions
    every = model.get("attention.sliding_window") == 0
    layers = values["num_hidden_layers"]
    return {
        "model_type": "llama4_text",
        SEPARATE_EXPERTS: True,
        "num_local_experts": experts["num_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "intermediate_size": read_count(model, "expert_feed_forward_length"),
        "intermediate_size_mlp": values["intermediate_size"],
        "interleave_moe_layer_step": read_count(model, "interleave_moe_layer_step"),
        "use_qk_norm": experts["num_experts"] != 128,
        "attn_temperature_tuning": not every,
    } | ({"no_rope_layers": [1] * layers, "attention_chunk_size": None} if every else {})


def apertus(model: GgufModel, values: Values) -> Values:
    for key in XIELU:
        numbers = model.metadata.get(key)
        if not isinstance(numbers, list) or len(numbers) < values["num_hidden_layers"]:
            raise ValueError(f"its {key} names not all layers")
        if key not in model.lists or not all(map(math.isfinite, numbers)):
            raise ValueError(f"its {key} cannot be {numbers}")
    return {"model_type": "apertus", "mlp_bias": False} | (
        {} if values.get("rope_scaling") else {"rope_scaling": {"rope_type": "default"}}
    )


def bitnet(model: GgufModel, values: Values) -> Values:
    """BitNet; files do not state the activation, which differs between the two published ones.

    llama.cpp computes that of the first models, which have Llama's vocabulary; Microsoft's own, of
    2 B weights, has Llama 3's.
    """
    newer = model.metadata.get("tokenizer.ggml.model") == "gpt2"
    return {"model_type": "bitnet", "hidden_act": "relu2" if newer else "silu"}


def olmo2(model: GgufModel, values: Values) -> Values:
    """OLMo 2 or 3; the latter has windows, in the layers that the file lists."""
    windows = read_windows(model, values["num_hidden_layers"])
    return {"model_type": "olmo3" if windows["sliding_window"] else "olmo2"} | windows


def exaone4(model: GgufModel, values: Values) -> Values:
    """EXAONE 4; version 4.5 may have layers for multi-token prediction."""
    layers = read_own_layers(model, values)
    return {
        "model_type": "exaone4",
        "num_hidden_layers": layers,
    } | read_windows(model, layers, every=4)  # fmt: skip


def jais2(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "jais2",
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", 1e-5),
    }


def starcoder2(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "starcoder2",
        "norm_epsilon": model.get("attention.layer_norm_epsilon", 1e-5),
        "use_bias": values["attention_bias"],
        "sliding_window": None,
    }


def command_r(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "cohere",
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": model.get("logit_scale", 0.0625),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
    }


def cohere2(model: GgufModel, values: Values) -> Values:
    """Every fourth layer has full attention without positions, as in every model of the family."""
    return {
        "model_type": "cohere2",
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": model.get("logit_scale", 0.0625),
        "sliding_window": model.get("attention.sliding_window", 4096),
        "sliding_window_pattern": 4,
    }


def olmo(model: GgufModel, values: Values) -> Values:
    return {"model_type": "olmo", "clip_qkv": model.get("attention.clamp_kqv")}


def phi2(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "phi",
        "hidden_act": "gelu_new",
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": False,
    }


def stablelm(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "stablelm",
        "layer_norm_eps": model.get("attention.layer_norm_epsilon", 1e-5),
        "use_parallel_residual": bool(model.get("use_parallel_residual", False)),
        "use_qkv_bias": values["attention_bias"],
        "qk_layernorm": any("attn_q_norm" in name for name in model.tensors),
        NORMS_STACKED: True,
    }
