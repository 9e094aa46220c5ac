"""Granite's mixtures (IBM 2024), and those of the fourth generation that have attention alone."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import granite
from tgi_trio.model.spec import DecoderSpec, ExpertsSpec


def granitemoe(config: ModelConfig) -> DecoderSpec:
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", 8)),
        per_token=int(config.get("num_experts_per_tok", 2)),
        width=int(config.need("intermediate_size")),
        normalise=True,  # a softmax of the chosen, which is their part of that of all
        gate_up="rows",
    )
    spec = replace(granite(config), names=names.GRANITE_MOE)
    return replace(spec, layers=tuple(replace(la, experts=experts) for la in spec.layers))


def granitemoehybrid(config: ModelConfig) -> DecoderSpec | None:
    """Granite 4 without states: every layer attends, through one MLP.

    Its mixtures have a shared expert whose gate and up are one matrix, which is not read here.
    """
    kinds = config.get("layer_types", config.get("layers_block_type"))
    if (
        not kinds
        or {*kinds} - {"attention", "full_attention"}
        or config.get("num_local_experts", 8)
    ):
        return None
    spec = replace(
        granite(config),
        names=names.GRANITE_MOE_HYBRID,
        mlp_width=int(config.get("shared_intermediate_size", 1024)),
    )
    if config.get("position_embedding_type") == "rope":
        return spec
    return replace(spec, layers=tuple(replace(la, rotary=None) for la in spec.layers))
