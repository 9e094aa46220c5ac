"""Granite's kin: its mixtures, windows and sinks (IBM 2024 to 2026), HyperCLOVA X (Naver 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import granite
from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.reading import read_sliding_windows
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec

# What Granite Docling has where config.json says nothing.
_DOCLING: Final = {
    **{"embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.263},
    **{"attention_multiplier": 0.015625, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}


def granite_docling(config: ModelConfig) -> DecoderSpec:
    """Granite Docling (IBM 2026), with other defaults than Granite's."""
    return granite(replace(config, values={**_DOCLING, **config.values}))


def granitemoe(config: ModelConfig) -> DecoderSpec:
    separate = bool(config.get(SEPARATE_EXPERTS))
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", 8)),
        per_token=int(config.get("num_experts_per_tok", 2)),
        width=int(config.need("intermediate_size")),
        # softmax over the chosen experts, which is their normalised share of that over all
        normalise=True,
        gate_up="rows",
    )
    own = names.GRANITE_MOE_SEPARATE if separate else names.GRANITE_MOE
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
    separate = bool(config.get(SEPARATE_EXPERTS))
    return replace(
        own, names=names.GRANITE_MOE_SHARED_SEPARATE if separate else names.GRANITE_MOE_SHARED
    )


def granite_swa(config: ModelConfig) -> DecoderSpec:
    """Granite with sinks, and windows in all but the first of every four layers."""
    return replace(
        _with_windows(config, granite(config)),
        names=names.GRANITE_SWA,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def granitemoe_swa(config: ModelConfig) -> DecoderSpec:
    """Granite 5: its mixtures with such windows and sinks."""
    separate = bool(config.get(SEPARATE_EXPERTS))
    return replace(
        _with_windows(config, granitemoeshared(config)),
        names=names.GRANITE_MOE_SWA_SEPARATE if separate else names.GRANITE_MOE_SWA,
    )


def _with_windows(config: ModelConfig, spec: DecoderSpec) -> DecoderSpec:
    """Return `spec` with windows, and with a base of rotation per layer; 0: it does not rotate."""
    windows = read_sliding_windows(config, every=4, window=128, first=True)
    bases = config.get("layer_rope_theta") or [None] * len(windows)
    layers = []
    for layer, window, base in zip(spec.layers, windows, bases, strict=True):
        rotary_spec = layer.rotary
        if rotary_spec is not None and base is not None:
            rotary_spec = replace(rotary_spec, theta=float(base)) if base else None
        layers.append(replace(layer, window=window, rotary=rotary_spec))
    return replace(spec, layers=tuple(layers))


def hyperclovax(config: ModelConfig) -> DecoderSpec:
    """HyperCLOVA X SEED: logits are multiplied where Granite's are divided; norms after parts."""
    spec = granite(config)
    scale = float(config.get("attention_multiplier", spec.head_dim**-0.5))
    return replace(
        spec,
        layers=tuple(replace(layer, scale=scale) for layer in spec.layers),
        names=names.HYPERCLOVAX if config.get("use_post_norm", True) else names.LLAMA,
        logit_scale=float(config.get("logits_scaling", 1.0)),
    )
