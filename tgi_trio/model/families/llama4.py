"""Llama 4 (Meta 2025): chunked attention, layers without positions, mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, LayerSpec, QueryScale, RotarySpec

# Rotary scalings that keep the length of a head. Heads are normalised after the rotation; if
# lengths are kept, doing it before is the same, and kernels can do both.
_KEEPING_LENGTHS: Final = ("default", "linear", "dynamic", "llama3")


def llama4(config: ModelConfig) -> DecoderSpec:
    head_dim = int(config.get("head_dim", 128))
    rotary_spec = rotary(config, head_dim, theta=500000.0, interleaved=True)
    divided = (
        rotary_spec.kind == "divided" and rotary_spec.parameters.get("attention_factor") == 1.0
    )
    keeps_lengths = divided or rotary_spec.kind in _KEEPING_LENGTHS
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", 16)),
        per_token=int(config.get("num_experts_per_tok", 1)),
        width=int(config.need("intermediate_size")),
        normalise=False,
        shared_width=int(config.need("intermediate_size")),
        routing="sigmoid",
        gate_up="halves",
        weighs_inputs=True,
    )
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary_spec,
        names=names.LLAMA4_APART if config.get(SEPARATE_EXPERTS) else names.LLAMA4,
        kv_heads=int(config.get("num_key_value_heads", 8)),
        mlp_width=int(config.get("intermediate_size_mlp", 16384)),
        query_key_norm="bare" if config.get("use_qk_norm", True) else "none",
        norm_after_rotary=not keeps_lengths,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )
    count = len(spec.layers)
    turned, mixtures = _list_rotated(config, count), _mixtures(config, count)
    chunk = int(config.values.get("attention_chunk_size", 8192) or 0)
    kinds = config.get("layer_types") or [
        "chunked_attention" if own else "full_attention" for own in turned
    ]
    still = _without_positions(config)
    layers = (
        LayerSpec(
            scale=head_dim**-0.5,
            chunk=chunk if kinds[i] == "chunked_attention" else 0,
            rotary=rotary_spec if turned[i] else still,
            experts=experts if i in mixtures else None,
        )
        for i in range(count)
    )
    return replace(spec, layers=tuple(layers))


def _list_rotated(config: ModelConfig, count: int) -> list[bool]:
    """Return which layers rotate queries and keys."""
    if stated := config.get("no_rope_layers"):  # 1 for those that do, in spite of its name
        return [bool(own) for own in stated]
    every = int(config.get("no_rope_layer_interval", 4))
    return [(i + 1) % every != 0 for i in range(count)]


def _mixtures(config: ModelConfig, count: int) -> set[int]:
    """Return which layers are mixtures of experts."""
    stated = config.get("moe_layers")
    if stated is not None:
        return {int(i) for i in stated}
    step = int(config.get("interleave_moe_layer_step", 1))
    return set(range(step - 1, count, step))


def _without_positions(config: ModelConfig) -> RotarySpec | None:
    """Return the scaling of queries in layers without rotation."""
    if not config.get("attn_temperature_tuning", True):
        return None
    beta, step = float(config.get("attn_scale", 0.1)), int(config.get("floor_scale", 8192))
    return RotarySpec(dim=0, query_scale=QueryScale(beta, step, offset=1))
