"""Families of Llama's shape: separate or stacked projections, gated MLP, rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.reading import read_sliding_windows, rotary, with_sections
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec, Names, RotarySpec

# A key in the config that we make of a GGUF file: queries, keys and values are separate matrices.
SEPARATE_PROJECTIONS = "projections_apart"
# Another one: norms of heads that have weights of their own are in one tensor.
NORMS_STACKED = "norms_stacked"
_BAICHUAN_2_VOCABULARY = 125696


def llama_spec(
    config: ModelConfig,
    *,
    head_dim: int | None = None,
    windows: list[int] | None = None,
    rotary_spec: RotarySpec | None = None,
    rotates: bool = True,
    scale: float | None = None,
    **changes: Any,
) -> DecoderSpec:
    """Return the spec of Llama; `changes`: fields that differ.

    `windows` per layer, `rotary_spec`: the rotary embedding, `scale` of scores, if not Llama's;
    without `rotates` there is no rotary embedding.
    """
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", head_dim or hidden // heads))
    count = int(config.need("num_hidden_layers"))
    rotary_spec = (rotary_spec or rotary(config, head_dim)) if rotates else None
    fields: dict[str, Any] = {
        "family": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": int(config.get("num_key_value_heads", heads)),
        "head_dim": head_dim,
        "mlp_width": int(config.need("intermediate_size")),
        "layers": tuple(
            LayerSpec(scale=scale or head_dim**-0.5, window=window, rotary=rotary_spec)
            for window in windows or [0] * count
        ),
        "names": names.LLAMA,
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "activation": config.get("hidden_act", "silu"),
        "tied_head": bool(config.get("tie_word_embeddings", False)),
    }
    return DecoderSpec(**(fields | changes))


def same_window(config: ModelConfig, default: int = 0) -> list[int]:
    """Return the same window for every layer: absent means the default, null means none."""
    window = int(config.values.get("sliding_window", default) or 0)
    return [window] * int(config.need("num_hidden_layers"))


def attention_bias(config: ModelConfig) -> dict[str, Any]:
    biased = bool(config.get("attention_bias", False))
    return {"qkv_bias": biased, "output_bias": biased}


def _set_rotary(
    spec: DecoderSpec, local: RotarySpec | None, whole: RotarySpec | None
) -> DecoderSpec:
    """Return `spec` with separate rotary embeddings for layers with and without a window."""
    layers = (replace(la, rotary=local if la.window else whole) for la in spec.layers)
    return replace(spec, layers=tuple(layers))


def llama(config: ModelConfig) -> DecoderSpec:
    return llama_spec(
        config, mlp_bias=bool(config.get("mlp_bias", False)), **attention_bias(config)
    )


def baichuan(config: ModelConfig) -> DecoderSpec:
    """Baichuan 1 and 2, which share a type: version 2 is recognised by its vocabulary.

    The 7B models rotate; the 13B ones have linear biases (ALiBi), and no max_position_embeddings.
    GGUF files have separate queries, keys and values, and state positions for both.
    """
    rotates = bool(config.max_positions) and not config.get("alibi")
    separate = bool(config.get(SEPARATE_PROJECTIONS))
    return llama_spec(
        config,
        rotates=rotates,
        alibi=not rotates,
        names=names.LLAMA if separate else names.BAICHUAN,
        qkv_layout="separate" if separate else "stacked",
        normalised_head=config.vocab_size == _BAICHUAN_2_VOCABULARY,
    )


def mistral(config: ModelConfig) -> DecoderSpec:
    return llama_spec(config, windows=same_window(config, 4096))


def qwen2(config: ModelConfig, rotary_spec: RotarySpec | None = None) -> DecoderSpec:
    return llama_spec(
        config, windows=read_sliding_windows(config), rotary_spec=rotary_spec, qkv_bias=True
    )


def qwen2_vl(config: ModelConfig) -> DecoderSpec:
    """The text of Qwen2-VL and Qwen2.5-VL: an image's tokens are rotated by their place in it."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    rotary_spec = rotary(config, hidden // heads, theta=1000000.0)
    return replace(
        qwen2(config, rotary_spec=with_sections(rotary_spec, (16, 24, 24), alternate=False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )


def qwen2_5_omni(config: ModelConfig) -> DecoderSpec:
    """The text of Qwen2.5-Omni's thinker: Qwen2.5-VL's."""
    return replace(qwen2_vl(config), norm_eps=float(config.get("rms_norm_eps", 1e-6)))


def qwen3(config: ModelConfig, rotary_spec: RotarySpec | None = None) -> DecoderSpec:
    return llama_spec(
        config,
        head_dim=128,
        windows=read_sliding_windows(config),
        rotary_spec=rotary_spec,
        names=names.QWEN3,
        query_key_norm="head",
        **attention_bias(config),
    )


def qwen3_vl(config: ModelConfig) -> DecoderSpec:
    """The text of Qwen3-VL: an image's tokens are rotated by their place in it."""
    rotary_spec = rotary(config, int(config.get("head_dim", 128)), theta=500000.0)
    return qwen3(config, with_sections(rotary_spec, (24, 20, 20), alternate=True))


def phi3(config: ModelConfig) -> DecoderSpec:
    return llama_spec(
        config,
        windows=same_window(config),
        names=names.PHI3,
        qkv_layout="stacked",
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )


def olmo(config: ModelConfig) -> DecoderSpec:
    return llama_spec(
        config,
        norm="layer",
        norm_eps=1e-5,
        norm_weight=False,
        qkv_clip=float(config.get("clip_qkv", 0.0)),
        **attention_bias(config),
    )


def olmo2(config: ModelConfig, windows: list[int] | None = None) -> DecoderSpec:
    return llama_spec(
        config,
        windows=windows,
        names=names.OLMO2,
        query_key_norm="whole",
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )


def olmo3(config: ModelConfig) -> DecoderSpec:
    """OLMo 2 with windows; rotary scaling applies to layers without a window."""
    spec = olmo2(config, read_sliding_windows(config, every=4))
    whole = rotary(config, spec.head_dim, theta=500000.0, layer_type="full_attention")
    if config.get("rope_parameters"):
        local = rotary(config, spec.head_dim, theta=500000.0, layer_type="sliding_attention")
    else:
        local = RotarySpec(dim=spec.head_dim, theta=whole.theta)
    return _set_rotary(spec, local, whole)


def granite(config: ModelConfig) -> DecoderSpec:
    return llama_spec(
        config,
        scale=float(config.get("attention_multiplier", 1.0)),
        embedding_scale=float(config.get("embedding_multiplier", 1.0)),
        residual_scale=float(config.get("residual_multiplier", 1.0)),
        logit_scale=1.0 / float(config.get("logits_scaling", 1.0)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        **attention_bias(config),
    )


def _cohere(config: ModelConfig, theta: float, windows: list[int] | None = None) -> DecoderSpec:
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    return llama_spec(
        config,
        windows=windows,
        rotary_spec=rotary(
            config, int(config.get("head_dim", hidden // heads)), theta=theta, interleaved=True
        ),
        names=names.SHARED_NORM,
        norm="layer",
        norm_eps=float(config.get("layer_norm_eps", 1e-5)),
        parallel=True,
        logit_scale=float(config.get("logit_scale", 0.0625)),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        **attention_bias(config),
    )


def cohere(config: ModelConfig) -> DecoderSpec:
    """Command R; R+ has norms of query and key heads, each with weights of its own."""
    spec = _cohere(config, 500000.0)
    if not config.get("use_qk_norm", False):
        return spec
    return replace(spec, names=names.COMMAND_R_PLUS, query_key_norm="each")


def cohere2(config: ModelConfig) -> DecoderSpec:
    """Only layers with a window have positions."""
    spec = _cohere(config, 10000.0, read_sliding_windows(config, every=4))
    return _set_rotary(spec, spec.layers[0].rotary, None)


def cohere_compass(config: ModelConfig) -> DecoderSpec:
    """North Micro (Cohere 2026): each kind of layers turns by its own base, or not at all.

    Pairs that turn are half a head apart, and an image's tokens have three positions.
    """
    kinds = config.get("layer_types", ["full_attention"] * int(config.need("num_hidden_layers")))
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    stated = config.get("rope_parameters", {})

    def rotary_spec(kind: str) -> RotarySpec | None:
        if kind in stated and stated[kind] is None:
            return None
        own = rotary(config, int(config.get("head_dim", hidden // heads)), layer_type=kind)
        return with_sections(own, (24, 20, 20), alternate=True)

    window = int(config.values.get("sliding_window", 4096) or 0)
    spec = _cohere(config, 10000.0, [window if kind.startswith("slid") else 0 for kind in kinds])
    turns = {kind: rotary_spec(kind) for kind in dict.fromkeys(kinds)}
    layers = (
        replace(layer, rotary=turns[kind]) for layer, kind in zip(spec.layers, kinds, strict=True)
    )
    return replace(spec, layers=tuple(layers), logit_scale=float(config.get("logit_scale", 1.0)))


def stablelm(config: ModelConfig) -> DecoderSpec:
    """StableLM; the 12B model has norms of query and key heads, each with weights of its own."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    parallel = bool(config.get("use_parallel_residual", False))
    each = "" if config.get(NORMS_STACKED) else ".norms.{}"
    return llama_spec(
        config,
        rotary_spec=rotary(config, hidden // heads, partial=0.25),
        names=replace(
            names.SHARED_NORM if parallel else names.LLAMA,
            query_norm="self_attn.q_layernorm" + each,
            key_norm="self_attn.k_layernorm" + each,
        ),
        query_key_norm="each" if config.get("qk_layernorm", False) else "none",
        norm="layer",
        norm_eps=float(config.get("layer_norm_eps", 1e-5)),
        norm_bias=True,
        parallel=parallel,
        qkv_bias=bool(config.get("use_qkv_bias", False)),
    )


def starcoder2(config: ModelConfig) -> DecoderSpec:
    biased = bool(config.get("use_bias", True))
    return llama_spec(
        config,
        windows=same_window(config),
        names=names.STARCODER2,
        norm="layer",
        norm_eps=float(config.get("norm_epsilon", 1e-5)),
        norm_bias=True,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        gated=False,
        activation=config.get("hidden_act", "gelu_pytorch_tanh"),
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def _gemma(config: ModelConfig, **changes: Any) -> DecoderSpec | None:
    """Norm weights are stored less 1, embeddings scaled by the root of their width; tied head."""
    # PaliGemma sets it for its text, which attends both ways only in prompts with an image.
    if config.get("use_bidirectional_attention", False) and config.model_type != "paligemma":
        return None
    fields: dict[str, Any] = {
        "head_dim": 256,
        "norm": "rms_plus_one",
        "activation": config.get(
            "hidden_activation", config.get("hidden_act", "gelu_pytorch_tanh")
        ),
        "embedding_scale": float(config.need("hidden_size")) ** 0.5,
        "tied_head": bool(config.get("tie_word_embeddings", True)),
        **attention_bias(config),
    }
    return llama_spec(config, **(fields | changes))


def gemma(config: ModelConfig) -> DecoderSpec | None:
    # Gemma 1 has "gelu" in older files but means the tanh form, which transformers uses, too.
    activation = config.get("hidden_act", "gelu")
    return _gemma(config, activation="gelu_pytorch_tanh" if activation == "gelu" else activation)


def gemma2(config: ModelConfig) -> DecoderSpec | None:
    return _gemma2(config, names.GEMMA2)


def vaultgemma(config: ModelConfig) -> DecoderSpec | None:
    """VaultGemma (Google 2025): Gemma 2 without norms behind attention and MLP."""
    return _gemma2(config, names.VAULT_GEMMA)


def _gemma2(config: ModelConfig, own: Names) -> DecoderSpec | None:
    return _gemma(
        config,
        windows=read_sliding_windows(config, every=2),
        scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        names=own,
        attention_soft_cap=float(config.values.get("attn_logit_softcapping", 50.0) or 0.0),
        final_soft_cap=float(config.values.get("final_logit_softcapping", 30.0) or 0.0),
    )


def gemma3(config: ModelConfig) -> DecoderSpec | None:
    """Layers with a window have their own rotary frequencies."""
    pattern = int(config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6)))
    spec = _gemma(
        config,
        windows=read_sliding_windows(config, every=pattern),
        scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        names=names.GEMMA3,
        query_key_norm="head",
        final_soft_cap=float(config.get("final_logit_softcapping", 0.0)),
    )
    if spec is None:
        return None
    whole = rotary(config, spec.head_dim, theta=1000000.0, layer_type="full_attention")
    if config.get("rope_parameters"):
        local = rotary(config, spec.head_dim, layer_type="sliding_attention")
    else:  # in older files rope_scaling applies to layers without a window
        theta = float(config.get("rope_local_base_freq", 10000.0))
        local = RotarySpec(dim=spec.head_dim, theta=theta)
    return _set_rotary(spec, local, whole)
