"""Ling 3 (inclusionAI 2026): delta rules with a decay per channel, and latents with gated heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.deepseek import deepseek_spec, v3_experts
from tgi_trio.model.families.linear_attention import set_mixers
from tgi_trio.model.specs.decoder import DecoderSpec
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
