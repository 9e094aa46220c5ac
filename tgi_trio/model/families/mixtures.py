"""Families whose layers are mixtures of experts, on attention of Llama's shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.expert_layers import set_experts
from tgi_trio.model.families.llama_kin import hunyuan
from tgi_trio.model.families.llama_like import attention_bias, llama_spec, same_window
from tgi_trio.model.reading import (
    read_sliding_windows,
    rotary,
    with_sections,
    without_loose_rotary,
)
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, LayerSpec

# A key in the config that we make of a GGUF file: each expert has separate gate, up and down.
SEPARATE_EXPERTS: Final = "experts_apart"

# gpt-oss' default rotary embedding.
GPT_OSS_ROTARY: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _head_dim(config: ModelConfig) -> int:
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    return int(config.get("head_dim", hidden // heads))


def mixtral(config: ModelConfig) -> DecoderSpec:
    experts = ExpertsSpec(
        count=int(config.need("num_local_experts")),
        per_token=int(config.get("num_experts_per_tok", 2)),
        width=int(config.need("intermediate_size")),
        normalise=True,
    )
    spec = llama_spec(
        config,
        windows=same_window(config),
        rotary_spec=rotary(config, _head_dim(config), theta=1000000.0),
        names=names.MIXTRAL,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )
    return set_experts(spec, experts)


def phimoe(config: ModelConfig) -> DecoderSpec:
    """Phi-3.5-MoE: LayerNorms and biases around Mixtral's experts, chosen by SparseMixer."""
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", 16)),
        per_token=2,  # SparseMixer chooses two, whatever config.json says
        width=int(config.need("intermediate_size")),
        normalise=False,
        routing="sparse-mixer",
        jitter=float(config.get("router_jitter_noise", 0.01)),
    )
    spec = llama_spec(
        config,
        windows=same_window(config),
        rotary_spec=rotary(config, _head_dim(config), theta=1000000.0),
        names=names.MIXTRAL,
        norm="layer",
        norm_bias=True,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        head_bias=bool(config.get("lm_head_bias", False)),
        **attention_bias(config),
    )
    return set_experts(spec, experts)


def olmoe(config: ModelConfig) -> DecoderSpec | None:
    if config.get("clip_qkv"):  # clips after the norms, which no other family does
        return None
    experts = ExpertsSpec(
        count=int(config.get("num_experts", config.get("num_local_experts", 64))),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=int(config.need("intermediate_size")),
        normalise=bool(config.get("norm_topk_prob", False)),
    )
    spec = llama_spec(
        config,
        names=names.QWEN3_MOE,
        query_key_norm="whole",
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )
    return set_experts(spec, experts)


def flex_olmo(config: ModelConfig) -> DecoderSpec:
    """FlexOlmo (Ai2 2025): OLMo 2's attention and norms, OLMoE's experts."""
    spec = llama_spec(
        config,
        rotary_spec=rotary(config, _head_dim(config), theta=500000.0),
        names=names.FLEX_OLMO,
        query_key_norm="whole",
        **attention_bias(config),
    )
    experts = ExpertsSpec(
        count=int(config.get("num_experts", config.get("num_local_experts", 7))),
        per_token=int(config.get("num_experts_per_tok", 5)),
        width=int(config.need("intermediate_size")),
        normalise=bool(config.get("norm_topk_prob", False)),
    )
    return set_experts(spec, experts)


def deepseek(config: ModelConfig) -> DecoderSpec:
    """DeepSeekMoE 16B (DeepSeek 2024), the first of its mixtures: attention is Llama's.

    So is the text of DeepSeek-OCR 1 and 2 (2025 and 2026).
    """
    width = int(config.get("moe_intermediate_size", 1407))
    spec = llama_spec(config, names=names.DEEPSEEK_MOE, **attention_bias(config))
    count = int(config.get("n_routed_experts", 0))
    if not count:
        return spec
    scale = float(config.get("routed_scaling_factor", 1.0))
    experts = ExpertsSpec(
        count=count,
        per_token=int(config.need("num_experts_per_tok")),
        width=width,
        normalise=bool(config.get("norm_topk_prob", False)),
        shared_width=width * int(config.get("n_shared_experts", 0)),
        routing="softmax" if scale == 1.0 else "grouped-softmax",  # of one group
        scale=scale,
    )
    first, every = (
        int(config.get(*own)) for own in (("first_k_dense_replace", 0), ("moe_layer_freq", 1))
    )
    sparse = [i >= first and i % every == 0 for i in range(len(spec.layers))]
    if kinds := config.get("mlp_layer_types"):
        sparse = [kind == "sparse" for kind in kinds]
    return set_experts(spec, experts, sparse)


def dbrx(config: ModelConfig) -> DecoderSpec | None:
    """DBRX (Databricks 2024)."""
    separate = bool(config.get(SEPARATE_EXPERTS))
    attention, mixture = dict(config.get("attn_config", {})), dict(config.get("ffn_config", {}))
    power = mixture.get("moe_normalize_expert_weights", 1.0)
    if power not in (None, 1):  # the power of the norm by which weights are divided
        return None
    hidden, heads = int(config.need("d_model")), int(config.need("n_heads"))
    width = int(mixture.get("ffn_hidden_size", 3584))
    layer = LayerSpec(
        scale=(hidden // heads) ** -0.5,
        rotary=rotary(config, hidden // heads, theta=float(attention.get("rope_theta", 10000.0))),
        experts=ExpertsSpec(
            count=int(mixture.get("moe_num_experts", 4)),
            per_token=int(mixture.get("moe_top_k", 1)),
            width=width,
            normalise=power is not None,
            stacked=not separate,
        ),
    )
    return DecoderSpec(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        heads=heads,
        kv_heads=int(attention.get("kv_n_heads", 1)),
        head_dim=hidden // heads,
        mlp_width=width,
        layers=(layer,) * int(config.need("n_layers")),
        names=names.DBRX_SEPARATE if separate else names.DBRX,
        norm="layer",
        norm_eps=1e-5,
        qkv_layout="stacked",
        qkv_clip=float(attention.get("clip_qkv") or 0.0),
        activation=dict(mixture.get("ffn_act_fn") or {}).get("name", "silu"),
    )


def gpt_oss(config: ModelConfig) -> DecoderSpec | None:
    """gpt-oss (OpenAI 2025): sinks, windows in every other layer, biases, a clipped gate."""
    # the factor in the gate's sigmoid, see `quick_gelu`
    if config.get("swiglu_alpha", 1.702) != 1.702:
        return None
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = replace(config, values={**config.values, "rope_scaling": GPT_OSS_ROTARY})
    head_dim = int(config.get("head_dim", 64))
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", 128)),
        per_token=int(config.get("num_experts_per_tok", 4)),
        width=int(config.need("intermediate_size")),
        # softmax over the chosen experts, which is their normalised share of that over all
        normalise=True,
        biased=True,
        limit=float(config.get("swiglu_limit", 7.0)),
    )
    biased = bool(config.get("attention_bias", True))
    spec = llama_spec(
        config,
        head_dim=head_dim,
        windows=read_sliding_windows(config, every=2, window=128),
        rotary_spec=rotary(config, head_dim, theta=150000.0),
        names=names.GPT_OSS_APART if config.get(SEPARATE_EXPERTS) else names.GPT_OSS,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        qkv_bias=biased,
        output_bias=biased,
        activation="quick_gelu",
    )
    return set_experts(spec, experts)


def set_qwen_experts(
    config: ModelConfig, spec: DecoderSpec, shared_width: int, *, normalise: bool = False
) -> DecoderSpec:
    """Add experts, by Qwen 2's names for their numbers, to the layers that have them.

    `normalise`: the family's default of `norm_topk_prob`.
    """
    experts = ExpertsSpec(
        count=int(config.get("num_experts", config.get("num_local_experts", 0))),
        per_token=int(config.need("num_experts_per_tok")),
        width=int(config.need("moe_intermediate_size")),
        normalise=bool(config.get("norm_topk_prob", normalise)),
        shared_width=shared_width,
    )
    return _set_sparse(config, spec, experts)


def _set_sparse(config: ModelConfig, spec: DecoderSpec, experts: ExpertsSpec) -> DecoderSpec:
    """Add experts to the layers that have them."""
    dense = set(config.get("mlp_only_layers", []))
    every = int(config.get("decoder_sparse_step", 1))
    layers = (
        replace(la, experts=experts) if i not in dense and (i + 1) % every == 0 else la
        for i, la in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def qwen2_moe(config: ModelConfig) -> DecoderSpec | None:
    if config.get("use_sliding_window", False):
        return None
    spec = llama_spec(config, names=names.QWEN2_MOE, qkv_bias=bool(config.get("qkv_bias", True)))
    return set_qwen_experts(config, spec, int(config.get("shared_expert_intermediate_size", 5632)))


def qwen3_moe(config: ModelConfig) -> DecoderSpec | None:
    if config.get("use_sliding_window", False):
        return None
    spec = llama_spec(
        config, names=names.QWEN3_MOE, query_key_norm="head", **attention_bias(config)
    )
    return set_qwen_experts(config, spec, 0)


def mellum(config: ModelConfig) -> DecoderSpec:
    """Mellum 2 (JetBrains 2026): Qwen 3's mixture with windows, turned as each kind of layer is."""
    head_dim = int(config.get("head_dim", 128))
    spec = llama_spec(
        config,
        head_dim=head_dim,
        windows=read_sliding_windows(config, window=1024),
        names=names.QWEN3_MOE,
        query_key_norm="head",
        **attention_bias(config),
    )
    sets = without_loose_rotary(config)
    whole = rotary(sets, head_dim, theta=500000.0, layer_type="full_attention")
    local = rotary(sets, head_dim, theta=10000.0, layer_type="sliding_attention")
    experts = ExpertsSpec(
        count=int(config.get("num_local_experts", config.get("num_experts", 64))),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=int(config.get("moe_intermediate_size", 896)),
        normalise=bool(config.get("norm_topk_prob", True)),
    )
    kinds = config.get("mlp_layer_types") or ["sparse"] * len(spec.layers)
    layers = (
        replace(
            la,
            rotary=local if la.window else whole,
            experts=experts if kind == "sparse" else None,
        )
        for la, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def qwen3_vl_moe(config: ModelConfig) -> DecoderSpec:
    """The text of Qwen3-VL's mixtures: Qwen 3's, with all experts of a layer in one tensor."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    spec = llama_spec(
        config,
        rotary_spec=with_sections(
            rotary(config, head_dim, theta=500000.0), (24, 20, 20), alternate=True
        ),
        names=names.QWEN3_MOE if config.get(SEPARATE_EXPERTS) else names.QWEN3_VL_MOE,
        query_key_norm="head",
        **attention_bias(config),
    )
    experts = ExpertsSpec(
        count=int(config.get("num_experts", config.get("num_local_experts", 60))),
        per_token=int(config.get("num_experts_per_tok", 4)),
        width=int(config.get("moe_intermediate_size", 1408)),
        normalise=True,
        gate_up="halves",
    )
    return _set_sparse(config, spec, experts)


def qwen3_omni_moe(config: ModelConfig) -> DecoderSpec:
    """The text of Qwen3-Omni's thinker: Qwen 3's mixture, whose tokens have three positions."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    rotary_spec = rotary(config, head_dim, theta=1000000.0)
    spec = llama_spec(
        config,
        rotary_spec=with_sections(rotary_spec, (24, 20, 20), alternate=True),
        names=names.QWEN3_MOE,
        query_key_norm="head",
        **attention_bias(config),
    )
    experts = ExpertsSpec(
        count=int(config.get("num_experts", 128)),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=int(config.get("moe_intermediate_size", 768)),
        normalise=bool(config.get("norm_topk_prob", True)),
    )
    return _set_sparse(config, spec, experts)


def hunyuan_moe(config: ModelConfig) -> DecoderSpec | None:
    """Hunyuan's first mixtures; numbers of experts that differ by layer are not implemented."""
    count, each = config.get("num_experts", 1), config.get("moe_topk", 1)
    if not isinstance(count, int) or not isinstance(each, int):
        return None
    width = int(config.need("intermediate_size"))
    experts = ExpertsSpec(
        count=count,
        per_token=each,
        width=width,
        normalise=True,
        shared_width=width,
        routing="biased-softmax",
    )
    return set_experts(replace(hunyuan(config), names=names.HUNYUAN_MOE), experts)
