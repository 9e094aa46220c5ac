"""Families in which most layers are state spaces: kinds of Mamba, with or without attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil, inf
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.expert_layers import set_experts
from tgi_trio.model.families.linear_attention import set_mixers
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, LayerSpec
from tgi_trio.model.specs.mixers import Mamba1, Mamba2, Mixer

# Names of kinds of layers in configs -> kinds; letters are from Nemotron's pattern.
_KINDS: Final[Mapping[str, str]] = {
    "attention": "full_attention",
    "full_attention": "full_attention",
    "*": "full_attention",
    "mamba": "linear_attention",
    "mamba2": "linear_attention",
    "linear_attention": "linear_attention",
    "M": "linear_attention",
    "moe": "moe",
    "E": "moe",
    "mlp": "mlp",
    "-": "mlp",
}


def granite_hybrid(config: ModelConfig) -> DecoderSpec:
    """Granite 4 H: Mamba-2 in most layers; an MLP beside the experts, or instead of them."""
    width = int(config.get("shared_intermediate_size", 1024))
    spec = llama_spec(
        config,
        names=names.GRANITE_MOE_HYBRID_APART
        if config.get(SEPARATE_EXPERTS)
        else names.GRANITE_MOE_HYBRID,
        rotates=config.get("position_embedding_type") == "rope",
        mlp_width=width,
        scale=float(config.get("attention_multiplier", 1.0)),
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / float(config.get("logits_scaling", 1.0)),
        **attention_bias(config),
    )
    if count := int(config.get("num_local_experts", 8)):
        experts = ExpertsSpec(
            count=count,
            per_token=int(config.get("num_experts_per_tok", 2)),
            width=int(config.need("intermediate_size")),
            # softmax over the chosen experts, which is their normalised share of that over all
            normalise=True,
            shared_width=width,
            gate_up="rows",
        )
        spec = replace(spec, layers=tuple(replace(la, experts=experts) for la in spec.layers))
    default = ["mamba"] * len(spec.layers)
    return set_mixers(spec, _mamba2(config, spec), _kinds(config, default))


def bamba(config: ModelConfig) -> DecoderSpec:
    """Bamba: Mamba-2, and attention in the layers that `attn_layer_indices` lists."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    spec = llama_spec(
        config,
        rotary_spec=rotary(config, int(config.get("head_dim", hidden // heads)), partial=0.5),
        names=names.BAMBA,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        **attention_bias(config),
    )
    attending = set(config.get("attn_layer_indices", ()))
    default = ["attention" if i in attending else "mamba" for i in range(len(spec.layers))]
    return set_mixers(spec, _mamba2(config, spec), _kinds(config, default))


def falcon_h1(config: ModelConfig) -> DecoderSpec | None:
    """Falcon H1: attention and Mamba-2 in parallel in every layer; nearly everything is scaled."""

    def scale(name: str) -> float:
        return float(config.get(f"{name}_multiplier", 1.0))

    biases = attention_bias(config)
    inner, entry = scale("attention_in"), scale("ssm_in")
    if (biases["qkv_bias"] and inner != 1.0) or (config.get("mamba_proj_bias") and entry != 1.0):
        return None  # the scaled input is read by linear layers with a bias
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    gate, down = config.get("mlp_multipliers", (1.0, 1.0))
    head_dim = int(config.get("head_dim", hidden // heads))
    spec = llama_spec(
        config,
        names=names.FALCON_H1,
        # Scales of queries and keys are folded into the scores' scale, that of values into the
        # output's.
        scale=head_dim**-0.5 * inner * inner * scale("key"),
        attention_scale=inner * scale("attention_out"),
        attention_input_scale=inner,
        gate_scale=float(gate),
        mlp_scale=float(down),
        embedding_scale=scale("embedding"),
        logit_scale=scale("lm_head"),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        **biases,
    )
    normed = "before gate" if config.get("mamba_norm_before_gate", True) else "behind gate"
    width = int(config.get("mamba_d_ssm", int(config.get("mamba_expand", 2)) * hidden))
    mixer = _mamba2(
        config,
        spec,
        head_dim=width // int(config.get("mamba_n_heads", 128)),
        norm=normed if config.get("mamba_rms_norm", False) else "none",
        output_bias=bool(config.get("projectors_bias", False)),
        multipliers=tuple(entry * float(own) for own in config.get("ssm_multipliers", (1.0,) * 5)),
        output_multiplier=scale("ssm_out"),
    )
    return replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer in spec.layers))


def nemotron_h(config: ModelConfig) -> DecoderSpec | None:
    """Nemotron H and 3: every layer is one part after one norm; no positions."""
    latent = int(config.get("moe_latent_size", 0))
    if latent and config.get("mlp_bias", False):  # the matrix after the experts has a bias
        return None
    if config.get("sliding_window") is not None or config.get("n_shared_experts", 1) != 1:
        return None
    pattern = config.get("hybrid_override_pattern", ())
    kinds = _kinds(config, list(pattern or ("mamba", "moe", "attention", "mlp")))
    config = replace(config, values={**config.values, "num_hidden_layers": len(kinds)})
    spec = llama_spec(
        config,
        head_dim=128,
        rotates=False,
        names=names.NEMOTRON_H,
        norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        mlp_width=int(config.get("intermediate_size", 21504)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        gated=False,
        activation=config.get("mlp_hidden_act", "relu2"),
    )
    experts = ExpertsSpec(
        count=int(config.get("n_routed_experts", 8)),
        per_token=int(config.get("num_experts_per_tok", 2)),
        width=int(config.get("moe_intermediate_size", 7688)),
        normalise=bool(config.get("norm_topk_prob", True)),
        shared_width=int(config.get("moe_shared_expert_intermediate_size", 7688)),
        latent_width=latent,
        routing="grouped-sigmoid",
        groups=int(config.get("n_group", 1)),
        groups_used=int(config.get("topk_group", 1)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    biased = bool(config.get("use_bias", False))
    mixer = Mamba2(
        heads=int(config.get("mamba_num_heads", 128)),
        head_dim=int(config.get("mamba_head_dim", 64)),
        groups=int(_stated(config, ("n_groups", "mamba_n_groups"), 8)),
        state_dim=int(config.get("ssm_state_size", 128)),
        taps=int(_stated(config, ("conv_kernel", "mamba_d_conv"), 4)),
        norm_eps=spec.norm_eps,
        convolution_bias=bool(_stated(config, ("use_conv_bias", "mamba_conv_bias"), True)),
        inner_bias=biased,
        output_bias=biased,
        least_step=float(_stated(config, ("time_step_min", "mamba_dt_min"), 0.001)),
        activation=config.get("mamba_hidden_act", "silu"),
    )
    parts: dict[str, dict[str, Any]] = {
        "full_attention": {"feeds": False},
        "linear_attention": {"feeds": False, "attends": False, "mixer": mixer},
        "moe": {"attends": False, "experts": experts},
        "mlp": {"attends": False},
    }
    layers = (replace(layer, **parts[kind]) for layer, kind in zip(spec.layers, kinds, strict=True))
    return replace(spec, layers=tuple(layers))


def jamba(config: ModelConfig) -> DecoderSpec:
    """Jamba: Mamba in most layers, experts in every other one; no positions."""
    spec = llama_spec(config, rotates=False, names=names.JAMBA)
    mixer = Mamba1(
        channels=int(config.get("mamba_expand", 2)) * spec.hidden_size,
        state_dim=int(config.get("mamba_d_state", 16)),
        step_rank=_step_rank(config, "mamba_dt_rank", spec.hidden_size),
        taps=int(config.get("mamba_d_conv", 4)),
        norm="weighted",
        norm_eps=spec.norm_eps,
        convolution_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias", False)),
        activation=spec.activation,
    )
    every, first = int(config.get("attn_layer_period", 8)), int(config.get("attn_layer_offset", 4))
    indices = range(len(spec.layers))
    kinds = ["full_attention" if i % every == first else "linear_attention" for i in indices]
    spec = set_mixers(spec, mixer, kinds)
    experts = ExpertsSpec(
        count=int(config.get("num_experts", config.get("num_local_experts", 16))),
        per_token=int(config.get("num_experts_per_tok", 2)),
        width=spec.mlp_width,
        normalise=False,
    )
    every = int(config.get("expert_layer_period", 2))
    first = int(config.get("expert_layer_offset", 1))
    sparse = (experts.count > 1 and i % every == first for i in range(len(spec.layers)))
    return set_experts(spec, experts, sparse)


def mamba(config: ModelConfig) -> DecoderSpec:
    """Mamba, the first version."""
    return _alone(config, _mamba1_alone(config))


def falcon_mamba(config: ModelConfig) -> DecoderSpec:
    """Falcon Mamba: time steps, b and c are normalised."""
    eps = float(config.get("mixer_rms_eps", 1e-6))
    return _alone(config, replace(_mamba1_alone(config), norm="plain", norm_eps=eps))


def mamba2(config: ModelConfig) -> DecoderSpec:
    """Mamba 2."""
    least, most = config.get("time_step_limit") or (0.0, inf)
    biased = bool(config.get("use_bias", False))
    mixer = Mamba2(
        heads=int(config.get("num_heads", 128)),
        head_dim=int(config.get("head_dim", 64)),
        groups=int(config.get("n_groups", 8)),
        state_dim=int(config.get("state_size", 128)),
        taps=int(config.get("conv_kernel", 4)),
        norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        convolution_bias=bool(config.get("use_conv_bias", True)),
        inner_bias=biased,
        output_bias=biased,
        least_step=_number(least),
        most_step=_number(most),
        activation=config.get("hidden_act", "silu"),
    )
    return _alone(config, mixer, tied=False)


def _mamba1_alone(config: ModelConfig) -> Mamba1:
    hidden = int(config.need("hidden_size"))
    return Mamba1(
        channels=int(config.get("intermediate_size", int(config.get("expand", 2)) * hidden)),
        state_dim=int(config.get("state_size", 16)),
        step_rank=_step_rank(config, "time_step_rank", hidden),
        taps=int(config.get("conv_kernel", 4)),
        convolution_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", False)),
        activation=config.get("hidden_act", "silu"),
    )


def _alone(config: ModelConfig, mixer: Mixer, *, tied: bool = True) -> DecoderSpec:
    """Return a model of mixers only; `tied`: the family's default."""
    layer = LayerSpec(scale=1.0, mixer=mixer, attends=False, feeds=False)
    return DecoderSpec(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=int(config.need("hidden_size")),
        heads=0,
        kv_heads=0,
        head_dim=0,
        mlp_width=0,
        layers=(layer,) * int(config.need("num_hidden_layers")),
        names=names.MAMBA,
        norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        tied_head=bool(config.get("tie_word_embeddings", tied)),
    )


def _step_rank(config: ModelConfig, name: str, hidden: int) -> int:
    """Return the rank of the time steps' projection; "auto" is Mamba's own choice."""
    rank = config.get(name, "auto")
    return ceil(hidden / 16) if rank == "auto" else int(rank)


def _mamba2(config: ModelConfig, spec: DecoderSpec, **changes: Any) -> Mamba2:
    """Return the mixer, by the names that Bamba gave its numbers."""
    width = int(config.get("mamba_expand", 2)) * spec.hidden_size
    heads, head_dim = int(config.get("mamba_n_heads", 128)), config.get("mamba_d_head", "auto")
    least, most = config.get("time_step_limit") or (0.0, inf)
    biased = bool(config.get("mamba_proj_bias", False))
    fields: dict[str, Any] = {
        "heads": heads,
        "head_dim": width // heads if head_dim == "auto" else int(head_dim),
        "groups": int(config.get("mamba_n_groups", 1)),
        "state_dim": int(config.get("mamba_d_state", 256)),
        "taps": int(config.get("mamba_d_conv", 4)),
        "norm_eps": spec.norm_eps,
        "convolution_bias": bool(config.get("mamba_conv_bias", True)),
        "inner_bias": biased,
        "output_bias": biased,
        "least_step": _number(least),
        "most_step": _number(most),
        "activation": spec.activation,
    }
    return Mamba2(**(fields | changes))


def _kinds(config: ModelConfig, default: list[str]) -> list[str]:
    """Return the kind of each layer; raises ValueError for an unknown name."""
    stated = config.get("layer_types") or config.get("layers_block_type") or default
    if unknown := [word for word in stated if word not in _KINDS]:
        raise ValueError(f"{unknown[0]!r} is no kind of layer; known are {', '.join(_KINDS)}")
    return [_KINDS[word] for word in stated]


def _number(value: Any) -> float:
    """Return a number; transformers writes {"__float__": "Infinity"}, which JSON lacks."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)


def _stated(config: ModelConfig, several: tuple[str, ...], default: Any) -> Any:
    """Return the value of the first of several keys that is stated."""
    return next((value for name in several if (value := config.get(name)) is not None), default)
