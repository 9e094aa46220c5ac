"""GLM-4 (Zhipu AI 2024) and its successors: dense, mixtures, latent attention, vision models."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.deepseek import deepseek_spec
from tgi_trio.model.families.expert_layers import set_experts
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.reading import rotary, with_sections
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, RotarySpec

# A key in the config that we make of a GGUF file: rotated pairs are half a head apart.
PAIRS_IN_HALVES: Final = "pairs_in_halves"


def _glm(config: ModelConfig, *, head_dim: int, partial: float, biased: bool) -> DecoderSpec:
    """Norms before and after each part; rotated pairs are neighbours."""
    interleaved = not config.get(PAIRS_IN_HALVES, False)
    return llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary(config, head_dim, partial=partial, interleaved=interleaved),
        names=names.GLM4,
        qkv_bias=biased,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )


def glm(config: ModelConfig) -> DecoderSpec:
    """GLM-4 9B and GLM-Edge (Zhipu AI 2024): norms before each part alone."""
    return replace(glm4(config), names=names.GLM)


def glm4(config: ModelConfig) -> DecoderSpec:
    head_dim = int(config.get("head_dim", 128))
    biased = bool(config.get("attention_bias", True))
    spec = _glm(config, head_dim=head_dim, partial=0.5, biased=biased)
    return replace(spec, norm_eps=float(config.get("rms_norm_eps", 1.5625e-7)))


def glm4v(config: ModelConfig) -> DecoderSpec:
    """The text of GLM-4.1V and GLM-4.6V."""
    return _turn_by_images(_glm(config, head_dim=_head_dim(config), partial=1.0, biased=True))


def glm_ocr(config: ModelConfig) -> DecoderSpec:
    return _turn_by_images(_glm(config, head_dim=_head_dim(config), partial=1.0, biased=False))


def glm4_moe(config: ModelConfig, *, biased: bool = False) -> DecoderSpec:
    """GLM-4.5 to 4.7: half of a head is rotated, and experts are like DeepSeek-V3's."""
    spec = llama_spec(
        config,
        head_dim=_head_dim(config),
        rotary_spec=rotary(config, _head_dim(config), partial=0.5),
        names=names.GLM4_MOE,
        query_key_norm="head" if config.get("use_qk_norm", False) else "none",
        qkv_bias=bool(config.get("attention_bias", biased)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )
    return _set_experts(
        config, spec, _experts(config, width=1408, count=128, per_token=8, scale=1.0)
    )


def sarvam_moe(config: ModelConfig) -> DecoderSpec:
    """Sarvam 30B (Sarvam AI 2026): GLM-4.5 whose heads turn whole, under the names of Ling 2."""
    head_dim = int(config.get("head_dim", 64))
    spec = llama_spec(
        config,
        head_dim=head_dim,
        kv_heads=int(config.get("num_key_value_heads", 4)),
        rotary_spec=rotary(config, head_dim, theta=8000000.0),
        names=names.BAILING_MOE_V2,
        qkv_layout="stacked",
        query_key_norm="head" if config.get("use_qk_norm", True) else "none",
        qkv_bias=bool(config.get("attention_bias", False)),
    )
    experts = _experts(config, width=1024, count=128, per_token=6, scale=2.5)
    return _set_experts(config, spec, experts)


def _set_experts(config: ModelConfig, spec: DecoderSpec, experts: ExpertsSpec) -> DecoderSpec:
    first = int(config.get("first_k_dense_replace", 1))
    return set_experts(spec, experts, (i >= first for i in range(len(spec.layers))))


def glm4v_moe(config: ModelConfig) -> DecoderSpec:
    return _turn_by_images(glm4_moe(config, biased=True))


def glm4_moe_lite(config: ModelConfig) -> DecoderSpec:
    """GLM-4.7-Flash: DeepSeek-V3's architecture with other numbers."""
    kinds = config.get("mlp_layer_types")
    first = int(config.get("first_k_dense_replace", 1))
    sparse = [i >= first for i in range(int(config.need("num_hidden_layers")))]
    return deepseek_spec(
        config,
        _experts(config, width=1536, count=64, per_token=4, scale=1.8),
        names.DEEPSEEK_V3,
        sparse=[kind == "sparse" for kind in kinds] if kinds else sparse,
        query_rank=768,
        plain_dim=192,
        value_dim=256,
        norm_eps=1e-5,
    )


def _turn_by_images(spec: DecoderSpec) -> DecoderSpec:
    """Return a text whose image tokens have three positions (M-RoPE)."""

    def turn(rotary: RotarySpec | None) -> RotarySpec | None:
        return None if rotary is None else with_sections(rotary, (8, 12, 12), alternate=False)

    layers = (replace(layer, rotary=turn(layer.rotary)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _experts(
    config: ModelConfig, *, width: int, count: int, per_token: int, scale: float
) -> ExpertsSpec:
    width = int(config.get("moe_intermediate_size", width))
    return ExpertsSpec(
        count=int(config.get("n_routed_experts", config.get("num_local_experts", count))),
        per_token=int(config.get("num_experts_per_tok", per_token)),
        width=width,
        normalise=bool(config.get("norm_topk_prob", True)),
        shared_width=width * int(config.get("n_shared_experts", 1)),
        routing="grouped-sigmoid",
        groups=int(config.get("n_group", 1)),
        groups_used=int(config.get("topk_group", 1)),
        scale=float(config.get("routed_scaling_factor", scale)),
    )


def _head_dim(config: ModelConfig) -> int:
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    return int(config.get("head_dim", hidden // heads))
