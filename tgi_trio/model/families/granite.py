"""Granite's mixtures (IBM 2024)."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import granite
from tgi_trio.model.families.mixtures import EXPERTS_APART
from tgi_trio.model.spec import DecoderSpec, ExpertsSpec


def granitemoe(config: ModelConfig) -> DecoderSpec:
    apart = bool(config.get(EXPERTS_APART))
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", 8)),
        per_token=int(config.get("num_experts_per_tok", 2)),
        width=int(config.need("intermediate_size")),
        # softmax over the chosen experts, which is their normalised share of that over all
        normalise=True,
        gate_up="rows",
    )
    own = names.GRANITE_MOE_APART if apart else names.GRANITE_MOE
    spec = replace(granite(config), names=own)
    return replace(spec, layers=tuple(replace(la, experts=experts) for la in spec.layers))
