"""Families in which most layers have linear attention, by a delta rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.checkpoint_traits import name_layers
from tgi_trio.model.families.expert_layers import set_experts
from tgi_trio.model.families.llama_like import SEPARATE_PROJECTIONS, attention_bias, llama_spec
from tgi_trio.model.families.mixtures import set_qwen_experts
from tgi_trio.model.reading import rotary, with_sections
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, LatentSpec, Names, RotarySpec
from tgi_trio.model.specs.mixers import DeltaLayout, DeltaRule, Mixer

_PARTIAL: Final = 0.25  # of a head that is rotated
# A key in the config that we make of a GGUF file: see `DeltaRule.tiled`.
VALUE_HEADS_TILED: Final = "value_heads_tiled"


def qwen3_next(config: ModelConfig) -> DecoderSpec:
    """Qwen3-Next: three of four layers have linear attention; all are mixtures of experts."""
    rotary_spec = rotary(config, _head_dim(config), partial=_PARTIAL)
    layout: DeltaLayout = "mixed" if config.get(SEPARATE_PROJECTIONS) else "grouped"
    spec = _qwen(config, names.QWEN3_NEXT, rotary_spec, layout)
    shared_width = int(config.get("shared_expert_intermediate_size", 512))
    return set_qwen_experts(config, spec, shared_width, normalise=True)


def qwen3_5(config: ModelConfig) -> DecoderSpec:
    """Qwen 3.5 and 3.6, the dense ones."""
    return _qwen(config, names.QWEN3_5, _turning_by_grids(config), "stacked")


def qwen3_5_moe(config: ModelConfig) -> DecoderSpec:
    """Qwen 3.5 and 3.6, the mixtures of experts; weights of the chosen experts sum to one."""
    stated = {"norm_topk_prob": True, "intermediate_size": 0}  # there is no dense MLP
    config = replace(config, values={**config.values, **stated})
    spec = _qwen(config, names.QWEN3_NEXT, _turning_by_grids(config), "stacked")
    return set_qwen_experts(config, spec, int(config.get("shared_expert_intermediate_size", 512)))


def _turning_by_grids(config: ModelConfig) -> RotarySpec:
    """Return the rotary embedding with three positions for the tokens of an image (M-RoPE)."""
    rotary_spec = rotary(config, _head_dim(config), partial=_PARTIAL)
    return with_sections(rotary_spec, (11, 11, 10), alternate=True)


def _head_dim(config: ModelConfig) -> int:
    return int(config.get("head_dim", 256))


def _qwen(
    config: ModelConfig, kept: Names, rotary_spec: RotarySpec, layout: DeltaLayout
) -> DecoderSpec:
    spec = llama_spec(
        config,
        head_dim=_head_dim(config),
        rotary_spec=rotary_spec,
        names=kept,
        norm="rms_plus_one",
        query_key_norm="head",
        gated_attention=True,
        **attention_bias(config),
    )
    return set_mixers(spec, delta_rule(config, spec, layout), _kinds(config, every=4))


def delta_rule(
    config: ModelConfig, spec: DecoderSpec, layout: DeltaLayout, **changes: Any
) -> DeltaRule:
    """Return the delta rule, by the names that Qwen3-Next gave its numbers."""
    fields: dict[str, Any] = {
        "key_heads": int(config.get("linear_num_key_heads", 16)),
        "value_heads": int(config.get("linear_num_value_heads", 32)),
        "key_dim": int(config.get("linear_key_head_dim", 128)),
        "value_dim": int(config.get("linear_value_head_dim", 128)),
        "taps": int(config.get("linear_conv_kernel_dim", 4)),
        "layout": layout,
        "tiled": bool(config.get(VALUE_HEADS_TILED)),
        "norm_eps": spec.norm_eps,
        "activation": spec.activation,
    }
    return DeltaRule(**(fields | changes))


def set_mixers(spec: DecoderSpec, mixer: Mixer, kinds: list[str]) -> DecoderSpec:
    """Replace attention by `mixer` in the layers that are not "full_attention".

    Raises ValueError for an unknown kind of layer.
    """
    if unknown := set(kinds) - {"full_attention", "linear_attention"}:
        raise ValueError(f"layer_types has {sorted(unknown)[0]!r}, which this family does not have")
    layers = (
        layer
        if kind == "full_attention"
        else replace(layer, mixer=mixer, attends=False, rotary=None)
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _kinds(config: ModelConfig, every: int) -> list[str]:
    """Return the kind of each layer; by default, the last of every `every` layers has attention."""
    every = int(config.get("full_attention_interval", every))
    count = int(config.need("num_hidden_layers"))
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    return list(config.get("layer_types", default))


def olmo_hybrid(config: ModelConfig) -> DecoderSpec:
    """OLMo hybrid: linear layers have norms before both parts, attention layers after them."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    count = int(config.need("num_hidden_layers"))
    default = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(count)]
    if "full_attention" not in default:
        default[-1] = "full_attention"
    kinds = list(config.get("layer_types", default))
    parameters = config.get("rope_parameters", {})
    stated = parameters if "rope_theta" in parameters else config.values
    spec = llama_spec(
        config,
        rotates=stated.get("rope_theta", 0.0) is not None,  # null: no positions
        names=names.OLMO_HYBRID,
        query_key_norm="whole",
        **attention_bias(config),
    )
    key_heads = int(config.get("linear_num_key_heads", heads))
    key_dim = int(config.get("linear_key_head_dim", int(0.75 * hidden / key_heads)))
    mixer = delta_rule(
        config,
        spec,
        "separate",
        key_heads=key_heads,
        value_heads=int(config.get("linear_num_value_heads", heads)),
        key_dim=key_dim,
        value_dim=int(config.get("linear_value_head_dim", 2 * key_dim)),
        norm_eps=1e-5,
        beta_scale=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
    )
    spec = set_mixers(spec, mixer, kinds)
    choices = (names.OLMO2, names.OLMO_HYBRID_ATTENTION)
    attending = name_layers(config, kinds.index("full_attention"), choices)
    layers = (replace(la, names=attending) if la.attends else la for la in spec.layers)
    return replace(spec, layers=tuple(layers))


def kimi_linear(config: ModelConfig) -> DecoderSpec:
    """Kimi Linear: a decay per channel, latent attention without positions, DeepSeek's experts."""
    own = dict(config.get("linear_attn_config", {}))
    count = int(config.need("num_hidden_layers"))
    latent = LatentSpec(
        rank=int(config.get("kv_lora_rank", 512)),
        query_rank=int(config.get("q_lora_rank", 0)),
        plain_dim=int(config.get("qk_nope_head_dim", 128)),
        rotary_dim=int(config.get("qk_rope_head_dim", 64)),
        value_dim=int(config.get("v_head_dim", 128)),
    )
    # Nothing is rotated: positions are divided by infinity. The parts that DeepSeek rotates are
    # there, and all heads still share their key.
    still = RotarySpec(dim=latent.rotary_dim, kind="linear", parameters={"factor": inf})
    spec = replace(
        llama_spec(
            config,
            names=names.KIMI_LINEAR,
            rotary_spec=still,
            scale=(latent.plain_dim + latent.rotary_dim) ** -0.5,
            norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        ),
        latent=latent,
        kv_heads=1,
        head_dim=latent.rank + latent.rotary_dim,
    )
    full = set(own.get("full_attn_layers", range(5, count + 1, 4)))  # counted from one
    default = ["full_attention" if i in full else "linear_attention" for i in range(1, count + 1)]
    mixer = _kimi_mixer(config, own, spec)
    spec = set_mixers(spec, mixer, list(config.get("layer_types", default)))
    first = int(config.get("first_k_dense_replace", 1))
    default = ["dense" if i < first else "sparse" for i in range(count)]
    kinds = list(config.get("mlp_layer_types", default))
    experts = _kimi_experts(config)
    return set_experts(spec, experts, (kind == "sparse" for kind in kinds))


def _kimi_mixer(config: ModelConfig, own: Mapping[str, Any], spec: DecoderSpec) -> DeltaRule:
    """Return the linear attention; `own`: its part of the configuration."""
    heads = int(own.get("num_heads", config.get("linear_num_heads", 32)))
    head_dim = int(own.get("head_dim", config.get("linear_head_dim", 128)))
    return DeltaRule(
        key_heads=heads,
        value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        taps=int(own.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4))),
        layout="compressed",
        norm_eps=spec.norm_eps,
        by_channel=True,
        channel_rank=head_dim,
        gate="sigmoid",
        activation=spec.activation,
    )


def _kimi_experts(config: ModelConfig) -> ExpertsSpec:
    width = int(config.get("moe_intermediate_size", 1024))
    return ExpertsSpec(
        count=int(config.get("num_experts", 256)),
        per_token=int(config.get("num_experts_per_token", 8)),
        width=width,
        normalise=bool(config.get("moe_renormalize", True)),
        shared_width=width * int(config.get("num_shared_experts", 1)),
        routing="grouped-sigmoid",
        groups=int(config.get("num_expert_group", 1)),
        groups_used=int(config.get("topk_group", 1)),
        scale=float(config.get("routed_scaling_factor", 2.446)),
    )
