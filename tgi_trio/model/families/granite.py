"""Granite's mixtures (IBM 2024 to 2026)."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import granite
from tgi_trio.model.families.mixtures import EXPERTS_APART
from tgi_trio.model.spec import DecoderSpec, ExpertsSpec, RotarySpec


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


def granitemoeshared(config: ModelConfig) -> DecoderSpec:
    """With an MLP beside the experts, if it has a width."""
    spec, width = granitemoe(config), int(config.get("shared_intermediate_size", 0))
    layers = (
        replace(la, experts=replace(la.experts, shared_width=width))
        for la in spec.layers
        if la.experts
    )
    own = replace(spec, mlp_width=width or spec.mlp_width, layers=tuple(layers))
    return replace(own, names=names.GRANITE_MOE_SHARED)


def granitemoe_swa(config: ModelConfig) -> DecoderSpec:
    """Granite 5: windows in three of four layers, sinks, and a rotary base for each layer."""
    spec, count = granitemoeshared(config), int(config.need("num_hidden_layers"))
    kinds = config.get("layer_types") or [
        "sliding_attention" if i % 4 else "full_attention" for i in range(count)
    ]
    window = int(config.values.get("sliding_window", 128) or 0)
    bases = config.get("layer_rope_theta") or [None] * count
    layers = (
        replace(
            la,
            window=window if kind == "sliding_attention" else 0,
            rotary=la.rotary if base is None else _with_base(la.rotary, float(base)),
        )
        for la, kind, base in zip(spec.layers, kinds, bases, strict=True)
    )
    return replace(spec, names=names.GRANITE_MOE_SWA, layers=tuple(layers))


def _with_base(turning: RotarySpec | None, base: float) -> RotarySpec | None:
    """Return a layer's rotary embedding; base 0: the layer has no positions."""
    return replace(turning, theta=base) if turning and base else None
