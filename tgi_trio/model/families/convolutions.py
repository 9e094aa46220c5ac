"""Families of short convolutions among layers of attention (LFM2, Liquid AI 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.mixers import ShortConvolution
from tgi_trio.model.reading import rotary
from tgi_trio.model.spec import DecoderSpec, ExpertsSpec, Names

_THETA: Final = 1000000.0


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
    """LFM2 with mixtures of experts in all but the first layers, chosen as DeepSeek-V3 does."""
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


def _lfm2(config: ModelConfig, kept: Names, width: int) -> DecoderSpec:
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    spec = llama_spec(
        config,
        turning=rotary(config, int(config.get("head_dim", hidden // heads)), theta=_THETA),
        names=kept,
        mlp_width=width,
        norm_eps=float(config.get("norm_eps", 1e-5)),
        query_key_norm="head",
        activation="silu",
        tied_head=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
    )
    mixer = ShortConvolution(
        channels=hidden,
        taps=int(config.get("conv_L_cache", 3)),
        bias=bool(config.get("conv_bias", False)),
    )
    layers = (
        layer if attends else replace(layer, mixer=mixer, attends=False, rotary=None)
        for layer, attends in zip(spec.layers, _attending(config, len(spec.layers)), strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _attending(config: ModelConfig, count: int) -> list[bool]:
    """Return which layers have attention; older files say so by their numbers."""
    kinds = config.get("layer_types")
    if kinds:
        return [kind == "full_attention" for kind in kinds]
    numbers = config.get("full_attn_idxs", range(count))
    return [i in set(numbers) for i in range(count)]
