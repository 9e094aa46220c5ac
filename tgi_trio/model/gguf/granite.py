"""Granite, dense, with experts or with states: metadata in the words of its families."""

from __future__ import annotations

from tgi_trio.model.families.mixtures import EXPERTS_APART
from tgi_trio.model.gguf import state_spaces
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import Values, expert_width, read_experts


def granite(model: GgufModel, values: Values) -> Values:
    keys = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    if missing := [key for key in keys if not model.get(key)]:
        raise ValueError(f"it has no {model.architecture}.{missing[0]}")
    return {"model_type": "granite"} | {ours: model.get(key) for key, ours in keys.items()}


def granitemoe(model: GgufModel, values: Values) -> Values:
    return granite(model, values) | {
        "model_type": "granitemoe",
        EXPERTS_APART: True,
        "intermediate_size": expert_width(model),
    } | read_experts(model)  # fmt: skip


def granitehybrid(model: GgufModel, values: Values) -> Values:
    return granite(model, values) | state_spaces.granitehybrid(model, values)
