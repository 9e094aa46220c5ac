"""DeepSeek V2, V3 and their kin: latent attention, dense or with experts chosen by groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.checkpoint_traits import is_stored
from tgi_trio.model.families.llama_kin import with_yarn
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import (
    DecoderSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    Names,
    RotarySpec,
)


def deepseek_v2(config: ModelConfig) -> DecoderSpec:
    by_group = config.get("topk_method", "greedy") == "group_limited_greedy"
    width = int(config.need("moe_intermediate_size"))
    experts = ExpertsSpec(
        count=int(config.get("n_routed_experts", 64)),
        per_token=int(config.need("num_experts_per_tok")),
        width=width,
        normalise=False,
        shared_width=width * int(config.get("n_shared_experts", 2)),
        routing="grouped-softmax",
        groups=int(config.get("n_group", 1)) if by_group else 1,
        groups_used=int(config.get("topk_group", 1)) if by_group else 1,
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    return _deepseek(config, experts, names.DEEPSEEK_V2, dense=0)


def deepseek_v3(config: ModelConfig) -> DecoderSpec:
    experts = v3_experts(config, groups=8, groups_used=4)
    return _deepseek(config, experts, names.DEEPSEEK_V3, dense=3)


def sarvam_mla(config: ModelConfig) -> DecoderSpec:
    """Sarvam 105B (Sarvam AI 2026): V3 that chooses among all experts and compresses no queries."""
    scaling = config.get("rope_scaling", {})
    if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):  # as it was published
        scaling = {**scaling, "type": "yarn", "rope_type": "yarn"}
        config = replace(config, values={**config.values, "rope_scaling": scaling})
    experts = v3_experts(config, groups=1, groups_used=1, count=128)
    return _deepseek(config, experts, names.DEEPSEEK_V3, dense=1, query_rank=0)


def v3_experts(
    config: ModelConfig, *, groups: int, groups_used: int, count: int = 256
) -> ExpertsSpec:
    """Return the experts of V3 and its successors; the numbers are defaults."""
    width = int(config.get("moe_intermediate_size", 2048))
    return ExpertsSpec(
        count=int(config.get("n_routed_experts", count)),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=width,
        normalise=bool(config.get("norm_topk_prob", True)),
        shared_width=width * int(config.get("n_shared_experts", 1)),
        routing="grouped-sigmoid",
        groups=int(config.get("n_group", groups)),
        groups_used=int(config.get("topk_group", groups_used)),
        scale=float(config.get("routed_scaling_factor", 2.5)),
    )


def axk1(config: ModelConfig) -> DecoderSpec:
    """A.X-K1 (SK Telecom 2026): V3 with a norm of what experts say; on the hub no bias for them."""
    kinds, every = config.get("mlp_layer_types"), int(config.get("moe_layer_freq", 1))
    first, count = (
        int(config.get("first_k_dense_replace", 1)),
        int(config.need("num_hidden_layers")),
    )
    sparse = [i >= first and i % every == 0 for i in range(count)]
    sparse = [kind == "sparse" for kind in kinds] if kinds else sparse
    own = names.AXK1
    if True in sparse and not is_stored(config, own, sparse.index(True), own.choice_bias):
        own = replace(own, choice_bias="")
    experts = v3_experts(config, groups=8, groups_used=4, count=192)
    spec = deepseek_spec(config, experts, own, sparse=sparse)
    dense = replace(own, mlp_post_norm="")
    layers = (la if la.experts else replace(la, names=dense) for la in spec.layers)
    return replace(spec, layers=tuple(layers))


def mistral4(config: ModelConfig) -> DecoderSpec | None:
    """Mistral Small 4 (2026): softmax routing, and queries scaled by their position."""
    if int(config.get("n_group", 1)) > 1:  # V3's score of a group, the sum of its two best
        return None
    config = with_yarn(config, factor=128.0, original=8192, theta=10000.0)
    width = int(config.get("moe_intermediate_size", 2048))
    experts = ExpertsSpec(
        count=int(config.get("n_routed_experts", config.get("num_local_experts", 128))),
        per_token=int(config.get("num_experts_per_tok", 4)),
        width=width,
        normalise=bool(config.get("norm_topk_prob", True)),
        shared_width=width * int(config.get("n_shared_experts", 1)),
        routing="grouped-softmax",
        scale=float(config.get("routed_scaling_factor", 1.0)),
        gate_up="rows",
    )
    first = int(config.get("first_k_dense_replace", 0))
    sparse = [i >= first for i in range(int(config.need("num_hidden_layers")))]
    return deepseek_spec(
        config,
        experts,
        names.MISTRAL4_APART if config.get(SEPARATE_EXPERTS) else names.MISTRAL4,
        sparse=sparse,
        rank=256,
        query_rank=1024,
        plain_dim=64,
    )


def youtu(config: ModelConfig) -> DecoderSpec:
    """Youtu-LLM (Tencent 2026): DeepSeek-V3's attention in a dense model."""
    spec = _dense(config)
    return replace(spec, tied_head=bool(config.get("tie_word_embeddings", True)))


def minicpm3(config: ModelConfig) -> DecoderSpec:
    """MiniCPM3 (OpenBMB 2024): pairs are half of what turns apart; scaled as MiniCPM is."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    layers = int(config.need("num_hidden_layers"))
    values = {**config.values, "rope_interleave": False}
    spec = _dense(
        replace(config, values=values),
        rank=256,
        query_rank=768,
        plain_dim=64,
        rotary_dim=32,
        value_dim=hidden // heads,
        norm_eps=1e-5,
    )
    # null scales nothing, as in the class of transformers
    depth = config.values.get("scale_depth", 1.4)
    base = config.values.get("dim_model_base", 256)
    before_head = 1.0 if base is None else float(base) / hidden
    return replace(
        spec,
        tied_head=bool(config.get("tie_word_embeddings", True)),
        embedding_scale=float(config.get("scale_emb", 12)),
        residual_scale=1.0 if depth is None else float(depth) / math.sqrt(layers),
        logit_scale=before_head,
        head_input_scale=before_head,
    )


def _dense(config: ModelConfig, **defaults: Any) -> DecoderSpec:
    """Return the spec of a model without experts; `defaults` as for `deepseek_spec`."""
    sparse = [False] * int(config.need("num_hidden_layers"))
    return deepseek_spec(config, None, names.LATENT, sparse=sparse, **defaults)


def _deepseek(
    config: ModelConfig, experts: ExpertsSpec, kept: Names, *, dense: int, **defaults: int
) -> DecoderSpec:
    """Return the spec with `experts` in all but the first layers, by default `dense` of them."""
    first = int(config.get("first_k_dense_replace", dense))
    sparse = [i >= first for i in range(int(config.need("num_hidden_layers")))]
    return deepseek_spec(config, experts, kept, sparse=sparse, **defaults)


def deepseek_spec(
    config: ModelConfig,
    experts: ExpertsSpec | None,
    kept: Names,
    *,
    sparse: list[bool],
    rank: int = 512,
    query_rank: int = 1536,
    plain_dim: int = 128,
    rotary_dim: int = 64,
    value_dim: int = 128,
    norm_eps: float = 1e-6,
    theta: float = 10000.0,
) -> DecoderSpec:
    """Return the spec of a model with latent attention, with `experts` in the `sparse` layers.

    The other arguments are a family's defaults.
    """
    latent = LatentSpec(
        rank=int(config.get("kv_lora_rank", rank)),
        # null means that queries are not compressed; absent means the family's default
        query_rank=int(config.values.get("q_lora_rank", query_rank) or 0),
        plain_dim=int(config.get("qk_nope_head_dim", plain_dim)),
        rotary_dim=int(config.get("qk_rope_head_dim", rotary_dim)),
        value_dim=int(config.get("v_head_dim", value_dim)),
        bias=bool(config.get("attention_bias", False)),
    )
    rotary_spec = rotary(
        config,
        latent.rotary_dim,
        theta=theta,
        interleaved=bool(config.get("rope_interleave", True)),
    )
    rotary_spec = replace(rotary_spec, dim=latent.rotary_dim)  # "partial" refers to a whole head
    layer = LayerSpec(scale=_scale(latent, rotary_spec), rotary=rotary_spec)
    spec = llama_spec(
        config,
        names=kept,
        rotary_spec=rotary_spec,
        output_bias=latent.bias,
        norm_eps=float(config.get("rms_norm_eps", norm_eps)),
    )
    return replace(
        spec,
        latent=latent,
        kv_heads=1,
        head_dim=latent.rank + latent.rotary_dim,
        mlp_bias=bool(config.get("mlp_bias", False)),
        layers=tuple(replace(layer, experts=experts) if own else layer for own in sparse),
    )


def _scale(latent: LatentSpec, rotary_spec: RotarySpec) -> float:
    """Return the scale of scores, which YaRN raises for contexts longer than trained for."""
    scale: float = (latent.plain_dim + latent.rotary_dim) ** -0.5
    weight, factor = (
        rotary_spec.parameters.get("mscale_all_dim"),
        rotary_spec.parameters.get("factor", 1.0),
    )
    if rotary_spec.kind != "default" and weight and factor > 1:
        scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
    return scale
