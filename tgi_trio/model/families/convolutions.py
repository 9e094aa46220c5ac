"""Families of short convolutions between layers of attention (LFM2, LFM3; Liquid AI 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, Names
from tgi_trio.model.specs.mixers import ShortConvolution

_THETA: Final = 1000000.0

# LFM3's defaults.
_LFM3_PATTERN: Final = ("sliding_attention", "conv", "full_attention", "conv")
_LFM3_ROTARY: Final = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": _THETA,
        "partial_rotary_factor": 0.5,
    },
}


def lfm2(config: ModelConfig) -> DecoderSpec:
    width = int(config.get("block_ff_dim", config.get("intermediate_size", 12288)))
    if config.get("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        factor = config.values.get("block_ffn_dim_multiplier", 1.0)
        if factor is not None:
            unit = int(config.get("block_multiple_of", 256))
            width = unit * -(-int(factor * width) // unit)
    return _lfm2(config, names.LFM2, width)


def lfm2_moe(config: ModelConfig) -> DecoderSpec:
    """LFM2 with experts in all but the first layers, chosen as in DeepSeek-V3."""
    biased = bool(config.get("use_expert_bias", True))
    kept = names.LFM2_MOE if biased else replace(names.LFM2_MOE, choice_bias="")
    experts = ExpertsSpec(
        count=int(config.get("num_experts", 32)),
        per_token=int(config.get("num_experts_per_tok", 4)),
        width=int(config.get("moe_intermediate_size", 1792)),
        normalise=bool(config.get("norm_topk_prob", True)),
        routing="grouped-sigmoid",
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    spec = _lfm2(config, kept, int(config.get("intermediate_size", 7168)))
    dense = int(config.get("num_dense_layers", 2))
    layers = (la if i < dense else replace(la, experts=experts) for i, la in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


def lfm3(config: ModelConfig) -> DecoderSpec:
    """LFM3: norms after both parts of a layer, windows, a gate for each head."""
    count, head_dim = int(config.need("num_hidden_layers")), int(config.get("head_dim", 128))
    pattern = ["conv", *(_LFM3_PATTERN[i % 4] for i in range(1, count))]
    kinds = config.get("layer_types", pattern)
    if not config.get("rope_parameters"):
        config = replace(config, values={**config.values, "rope_parameters": _LFM3_ROTARY})
    kept = names.LFM3
    if not config.get("use_sandwich_norm", True):
        kept = replace(kept, attention_post_norm="", mlp_post_norm="")
    window = int(config.get("sliding_window", 256))
    spec = llama_spec(
        config,
        head_dim=head_dim,
        windows=[window if kind == "sliding_attention" else 0 for kind in kinds],
        rotates=False,
        names=kept,
        norm_eps=float(config.get("norm_eps", 1e-5)),
        query_key_norm="head",
        activation="silu",
        tied_head=bool(config.get("tie_word_embeddings", True)),
        gated_heads=bool(config.get("use_attention_gate", True)),
        **attention_bias(config),
    )
    turnings = {
        kind: rotary(config, head_dim, theta=_THETA, layer_type=kind)
        for kind in set(kinds) - {"conv"}
    }
    mixer = _convolution(config, spec.hidden_size, taps=7)
    layers = (
        replace(layer, mixer=mixer, attends=False)
        if kind == "conv"
        else replace(layer, rotary=turnings[kind])
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _lfm2(config: ModelConfig, kept: Names, width: int) -> DecoderSpec:
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    spec = llama_spec(
        config,
        rotary_spec=rotary(config, int(config.get("head_dim", hidden // heads)), theta=_THETA),
        names=kept,
        mlp_width=width,
        norm_eps=float(config.get("norm_eps", 1e-5)),
        query_key_norm="head",
        activation="silu",
        tied_head=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
    )
    mixer = _convolution(config, hidden, taps=3)
    layers = (
        layer if attends else replace(layer, mixer=mixer, attends=False, rotary=None)
        for layer, attends in zip(spec.layers, _attending(config, len(spec.layers)), strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _convolution(config: ModelConfig, hidden: int, taps: int) -> ShortConvolution:
    """Return the convolution; `taps`: the family's default. Raises ValueError if it is none."""
    taps = int(config.get("conv_L_cache", taps))
    if taps < 2:
        raise ValueError(f"conv_L_cache {taps} is no convolution over tokens")
    return ShortConvolution(
        channels=hidden,
        taps=taps,
        bias=bool(config.get("conv_bias", False)),
    )


def _attending(config: ModelConfig, count: int) -> list[bool]:
    """Return which layers have attention; older files list their numbers."""
    kinds = config.get("layer_types")
    if kinds:
        return [kind == "full_attention" for kind in kinds]
    numbers = config.get("full_attn_idxs", range(count))
    return [i in set(numbers) for i in range(count)]
