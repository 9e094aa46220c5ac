"""Families most of whose layers attend linearly, by a delta rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.families.mixtures import set_qwen_experts
from tgi_trio.model.mixers import DeltaLayout, DeltaRule, Mixer
from tgi_trio.model.reading import rotary
from tgi_trio.model.spec import DecoderSpec, Names


def qwen3_next(config: ModelConfig) -> DecoderSpec:
    """Qwen3-Next: three layers of four attend linearly, all are mixtures of experts."""
    spec = _qwen(config, names.QWEN3_NEXT, "grouped")
    return set_qwen_experts(config, spec, int(config.get("shared_expert_intermediate_size", 512)))


def qwen3_5(config: ModelConfig) -> DecoderSpec:
    """Qwen 3.5 and 3.6, the dense ones."""
    return _qwen(config, names.QWEN3_5, "stacked")


def qwen3_5_moe(config: ModelConfig) -> DecoderSpec:
    """Qwen 3.5 and 3.6, the mixtures of experts; their chosen experts' weights sum to one."""
    stated = {"norm_topk_prob": True, "intermediate_size": 0}  # there is no dense MLP
    config = replace(config, values={**config.values, **stated})
    spec = _qwen(config, names.QWEN3_NEXT, "stacked")
    return set_qwen_experts(config, spec, int(config.get("shared_expert_intermediate_size", 512)))


def _qwen(config: ModelConfig, kept: Names, layout: DeltaLayout) -> DecoderSpec:
    head_dim = int(config.get("head_dim", 256))
    spec = llama_spec(
        config,
        head_dim=head_dim,
        turning=rotary(config, head_dim, partial=0.25),
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
    """Return the delta rule by the names that Qwen3-Next gave its numbers."""
    fields: dict[str, Any] = {
        "key_heads": int(config.get("linear_num_key_heads", 16)),
        "value_heads": int(config.get("linear_num_value_heads", 32)),
        "key_dim": int(config.get("linear_key_head_dim", 128)),
        "value_dim": int(config.get("linear_value_head_dim", 128)),
        "taps": int(config.get("linear_conv_kernel_dim", 4)),
        "layout": layout,
        "norm_eps": spec.norm_eps,
    }
    return DeltaRule(**(fields | changes))


def set_mixers(spec: DecoderSpec, mixer: Mixer, kinds: list[str]) -> DecoderSpec:
    """Give `mixer` to the layers that are no "full_attention", in its place.

    Raises ValueError for a kind of layer that is neither.
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
    """Return what each layer is; unless that is stated, the last of `every` so many attends."""
    every = int(config.get("full_attention_interval", every))
    count = int(config.need("num_hidden_layers"))
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    return list(config.get("layer_types", default))
