"""GLM 5.3 Flash (2026): delta rules and an index of runs, between several hidden states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.deepseek import v3_experts
from tgi_trio.model.families.expert_layers import set_experts
from tgi_trio.model.families.linear_attention import set_mixers
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.families.sparse import choosing_layers
from tgi_trio.model.specs.decoder import (
    DecoderSpec,
    HyperSpec,
    IndexSpec,
    LatentSpec,
    LayerSpec,
    RotarySpec,
)
from tgi_trio.model.specs.mixers import DeltaRule

_LINEAR, _INDEXED, _FULL = "linear_attention", "indexed_attention", "full_attention"
_LEAST_DECAY: Final = -5.0


def glm5_next(config: ModelConfig) -> DecoderSpec | None:
    """The text of GLM 5.3 Flash; nothing is rotated.

    None for variants that no published model is: other activations, queries that are not
    compressed, rotated dimensions, an index that leaves out the last tokens.
    """
    latent, index = _latent(config), _index(config)
    limit, bound = float(config.get("swiglu_limit", 10.0)), _least_decay(config)
    odd = limit <= 0.0 or bound == 0.0 or config.get("hidden_act", "silu") != "silu"
    odd |= not latent.query_rank or latent.rotary_dim > 0 or min(index.pool, index.most) < 1
    if odd or not config.get("index_kpool_always_select_tail", True):
        return None
    if index.most % index.pool:
        raise ValueError(f"index_topk is {index.most}, which is not in runs of {index.pool}")
    biased = bool(config.get("attention_bias", False))
    spec = llama_spec(
        config,
        names=names.GLM5_NEXT,
        rotary_spec=index.rotary,
        scale=latent.plain_dim**-0.5,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        latent=replace(latent, bias=biased),
        index=index,
        kv_heads=1,
        output_bias=biased,
        mlp_limit=limit,
        mlp_raised=False,
        hyper=HyperSpec(
            count=int(config.get("hc_mult", 4)),
            iterations=int(config.get("hc_sinkhorn_iters", 20)),
            eps=float(config.get("hc_eps", 1e-6)),
        ),
    )
    spec = replace(spec, head_dim=latent.rank + index.kept)
    spec = set_mixers(spec, _mixer(config, spec, bound or 0.0), _kinds(config, len(spec.layers)))
    return _set_choices(config, _set_experts(config, spec, limit))


def _latent(config: ModelConfig) -> LatentSpec:
    return LatentSpec(
        rank=int(config.get("kv_lora_rank", 512)),
        query_rank=int(config.values.get("q_lora_rank", 1536) or 0),
        plain_dim=int(config.get("qk_nope_head_dim", 256)),
        rotary_dim=int(config.get("qk_rope_head_dim", 0)),
        value_dim=int(config.get("v_head_dim", 256)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )


def _index(config: ModelConfig) -> IndexSpec:
    return IndexSpec(
        heads=int(config.get("index_n_heads", 32)),
        dim=int(config.get("index_head_dim", 128)),
        most=int(config.get("index_topk", 2048)),
        rotary=RotarySpec(dim=0),
        pool=int(config.get("index_kpool", 16)),
    )


def _linear(config: ModelConfig) -> dict[str, Any]:
    """Return what published files say of delta rules in a table of its own."""
    return dict(config.get("linear_attn_config", {}))


def _least_decay(config: ModelConfig) -> float | None:
    """Return the bound of decays' logarithms, None if they have none."""
    own = _linear(config)
    bound = config.values.get("linear_lower_bound", _LEAST_DECAY)
    bound = own.get("gate_lower_bound", bound)
    if own and bound is None and own.get("safe_gate", True):
        bound = _LEAST_DECAY
    return None if bound is None else float(bound)


def _mixer(config: ModelConfig, spec: DecoderSpec, bound: float) -> DeltaRule:
    own = _linear(config)
    heads = int(own.get("num_heads", config.get("linear_num_heads", 64)))
    dim = int(own.get("head_dim", config.get("linear_head_dim", 128)))
    taps = own.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4))
    return DeltaRule(
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        taps=int(taps),
        layout="low rank",
        norm_eps=spec.norm_eps,
        by_channel=True,
        channel_rank=dim,
        gate="sigmoid",
        least_decay=bound,
    )


def _kinds(config: ModelConfig, count: int) -> list[str]:
    """Return the kinds of layers; those with an index are full attention here."""
    stated = config.get("layer_types")
    kinds = stated or [_FULL if i % 4 == 3 else _LINEAR for i in range(count)]
    return [_FULL if kind == _INDEXED else kind for kind in kinds]


def _set_experts(config: ModelConfig, spec: DecoderSpec, limit: float) -> DecoderSpec:
    stated = config.get("mlp_layer_types")
    kinds = stated or ["dense" if i < 3 else "sparse" for i in range(len(spec.layers))]
    routed = v3_experts(config, groups=1, groups_used=1, count=288)
    experts = replace(routed, limit=limit, raised=False)
    return set_experts(spec, experts, (kind == "sparse" for kind in kinds))


def _set_choices(config: ModelConfig, spec: DecoderSpec) -> DecoderSpec | None:
    """Return `spec` with layers that reuse a choice; None if one has no layer's just before it."""
    layers: list[LayerSpec] = []
    for layer, chooses in zip(spec.layers, choosing_layers(config, len(spec.layers)), strict=True):
        own = chooses or not layer.attends
        if not own and not (layers and layers[-1].attends and layers[-1].chooses):
            return None
        layers.append(replace(layer, chooses=own))
    return replace(spec, layers=tuple(layers))
