"""Dense families that differ from Llama in a detail or two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import attention_bias, llama_spec, same_window
from tgi_trio.model.hunyuan_vl import read_sections
from tgi_trio.model.reading import read_sliding_windows, rotary, with_rotary, with_sections
from tgi_trio.model.specs.decoder import DecoderSpec, RotarySpec

# Apertus' default rotary embedding.
_APERTUS_ROTARY: Final = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

# CWM's.
_CWM_ROTARY: Final = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def smollm3(config: ModelConfig) -> DecoderSpec:
    """Every fourth layer has no positions."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    windows = read_sliding_windows(config) if config.get("use_sliding_window", False) else None
    spec = llama_spec(
        config,
        windows=windows,
        rotary_spec=rotary(config, head_dim, theta=2000000.0),
        mlp_bias=bool(config.get("mlp_bias", False)),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        **attention_bias(config),
    )
    every = int(config.get("no_rope_layer_interval", 4))
    turns = config.get("no_rope_layers") or [(i + 1) % every for i in range(len(spec.layers))]
    layers = (
        layer if turn else replace(layer, rotary=None)
        for layer, turn in zip(spec.layers, turns, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def seed_oss(config: ModelConfig) -> DecoderSpec:
    return llama_spec(
        config,
        head_dim=128,
        qkv_bias=bool(config.get("attention_bias", True)),
        output_bias=bool(config.get("attention_out_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def ernie4_5(config: ModelConfig, rotary_spec: RotarySpec | None = None) -> DecoderSpec:
    """Rotated pairs are neighbours."""
    head_dim = int(config.get("head_dim", 128))
    return llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary_spec or rotary(config, head_dim, theta=500000.0, interleaved=True),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        **ernie_bias(config),
    )


def paddleocr_vl(config: ModelConfig) -> DecoderSpec:
    """The text of PaddleOCR-VL: Ernie 4.5's, whose rotated pairs are half a head apart; an image's
    tokens are rotated by their place in it.
    """
    rotary_spec = rotary(config, int(config.get("head_dim", 128)), theta=500000.0)
    return ernie4_5(config, with_sections(rotary_spec, (16, 24, 24), alternate=False))


def ernie_bias(config: ModelConfig) -> dict[str, Any]:
    biased = bool(config.get("use_bias", False))
    return {"qkv_bias": biased, "output_bias": biased, "mlp_bias": biased}


def exaone4(config: ModelConfig) -> DecoderSpec:
    """Norms after the parts, per head, and no positions in layers without a window."""
    windowed = bool(config.values.get("sliding_window", 4096))
    pattern = config.get("sliding_window_pattern", 4)
    every = len(pattern) if isinstance(pattern, str) else int(pattern)  # "LLLG" on the hub
    spec = llama_spec(
        config,
        windows=read_sliding_windows(config, every=every) if windowed else None,
        names=names.EXAONE4,
        query_key_norm="head",
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )
    if not windowed:
        return spec
    layers = (layer if layer.window else replace(layer, rotary=None) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def cwm(config: ModelConfig) -> DecoderSpec:
    """Code World Model (Meta 2025): the first of every four layers has no window."""
    head_dim = int(config.get("head_dim", 128))
    config = with_rotary(config, _CWM_ROTARY)
    return llama_spec(
        config,
        head_dim=head_dim,
        windows=read_sliding_windows(config, every=4, window=8192, first=True),
        rotary_spec=rotary(config, head_dim, theta=1000000.0),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )


def iquestcoder(config: ModelConfig) -> DecoderSpec | None:
    if config.get("clip_qkv") is not None or config.get("use_sliding_window", False):
        return None  # which transformers refuses
    return llama_spec(
        config,
        head_dim=128,
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )


def ministral(config: ModelConfig) -> DecoderSpec:
    """Mistral, with windows in those layers that `layer_types` names, or in all."""
    kinds = config.get("layer_types")
    return llama_spec(
        config, windows=read_sliding_windows(config) if kinds else same_window(config, 4096)
    )


def helium(config: ModelConfig) -> DecoderSpec:
    """Helium (Kyutai 2025): rotated pairs are neighbours."""
    head_dim = int(config.get("head_dim", 128))
    return llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary(config, head_dim, theta=100000.0, interleaved=True),
        qkv_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-8)),
    )


def arcee(config: ModelConfig) -> DecoderSpec:
    """An MLP without a gate, with squared ReLU."""
    return llama_spec(
        config,
        names=names.ARCEE,
        gated=False,
        activation=config.get("hidden_act", "relu2"),
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )


def internlm3(config: ModelConfig) -> DecoderSpec:
    """Llama; `bias` is that of its MLP, `qkv_bias` that of all of attention."""
    biased = bool(config.get("bias", config.get("mlp_bias", False)))
    own = bool(config.get("qkv_bias", config.get("attention_bias", False)))
    return llama_spec(
        config,
        head_dim=128,
        qkv_bias=own,
        output_bias=own,
        mlp_bias=biased,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )


def ministral3(config: ModelConfig) -> DecoderSpec:
    """Queries are scaled by their position, which `rotary` reads if the config has it."""
    head_dim = int(config.get("head_dim", 128))
    return llama_spec(
        with_yarn(config, factor=16.0, original=16384, theta=1000000.0),
        head_dim=head_dim,
        windows=same_window(config),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
    )


def with_yarn(config: ModelConfig, *, factor: float, original: int, theta: float) -> ModelConfig:
    """Return the config with Mistral's default rotary embedding, if it has none."""
    rotary_spec = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    return with_rotary(config, rotary_spec)


def hunyuan(config: ModelConfig) -> DecoderSpec:
    """Hunyuan's first version (Tencent 2024): heads are rotated, then normalised."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    return llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=_stretch(config, head_dim),
        names=names.HUNYUAN,
        query_key_norm="head",
        norm_after_rotary=True,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )


def hunyuan_vl(config: ModelConfig) -> DecoderSpec:
    """The text of Hunyuan VL (Tencent 2025): an image's tokens turn by place, column, row, image.

    As Tencent's own code has it, both numbers of a pair turn by the same of these. In transformers
    5.24 they do not: its sections are of single numbers there, across the halves of a head.
    """
    spec, sections = hunyuan(config), read_sections(config)
    turning = [replace(each.rotary, sections=sections) for each in spec.layers if each.rotary]
    if sections and sum(sections) != spec.head_dim // 2:
        raise ModelLoadError(
            f"mrope_section must be numbers that add up to {spec.head_dim // 2}, the pairs of "
            f"dimensions that turn, not {list(sections)}."
        )
    layers = zip(spec.layers, turning, strict=True)
    return replace(spec, layers=tuple(replace(layer, rotary=own) for layer, own in layers))


def _stretch(config: ModelConfig, head_dim: int) -> RotarySpec:
    """Return the rotary embedding; with an `alpha`, "dynamic" means a larger base throughout.

    As everywhere, `rope_scaling` takes the place of the scaling in `rope_parameters`.
    """
    newer, older = dict(config.get("rope_parameters", {})), dict(config.get("rope_scaling", {}))
    alpha = (older or newer).get("alpha")
    if not alpha:
        return rotary(config, head_dim)
    values = {**config.values, "rope_scaling": None, "rope_parameters": None}
    plain = rotary(replace(config, values=values), head_dim)
    base = float((newer | older).get("rope_theta") or plain.theta)
    return replace(plain, theta=base * alpha ** (head_dim / (head_dim - 2)))


def nemotron(config: ModelConfig) -> DecoderSpec:
    """Nemotron-4 (NVIDIA 2024): LayerNorm weights are stored less 1; squared ReLU, no gate."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    return llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary(config, head_dim, partial=0.5),
        names=names.ARCEE,
        norm="layer_plus_one",
        norm_bias=True,
        norm_eps=float(config.get("norm_eps", 1e-5)),
        gated=False,
        activation=config.get("hidden_act", "relu2"),
        mlp_bias=bool(config.get("mlp_bias", False)),
        **attention_bias(config),
    )


def jais2(config: ModelConfig) -> DecoderSpec:
    """Jais 2 (Inception 2025): LayerNorm, squared ReLU without a gate, biases everywhere."""
    biased = bool(config.get("attention_bias", True))
    return llama_spec(
        config,
        names=names.ARCEE,
        norm="layer",
        norm_bias=True,
        norm_eps=float(config.get("layer_norm_eps", 1e-5)),
        gated=False,
        activation=config.get("hidden_act", "relu2"),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=bool(config.get("mlp_bias", True)),
    )


def nanochat(config: ModelConfig) -> DecoderSpec:
    """nanochat (Karpathy 2025): no norm has weights, and pairs are rotated the other way."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    return llama_spec(
        config,
        rotary_spec=replace(rotary(config, head_dim), backwards=True),
        names=names.NANOCHAT,
        norm_weight=False,
        query_key_norm="bare",
        norm_after_rotary=True,
        gated=False,
        activation=config.get("hidden_act", "relu2"),
        final_soft_cap=float(config.values.get("final_logit_softcapping", 15.0) or 0.0),
        **attention_bias(config),
    )


def exaone(config: ModelConfig) -> DecoderSpec:
    """EXAONE 3, 3.5 and Deep (LG AI Research 2024 and 2025): Llama under GPT-2's names."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    return llama_spec(
        config,
        head_dim=head_dim,
        kv_heads=int(config.get("num_key_value_heads", 8)),
        rotary_spec=rotary(config, head_dim, theta=500000.0),
        names=names.EXAONE,
        mlp_bias=bool(config.get("mlp_bias", False)),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )


def apertus(config: ModelConfig) -> DecoderSpec:
    """Apertus (Swiss AI 2025): xIELU, with learned parameters in every layer."""
    config = with_rotary(config, _APERTUS_ROTARY)
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    return llama_spec(
        config,
        rotary_spec=rotary(config, head_dim, theta=12000000.0),
        names=names.APERTUS,
        query_key_norm="head",
        gated=False,
        activation=config.get("hidden_act", "xielu"),
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        **attention_bias(config),
    )
