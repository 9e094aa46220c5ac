"""Granite, dense, with experts or with state spaces: metadata in its families' terms."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.families.mixtures import EXPERTS_APART
from tgi_trio.model.gguf import state_spaces
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import Values, expert_width, read_experts

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
    return granite(model, values) | {
        "model_type": "granitemoe",
        EXPERTS_APART: True,
        "intermediate_size": expert_width(model),
    } | read_experts(model)  # fmt: skip


def granitehybrid(model: GgufModel, values: Values) -> Values:
    """Granite 4 H, or Bamba, which has no scales and has positions in its attention."""
    said = state_spaces.granitehybrid(model, values)
    if any(model.get(key) is not None for key in _SCALES):
        return granite(model, values) | said
    if said["position_embedding_type"] == "nope" or model.get("expert_count"):
        return granite(model, values)  # which reports the missing key
    attending = [i for i, kind in enumerate(said["layer_types"]) if kind == "attention"]
    del said["layer_types"]
    return said | {"model_type": "bamba", "attn_layer_indices": attending}
