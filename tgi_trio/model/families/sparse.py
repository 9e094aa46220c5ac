"""Sparse latent attention, with an index that chooses tokens: DeepSeek V3.2, GLM 5, Hunyuan 4."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.deepseek import deepseek_spec, v3_experts
from tgi_trio.model.specs.decoder import DecoderSpec, HyperSpec, IndexSpec


def deepseek_v32(config: ModelConfig) -> DecoderSpec | None:
    """DeepSeek V3.2: V3 with an index in every layer; the index rotates pairs half a head apart."""
    spec = deepseek_spec(
        config,
        v3_experts(config, groups=8, groups_used=4),
        names.DEEPSEEK_V32,
        sparse=_sparse(config),
    )
    return _set_index(config, spec, heads=64, interleaved=False)


def glm_moe_dsa(config: ModelConfig) -> DecoderSpec | None:
    """GLM 5: layers may reuse the choice of the preceding one; rotated pairs are neighbours."""
    spec = deepseek_spec(
        config,
        v3_experts(config, groups=1, groups_used=1),
        names.DEEPSEEK_V32,
        sparse=_sparse(config),
        query_rank=2048,
        plain_dim=192,
        value_dim=256,
        norm_eps=1e-5,
    )
    own = choosing_layers(config, len(spec.layers))
    layers = (
        replace(layer, chooses=chooses) for layer, chooses in zip(spec.layers, own, strict=True)
    )
    spec = replace(spec, layers=tuple(layers))
    return _set_index(config, spec, heads=32, interleaved=True)


def axk2(config: ModelConfig) -> DecoderSpec | None:
    """A.X-K2 (SK Telecom 2026): V3.2 with gates of norms and of values; dense MLPs have no gate."""
    count, every = int(config.need("num_hidden_layers")), int(config.get("moe_layer_freq", 1))
    first, kinds = int(config.get("first_k_dense_replace", 1)), config.get("mlp_layer_types")
    sparse = [i >= first and i % every == 0 for i in range(count)]
    sparse = [kind == "sparse" for kind in kinds] if kinds else sparse
    values = {"moe_intermediate_size": 512, **config.values, "rope_interleave": True}
    config = replace(config, values=values)
    spec = deepseek_spec(
        config,
        v3_experts(config, groups=1, groups_used=1, count=128),
        names.AXK2,
        sparse=sparse,
        rank=128,
        query_rank=384,
        plain_dim=64,
        rotary_dim=32,
        value_dim=64,
    )
    dense = replace(names.AXK2, mlp_norm="post_attention_layernorm", mlp_norm_gate="")
    layers = (la if la.experts else replace(la, names=dense) for la in spec.layers)
    spec = replace(
        spec,
        layers=tuple(layers),
        gated_values=True,
        norm_gate_rank=int(config.get("gated_norm_rank", 16)),
        latent=replace(spec.latent, doubled=True) if spec.latent else None,
    )
    return _set_index(config, spec, heads=16, interleaved=False)


def hy_v4(config: ModelConfig) -> DecoderSpec | None:
    """Hunyuan 4 (2026): sinks, gates of values, several hidden states, limits of routed experts.

    None without limits, which transformers cannot compute either, for other kinds of layers, and
    for other activations, which its routed experts do not have.
    """
    count = int(config.get("num_hidden_layers", 34))
    defaults = {
        "hidden_size": 2816,
        "intermediate_size": 6912,
        "moe_intermediate_size": 768,
        "num_hidden_layers": count,
        "num_attention_heads": 32,
        "routed_scaling_factor": 2.827,
        "mlp_layer_types": ["dense"] + ["sparse"] * (count - 1),
        "indexer_types": ["full" if i == 0 or (i - 1) % 4 == 0 else "shared" for i in range(count)],
    }
    given = {name: value for name, value in config.values.items() if value is not None}
    config = replace(config, values={**defaults, **given, "rope_interleave": False})
    limit = float(config.get("swiglu_limit", 10.0))
    if limit <= 0.0 or set(config.get("layer_types", ())) - {"indexed_attention"}:
        return None
    if config.get("hidden_act", "silu") != "silu":
        return None
    experts = v3_experts(config, groups=1, groups_used=1)
    spec = deepseek_spec(
        config,
        replace(experts, limit=limit, raised=False, shared_limit=0.0),
        names.HY_V4,
        sparse=_sparse(config),
        plain_dim=192,
        value_dim=256,
        norm_eps=1e-5,
    )
    own = choosing_layers(config, count)
    layers = (
        replace(layer, chooses=chooses) for layer, chooses in zip(spec.layers, own, strict=True)
    )
    hyper = HyperSpec(
        count=int(config.get("hc_mult", 4)),
        iterations=0,
        eps=float(config.get("hc_eps", 1e-6)),
        added=float(config.get("hc_magnitude", 2.0)),
        added_eps=float(config.get("hc_eps", 1e-6)),
    )
    spec = replace(spec, layers=tuple(layers), gated_values=True, hyper=hyper)
    indexed = _set_index(config, spec, heads=16, interleaved=False)
    if indexed is None or indexed.index is None:
        return None
    return replace(indexed, index=replace(indexed.index, last=True, norm_eps=spec.norm_eps))


def _sparse(config: ModelConfig) -> list[bool]:
    """Return which layers are mixtures of experts."""
    kinds = config.get("mlp_layer_types")
    if kinds:
        return [kind == "sparse" for kind in kinds]
    first = int(config.get("first_k_dense_replace", 3))
    return [i >= first for i in range(int(config.need("num_hidden_layers")))]


def choosing_layers(config: ModelConfig, count: int) -> list[bool]:
    """Return which layers have their own index."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds:
        return [kind in ("full", "F") for kind in kinds]
    every = max(int(config.get("index_topk_freq", 1)), 1)
    first = int(config.get("index_skip_topk_offset", 2))
    return [max(i - first + 1, 0) % every == 0 for i in range(count)]


def _set_index(
    config: ModelConfig, spec: DecoderSpec, *, heads: int, interleaved: bool
) -> DecoderSpec | None:
    """Return `spec` with an index; `heads`: the family's default, `interleaved`: its rotary pairs.

    None if queries are not compressed, since index queries are computed from compressed ones.
    """
    latent, rotary_spec = spec.latent, spec.layers[0].rotary
    if latent is None or not latent.query_rank or rotary_spec is None or not spec.layers[0].chooses:
        return None
    index = IndexSpec(
        heads=int(config.get("index_n_heads", heads)),
        dim=int(config.get("index_head_dim", 128)),
        most=int(config.get("index_topk", 2048)),
        rotary=replace(rotary_spec, interleaved=interleaved),
    )
    return replace(spec, index=index, head_dim=spec.head_dim + index.dim)
