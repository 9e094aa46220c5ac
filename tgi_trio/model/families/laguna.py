"""Laguna (Poolside 2026): query heads in numbers that differ by layer, behind softplus gates."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.balanced import set_sparse
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.reading import read_sliding_windows, rotary, without_loose_rotary
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, HeadSizes, RotarySpec

_FULL, _SLIDING = "full_attention", "sliding_attention"


def laguna(config: ModelConfig) -> DecoderSpec | None:
    gates = config.get("gating", True)
    if gates not in (True, "per-head", "per-element"):
        return None
    if config.get("moe_apply_router_weight_on_input", False):
        return None
    head_dim, wide = int(config.get("head_dim", 128)), gates == "per-element"
    spec = llama_spec(
        config,
        head_dim=head_dim,
        windows=read_sliding_windows(config, window=512),
        names=names.LAGUNA_WIDE_GATES if wide else names.LAGUNA,
        query_key_norm="head",
        gated_attention=wide,
        gated_heads=not wide,
        gate_activation="softplus",
        **attention_bias(config),
    )
    count = len(spec.layers)
    rotary_spec = {kind: _turn(config, head_dim, kind) for kind in (_FULL, _SLIDING)}
    heads = config.get("num_attention_heads_per_layer") or [spec.heads] * count
    layers = (
        replace(
            la,
            rotary=rotary_spec[_SLIDING if la.window else _FULL],
            sizes=HeadSizes(spec.kv_heads, head_dim, head_dim, int(own)),
        )
        for la, own in zip(spec.layers, heads, strict=True)
    )
    experts = ExpertsSpec(
        count=int(config.get("num_experts", config.get("num_local_experts", 256))),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=int(config.get("moe_intermediate_size", 512)),
        normalise=True,
        shared_width=int(config.get("shared_expert_intermediate_size", 512)),
        routing="grouped-sigmoid",
        scale=float(config.get("moe_routed_scaling_factor", 1.0)),
        logit_cap=float(config.get("moe_router_logit_softcapping", 0.0)),
    )
    kinds = config.get("mlp_layer_types") or ["dense"] + ["sparse"] * (count - 1)
    spec = replace(spec, layers=tuple(layers))
    return set_sparse(spec, experts, [kind == "sparse" for kind in kinds])


def _turn(config: ModelConfig, head_dim: int, kind: str) -> RotarySpec:
    """Return the rotary embedding of a kind of layer, for which keys beside the sets do not count.

    By default it turns half of each head in layers without a window, and less slowly with one.
    """
    config = without_loose_rotary(config)
    if config.get("rope_parameters"):
        return rotary(config, head_dim, layer_type=kind)
    theta, part = {_FULL: (500000.0, 0.5), _SLIDING: (10000.0, 1.0)}[kind]
    return rotary(config, head_dim, theta=theta, partial=part)
