"""Ling and Ring (inclusionAI): mixtures on attention of Llama's shape (1 and 2, 2025).

Version 3 (2026) has delta rules with a decay per channel, and latents with gated heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.deepseek import deepseek_spec, v3_experts
from tgi_trio.model.families.expert_layers import set_experts
from tgi_trio.model.families.linear_attention import set_mixers
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec
from tgi_trio.model.specs.mixers import DeltaRule

# Names that DeepSeek gave its numbers -> other names of the same, then the family's defaults.
_NAMES: Final[dict[str, tuple[tuple[str, ...], Any]]] = {
    "intermediate_size": ((), 6144),
    "moe_intermediate_size": ((), 768),
    "n_routed_experts": (("num_experts", "num_local_experts"), 512),
    "num_experts_per_tok": (("num_experts_per_token",), 8),
    "n_shared_experts": (("num_shared_experts",), 1),
    "n_group": (("num_expert_group",), 8),
    "norm_topk_prob": (("moe_renormalize",), True),
}
# Which layers are dense, and which have latents, where no list says it.
_LAYERS: Final = (("first_k_dense_replace", 2), ("layer_group_size", 6))


def bailing_moe(config: ModelConfig) -> DecoderSpec | None:
    """Ling 1 and 2, whose published files have the same type: `architectures` tells them apart.

    None for biases of experts, and for heads that are normalised by columns.
    """
    newer = _is_second(config)
    biased = bool(config.get("use_bias", not newer))
    if config.get("norm_head") or (biased and not newer):
        return None
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    # Ling 1T states how much of a head turns by its width alone.
    part = float(config.get("rotary_dim", head_dim)) / head_dim if newer else 1.0
    normed = bool(config.get("use_qk_norm", newer))
    corrected = newer and bool(config.get("moe_router_enable_expert_bias", True))
    own = names.BAILING_MOE_V2 if newer else names.BAILING_MOE
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary(config, head_dim, partial=part),
        names=own if corrected else replace(own, choice_bias=""),
        qkv_layout="stacked",
        query_key_norm="head" if normed else "none",
        qkv_bias=bool(config.get("use_qkv_bias", False)),
        output_bias=biased,
        norm_eps=float(config.get("rms_norm_eps", 1e-6 if newer else 1e-5)),
    )
    first, experts = int(config.get("first_k_dense_replace", 0)), _experts(config, newer)
    return set_experts(spec, experts, (i >= first for i in range(len(spec.layers))))


def _is_second(config: ModelConfig) -> bool:
    """Return whether a config is Ling 2's."""
    classes = config.get("architectures", [])
    return config.model_type == "bailing_moe_v2" or any("MoeV2" in str(each) for each in classes)


def _experts(config: ModelConfig, newer: bool) -> ExpertsSpec:
    width = int(config.need("moe_intermediate_size"))
    experts = ExpertsSpec(
        count=int(config.need("num_experts")),
        per_token=int(config.need("num_experts_per_tok")),
        width=width,
        normalise=bool(config.get("norm_topk_prob", True)),
        shared_width=width * int(config.get("num_shared_experts", 0)),
    )
    if not newer:
        return experts
    return replace(
        experts,
        routing="grouped-sigmoid",
        groups=int(config.get("n_group", 1)),
        groups_used=int(config.get("topk_group", 1)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )


def bailing_hybrid(config: ModelConfig) -> DecoderSpec | None:
    """Ling 3; None for queries that are compressed, which no class of transformers has."""
    config = _renamed(config)
    if config.get("q_lora_rank"):
        return None
    count = int(config.need("num_hidden_layers"))
    first, every = (int(config.get(*own)) for own in _LAYERS)
    mlps = config.get("mlp_layer_types") or [
        "dense" if i < first else "sparse" for i in range(count)
    ]
    spec = deepseek_spec(
        config,
        v3_experts(config, groups=8, groups_used=4),
        names.BAILING_HYBRID,
        sparse=[kind == "sparse" for kind in mlps],
        query_rank=0,
        theta=6000000.0,
    )
    spec = replace(spec, gated_heads=True)
    kinds = config.get("layer_types") or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(count)
    ]
    return set_mixers(spec, _mixer(config, spec), list(kinds))


def _renamed(config: ModelConfig) -> ModelConfig:
    """Return the config with the names that DeepSeek's families have for the same."""
    values = {**config.values, "rope_interleave": True, "mlp_bias": False}
    for name, (others, default) in _NAMES.items():
        stated = (values[own] for own in (*others, name) if values.get(own) is not None)
        values[name] = next(stated, default)
    return replace(config, values=values)


def _mixer(config: ModelConfig, spec: DecoderSpec) -> DeltaRule:
    # In files of transformers `head_dim` is that of what latents rotate.
    dim = int(config.get("linear_head_dim", config.get("head_dim", 128)))
    heads = int(config.get("linear_num_heads", spec.heads))
    taps = config.get("linear_conv_kernel_dim", config.get("short_conv_kernel_size", 4))
    bounded = bool(config.get("kda_safe_gate", True))
    return DeltaRule(
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        taps=int(taps),
        layout="full rank",
        norm_eps=spec.norm_eps,
        by_channel=True,
        gate="sigmoid",
        least_decay=float(config.get("kda_lower_bound", -5.0)) if bounded else 0.0,
        activation=spec.activation,
    )
