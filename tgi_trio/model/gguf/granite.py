"""Granite, dense, with experts or with state spaces: metadata in its families' terms."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.gguf import state_spaces
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    Values,
    check_normalised,
    expert_width,
    find_shape,
    read_by_layer,
    read_expert_scale,
    read_experts,
    read_first_sparse,
    read_windows,
)

_TURNED: Final = "attention.rope_pattern"
_SCALES: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def granite(model: GgufModel, values: Values) -> Values:
    if missing := [key for key in _SCALES if not model.get(key)]:
        raise ValueError(f"it has no {model.architecture}.{missing[0]}")
    return {"model_type": "granite"} | {ours: model.get(key) for key, ours in _SCALES.items()}


def granitemoe(model: GgufModel, values: Values) -> Values:
    """Granite's mixtures, with an MLP beside the experts or without."""
    return granite(model, values) | _mixture(model, "granitemoe", "granitemoeshared")


def granite_swa(model: GgufModel, values: Values) -> Values:
    """Granite with windows and sinks. A pattern may say which layers turn by position."""
    layers = values["num_hidden_layers"]
    turned = [1] * layers
    if model.get(_TURNED) is not None:
        turned = read_by_layer(model, _TURNED, layers)
    theta = values.get("rope_theta", 1e4)
    config = granite(model, values) | read_windows(model, layers)
    config |= {"layer_rope_theta": [theta if each else 0 for each in turned]}
    if not model.get("expert_count"):
        return config | {"model_type": "granite_swa"}
    return config | _mixture(model, "granitemoe_swa", "granitemoe_swa")


def bailingmoe(model: GgufModel, values: Values) -> Values:
    """Ling and Ring 1, whose shared experts are an MLP beside the others; nothing is scaled."""
    check_normalised(model)
    if read_expert_scale(model) != 1.0:
        raise ValueError("the weights of its experts are multiplied by a number")
    if read_first_sparse(model, values):
        raise ValueError("its first layers have no experts")
    unscaled = {"attention_multiplier": values["head_dim"] ** -0.5}
    return unscaled | _mixture(model, "granitemoe", "granitemoeshared")


def _mixture(model: GgufModel, alone: str, beside: str) -> Values:
    """Return the config of experts; `alone`, `beside`: the types without an MLP, and with one."""
    config = read_experts(model) | {
        SEPARATE_EXPERTS: True,
        "intermediate_size": expert_width(model),
    }
    if "blk.0.ffn_down_shexp.weight" not in model.tensors:
        return config | {"model_type": alone, "shared_intermediate_size": 0}
    width = find_shape(model, "ffn_down_shexp")[-1]
    return config | {"model_type": beside, "shared_intermediate_size": width}


def granitehybrid(model: GgufModel, values: Values) -> Values:
    """Granite 4 H, or Bamba, which has no scales and has positions in its attention."""
    config = state_spaces.granitehybrid(model, values)
    if any(model.get(key) is not None for key in _SCALES):
        return granite(model, values) | config
    if config["position_embedding_type"] == "nope" or model.get("expert_count"):
        return granite(model, values)  # which reports the missing key
    attending = [i for i, kind in enumerate(config["layer_types"]) if kind == "attention"]
    del config["layer_types"]
    return config | {"model_type": "bamba", "attn_layer_indices": attending}
