"""Mixtures that balance experts by a bias that affects only their choice.

Their experts are like DeepSeek-V3's, on attention of Llama's shape.
"""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_kin import ernie_bias, exaone4
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.reading import read_sliding_windows, rotary, windows_by_kind
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, HeadSizes, RotarySpec

_FULL, _SLIDING = "full_attention", "sliding_attention"


def hy_v3(config: ModelConfig) -> DecoderSpec:
    """Hunyuan 3 (Tencent 2026)."""
    head_dim = int(config.get("head_dim", 128))
    width = int(config.get("moe_intermediate_size", 1536))
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary(config, head_dim, theta=11158840.0),
        names=names.HY_V3,
        query_key_norm="head",
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )
    experts = ExpertsSpec(
        count=int(config.get("num_experts", config.get("num_local_experts", 192))),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=width,
        normalise=True,
        shared_width=width * int(config.get("num_shared_experts", 1)),
        routing="grouped-sigmoid",
        scale=float(config.get("router_scaling_factor", 2.826)),
    )
    kinds = config.get("mlp_layer_types")
    sparse = [kind == "sparse" for kind in kinds] if kinds else [i > 0 for i in _places(spec)]
    return set_sparse(spec, experts, sparse)


def minimax_m2(config: ModelConfig) -> DecoderSpec:
    """MiniMax-M2 (2025): one norm over all heads; half of each head is rotated."""
    head_dim = int(config.get("head_dim", 128))
    part = config.get("rotary_dim")
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary(
            config, head_dim, theta=5000000.0, partial=part / head_dim if part else 1.0
        ),
        names=names.MINIMAX_M2,
        query_key_norm="whole",
    )
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", config.get("num_experts", 256))),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=int(config.need("intermediate_size")),
        normalise=True,
        routing="grouped-sigmoid",
    )
    return set_sparse(spec, experts, [True for _ in _places(spec)])


def dots1(config: ModelConfig) -> DecoderSpec:
    """dots.llm1 (rednote 2025)."""
    width = int(config.get("moe_intermediate_size", 1408))
    spec = llama_spec(
        config,
        windows=read_sliding_windows(config) if config.get("layer_types") else None,
        names=names.DOTS1,
        query_key_norm="head",
        **attention_bias(config),
    )
    experts = ExpertsSpec(
        count=int(config.get("n_routed_experts", config.get("num_local_experts", 0))),
        per_token=int(config.need("num_experts_per_tok")),
        width=width,
        normalise=bool(config.get("norm_topk_prob", False)),
        shared_width=width * int(config.get("n_shared_experts", 0)),
        routing="grouped-sigmoid",
        groups=int(config.get("n_group", 1)),
        groups_used=int(config.get("topk_group", 1)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    first = int(config.get("first_k_dense_replace", 0))
    return set_sparse(spec, experts, [i >= first for i in _places(spec)])


def solar_open(config: ModelConfig) -> DecoderSpec:
    """Solar Open (Upstage 2026): GLM-4.5's experts in every layer."""
    head_dim = int(config.get("head_dim", 128))
    width = int(config.get("moe_intermediate_size", 1280))
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary(config, head_dim, theta=1000000.0),
        names=names.SOLAR_OPEN,
        qkv_bias=bool(config.get("attention_bias", False)),
        mlp_width=width,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )
    experts = ExpertsSpec(
        count=int(config.get("n_routed_experts", config.get("num_local_experts", 128))),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=width,
        normalise=bool(config.get("norm_topk_prob", True)),
        shared_width=width * int(config.get("n_shared_experts", 1)),
        routing="grouped-sigmoid",
        groups=int(config.get("n_group", 1)),
        groups_used=int(config.get("topk_group", 1)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    return set_sparse(spec, experts, [True for _ in _places(spec)])


def exaone_moe(config: ModelConfig) -> DecoderSpec:
    """K-EXAONE (LG AI Research 2026): EXAONE 4's attention behind norms, DeepSeek-V3's experts."""
    width = int(config.get("moe_intermediate_size", 1024))
    spec = replace(exaone4(config), names=names.EXAONE_MOE)
    experts = ExpertsSpec(
        count=int(config.get("num_experts", 64)),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=width,
        normalise=bool(config.get("norm_topk_prob", True)),
        shared_width=width * int(config.get("num_shared_experts", 1)),
        routing="grouped-sigmoid",
        groups=int(config.get("n_group", 1)),
        groups_used=int(config.get("topk_group", 1)),
        scale=float(config.get("routed_scaling_factor", 2.5)),
    )
    kinds, first = config.get("mlp_layer_types"), int(config.get("first_k_dense_replace", 1))
    sparse = [kind == "sparse" for kind in kinds] if kinds else [i >= first for i in _places(spec)]
    return set_sparse(spec, experts, sparse)


def mimo_v2_flash(config: ModelConfig) -> DecoderSpec:
    """MiMo-V2-Flash (Xiaomi 2025): layers with a window have twice the KV heads, and sinks."""
    count = int(config.need("num_hidden_layers"))
    kinds, window = config.get("layer_types"), int(config.get("sliding_window", 129))
    if config.get("sliding_window_size"):  # as published, without the token itself
        window = int(config.need("sliding_window_size")) + 1
    kinds = kinds or [_FULL if i == 0 or (i + 1) % 6 == 0 else _SLIDING for i in range(count)]
    head_dim = int(config.get("head_dim", 192))
    rotary_spec = {kind: _read_rotary(config, head_dim, kind) for kind in (_FULL, _SLIDING)}
    spec = llama_spec(
        config,
        head_dim=head_dim,
        windows=windows_by_kind(kinds, window),
        rotary_spec=rotary_spec[_FULL],
        names=names.MIMO_V2_FLASH,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        qkv_bias=bool(config.get("attention_bias", False)),
        value_scale=float(config.values.get("attention_value_scale", 0.707) or 1.0),
    )
    value_dim, kv_heads = int(config.get("v_head_dim", 128)), spec.kv_heads
    whole, local = (HeadSizes(heads, head_dim, value_dim) for heads in (kv_heads, 2 * kv_heads))
    layers = tuple(
        replace(la, sizes=local, rotary=rotary_spec[_SLIDING])
        if la.window
        else replace(la, sizes=whole, sinks=False)
        for la in spec.layers
    )
    experts = ExpertsSpec(
        count=int(config.get("n_routed_experts", config.get("num_local_experts", 256))),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=int(config.get("moe_intermediate_size", 2048)),
        normalise=bool(config.get("norm_topk_prob", True)),
        routing="grouped-sigmoid",
        groups=int(config.get("n_group", 1)),
        groups_used=int(config.get("topk_group", 1)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    sparse = config.get("mlp_layer_types")
    own = [kind == "sparse" for kind in sparse] if sparse else [i > 0 for i in range(count)]
    return set_sparse(replace(spec, layers=layers), experts, own)


def _read_rotary(config: ModelConfig, head_dim: int, kind: str) -> RotarySpec:
    """Return the rotary embedding of a kind of layer; by default the published one."""
    if not config.get("rope_parameters"):
        theta = {_FULL: 5000000.0, _SLIDING: 10000.0}[kind]
        config = replace(config, values={**config.values, "rope_theta": theta})
    return rotary(config, head_dim, partial=0.334, layer_type=kind)


def ernie4_5_moe(config: ModelConfig) -> DecoderSpec | None:
    """ERNIE 4.5 (Baidu 2025): routing by softmax, with the bias added for the choice."""
    # Weights are divided by no less than this; all published files have 1e-12.
    if float(config.get("moe_norm_min", 0.0)) > 1e-9:
        return None
    width = int(config.get("moe_intermediate_size", 1536))
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary(config, head_dim, theta=500000.0, interleaved=True),
        names=names.ERNIE4_5_MOE,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        **ernie_bias(config),
    )
    experts = ExpertsSpec(
        count=int(config.get("moe_num_experts", config.get("num_experts", 64))),
        per_token=int(config.get("moe_k", config.get("num_experts_per_tok", 6))),
        width=width,
        normalise=True,
        shared_width=width * int(config.get("moe_num_shared_experts", 2)),
        routing="biased-softmax",
    )
    first, every = int(config.get("moe_layer_start_index", 1)), config.get("moe_layer_interval", 1)
    last = int(config.get("moe_layer_end_index", -1))
    last = len(spec.layers) - 1 if last == -1 else last
    return set_sparse(
        spec, experts, [first <= i <= last and (i + 1) % every == 0 for i in _places(spec)]
    )


def _places(spec: DecoderSpec) -> range:
    return range(len(spec.layers))


def set_sparse(spec: DecoderSpec, experts: ExpertsSpec, sparse: list[bool]) -> DecoderSpec:
    """Return `spec` with experts in the layers given by `sparse`."""
    pairs = zip(spec.layers, sparse, strict=True)
    return replace(
        spec, layers=tuple(replace(la, experts=experts) if own else la for la, own in pairs)
    )
