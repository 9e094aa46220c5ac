"""One key per token and keys of whole runs of tokens beside it: DeepSeek V4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import (
    CompressionSpec,
    DecoderSpec,
    ExpertsSpec,
    HeadSizes,
    HyperSpec,
    IndexSpec,
    LayerSpec,
    RotarySpec,
    SharedKeySpec,
)

_WINDOW, _SPARSE, _HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
_RATES: Final = {_SPARSE: 4, _HEAVY: 128}
_OLDER_RATES: Final = {_SPARSE: "compress_rate_csa", _HEAVY: "compress_rate_hca"}
# Kinds of layers, by numbers of the older `compress_ratios`.
_BY_RATIO: Final = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
_ROTATED: Final = 64 / 512  # of a head
_SERVED_SCALINGS: Final = ("default", "linear", "llama3", "yarn")


def deepseek_v4(config: ModelConfig) -> DecoderSpec | None:
    """DeepSeek V4 (2026).

    None for variants that transformers knows, and no published model is: other scores of experts,
    biases in the shared expert, rotation that depends on the length. Raises ValueError for numbers
    that make no model.
    """
    head_dim = int(config.get("head_dim", 512))
    main, compressed = (_rotary(config, head_dim, kind) for kind in ("main", "compress"))
    limit = float(config.get("swiglu_limit", 10.0))
    odd = config.get("scoring_func", "sqrtsoftplus") != "sqrtsoftplus" or limit <= 0.0
    if odd or config.get("mlp_bias") or compressed.kind not in _SERVED_SCALINGS:
        return None
    heads = int(config.get("num_attention_heads", 64))
    groups = int(config.get("o_groups", 8))
    if heads % groups:
        raise ValueError(f"{heads} attention heads cannot be {groups} groups (o_groups)")
    experts, rates = _experts(config, limit), _rates(config)

    def layer(kind: str, *, by_token: bool = False) -> LayerSpec:
        compression = _compression(config, kind, rates, compressed)
        kept = compression.kept(head_dim) if compression else 0
        return LayerSpec(
            scale=head_dim**-0.5,
            window=int(config.get("sliding_window", 128)),
            rotary=main if kind == _WINDOW else compressed,
            experts=replace(experts, by_token=by_token),
            sizes=HeadSizes(1, head_dim + kept, head_dim),
            compression=compression,
        )

    kinds = zip(_kinds(config), _by_token(config), strict=True)
    spec = llama_spec(_with_sizes(config), head_dim=head_dim, rotary_spec=main)
    return replace(
        spec,
        kv_heads=1,
        names=names.DEEPSEEK_V4,
        layers=tuple(layer(kind, by_token=by_token) for kind, by_token in kinds),
        mtp=(layer(_WINDOW),) * _count_mtp_layers(config),
        shared_key=SharedKeySpec(
            query_rank=int(config.get("q_lora_rank", 1024)),
            groups=groups,
            group_rank=int(config.get("o_lora_rank", 1024)),
        ),
        hyper=HyperSpec(
            count=int(config.get("hc_mult", 4)),
            iterations=int(config.get("hc_sinkhorn_iters", 20)),
            eps=float(config.get("hc_eps", 1e-6)),
        ),
    )


def _experts(config: ModelConfig, limit: float) -> ExpertsSpec:
    width = int(config.get("moe_intermediate_size", 2048))
    return ExpertsSpec(
        count=int(config.get("n_routed_experts", config.get("num_local_experts", 256))),
        per_token=int(config.get("num_experts_per_tok", 6)),
        width=width,
        normalise=True,
        shared_width=width,
        routing="sqrt-softplus",
        scale=float(config.get("routed_scaling_factor", 1.5)),
        limit=limit,
        raised=False,
    )


def _with_sizes(config: ModelConfig) -> ModelConfig:
    """Return the config with the sizes that it may leave out."""
    defaults = {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_hidden_layers": 43,
        "num_key_value_heads": 1,
        "intermediate_size": config.get("moe_intermediate_size", 2048),
    }
    return replace(config, values={**defaults, **config.values})


def _count(config: ModelConfig) -> int:
    return int(config.get("num_hidden_layers", 43))


def _kinds(config: ModelConfig) -> list[str]:
    """Return each layer's kind; older files have ratios, of further layers as well."""
    count = _count(config)
    kinds = config.get("layer_types")
    ratios = config.get("compress_ratios")
    if not kinds and ratios:
        if unknown := sorted(set(ratios) - _BY_RATIO.keys()):
            raise ValueError(f"compress_ratios may have 0, 4 and 128, not {unknown[0]!r}")
        kinds = [_BY_RATIO[ratio] for ratio in ratios]
    if not kinds:
        others = [_SPARSE if i % 2 else _HEAVY for i in range(count - 2)]
        kinds = [_HEAVY] * min(count, 2) + others
    kinds = list(kinds)[:count]
    if len(kinds) != count or not set(kinds) <= {_WINDOW, _SPARSE, _HEAVY}:
        raise ValueError(
            f"layer_types must name {count} layers, each {_WINDOW}, {_SPARSE} or {_HEAVY}"
        )
    return kinds


def _count_mtp_layers(config: ModelConfig) -> int:
    """Return how many layers draft tokens ahead. Published ones have no entries: their ratio is 0.

    0 where ratios say otherwise.
    """
    further = (config.get("compress_ratios") or [])[_count(config) :]
    return 0 if any(further) else int(config.get("num_nextn_predict_layers", 1) or 0)


def _by_token(config: ModelConfig) -> list[bool]:
    """Return which layers have a table of each token's experts."""
    count, kinds = _count(config), config.get("mlp_layer_types")
    if not kinds:
        first = int(config.get("num_hash_layers", 3))
        return [i < first for i in range(count)]
    if len(kinds) < count or not set(kinds) <= {"hash_moe", "moe"}:
        raise ValueError(f"mlp_layer_types must name {count} layers, each hash_moe or moe")
    return [kind == "hash_moe" for kind in kinds[:count]]


def _rates(config: ModelConfig) -> dict[str, int]:
    """Return how many tokens a run has, by the kind of layer."""
    rates = {**_RATES, **(config.get("compress_rates") or {})}
    for kind, older in _OLDER_RATES.items():
        rates[kind] = int(config.get(older, rates[kind]))
        if rates[kind] < 1:
            raise ValueError(f"compress_rates of {kind} must be positive, not {rates[kind]}")
    return rates


def _compression(
    config: ModelConfig, kind: str, rates: dict[str, int], rotary_spec: RotarySpec
) -> CompressionSpec | None:
    if kind == _WINDOW:
        return None
    index = IndexSpec(
        heads=int(config.get("index_n_heads", 64)),
        dim=int(config.get("index_head_dim", 128)),
        most=int(config.get("index_topk", 512)),
        rotary=rotary_spec,
    )
    sparse = kind == _SPARSE
    return CompressionSpec(rates[kind], overlaps=sparse, index=index if sparse else None)


def _rotary(config: ModelConfig, head_dim: int, kind: str) -> RotarySpec:
    """Return the rotation of layers without ("main") or with ("compress") entries.

    The latter alone are scaled, and their cosines are not, unless the file says so.
    """
    given = dict(config.get("rope_parameters") or {})
    scaling = dict(config.get("rope_scaling") or {})
    rotated = config.get("qk_rope_head_dim")
    part = config.get("partial_rotary_factor") or (rotated / head_dim if rotated else _ROTATED)
    own: dict[str, Any] = {"partial_rotary_factor": part}
    nested = all(isinstance(given.get(each), dict) for each in ("main", "compress"))
    if nested:
        own |= given[kind]
    elif kind == "compress":
        own = {**given, **own, "rope_theta": config.get("compress_rope_theta", 160000.0)}
    else:
        own["rope_theta"] = config.get("rope_theta", 10000.0)
    if kind == "compress":
        own |= scaling
        if (own.get("rope_type") or own.get("type")) == "yarn" and not nested:
            own.setdefault("attention_factor", 1.0)
    values = {name: value for name, value in config.values.items() if name != "rope_scaling"}
    own_config = replace(config, values={**values, "rope_parameters": {kind: own}})
    return rotary(own_config, head_dim, interleaved=True, layer_type=kind)
