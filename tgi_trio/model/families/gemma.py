"""Gemma's newer families: layers differ in their heads, and some reuse others' K and V.

Sources: transformers' configuration classes; Gemma 3n (Google 2025), Gemma 4 (Google 2026).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.reading import read_sliding_windows, rotary, without_loose_rotary
from tgi_trio.model.specs.decoder import (
    DecoderSpec,
    ExpertsSpec,
    HeadSizes,
    LayerSpec,
    Names,
    PerLayerInputsSpec,
    RotarySpec,
    StreamsSpec,
)

_FULL, _SLIDING = "full_attention", "sliding_attention"
_TURNING: Final[dict[str, Any]] = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}


def gemma4(config: ModelConfig) -> DecoderSpec | None:
    """Gemma 4: layers without a window have wider heads, and their values may be their keys.

    None for models with bidirectional attention between all tokens.
    """
    return _gemma4(config, window=512, own_width=256)


def gemma4_unified(config: ModelConfig) -> DecoderSpec | None:
    """The text of Gemma 4 12B, which has no per-layer embeddings.

    An image's tokens see each other in all layers, as Gemma 3's do.
    """
    spec = _gemma4(config, window=1024, own_width=0)
    if spec is None:
        return None
    return replace(spec, layers=tuple(replace(layer, ahead=True) for layer in spec.layers))


def gemma3n(config: ModelConfig) -> DecoderSpec:
    """Gemma 3n (Google 2025): several hidden states, of which layers compute one (AltUp)."""
    given, count = config.need("intermediate_size"), int(config.need("num_hidden_layers"))
    widths = [int(width) for width in given] if isinstance(given, list) else [int(given)] * count
    cut = config.get("activation_sparsity_pattern")
    sparsity = (
        [0.95 if count > 10 and i < 10 else 0.0 for i in range(count)] if cut is None else cut
    )
    windows = read_sliding_windows(config, every=5, window=512)
    spec = llama_spec(
        replace(config, values={**config.values, "intermediate_size": widths[0]}),
        head_dim=256,
        windows=windows,
        scale=1.0,
        names=names.GEMMA3N,
        query_key_norm="head",
        value_norm=True,
        activation=config.get("hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=float(config.need("hidden_size")) ** 0.5,
        final_soft_cap=float(config.values.get("final_logit_softcapping", 30.0) or 0.0),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        # Tokens of images have the first row, as all have that are beyond the table.
        per_layer_inputs=_read_per_layer_inputs(
            config, int(config.get("hidden_size_per_layer_input", 256)), 0
        ),
        streams=StreamsSpec(
            count=int(config.get("altup_num_inputs", 4)),
            active=int(config.get("altup_active_idx", 0)),
            scaled=bool(config.get("altup_correct_scale", True)),
            detour_rank=int(config.get("laurel_rank", 64)),
        ),
        **attention_bias(config),
    )
    rotary_spec = {window: _read_rotary(config, spec.head_dim, window) for window in set(windows)}
    shared = _sources(config, windows, 15)
    layers = (
        replace(
            layer,
            rotary=rotary_spec[layer.window],
            reads_layer=shared[i],
            mlp_width=0 if widths[i] == widths[0] else widths[i],
            sparsity=float(sparsity[i]),
        )
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _read_rotary(config: ModelConfig, dim: int, window: int) -> RotarySpec:
    """Return the rotary embedding of layers with a window, or without: as in Gemma 3."""
    if not window:
        return rotary(config, dim, theta=1000000.0, layer_type=_FULL)
    if config.get("rope_parameters"):
        return rotary(config, dim, layer_type=_SLIDING)
    return RotarySpec(dim=dim, theta=float(config.get("rope_local_base_freq", 10000.0)))


def _gemma4(config: ModelConfig, *, window: int, own_width: int) -> DecoderSpec | None:
    if config.get("use_bidirectional_attention") == "all":
        return None
    windows = read_sliding_windows(config, every=6, window=window)
    windows[-1] = 0  # whatever config.json says
    own = own_width and int(config.get("hidden_size_per_layer_input", own_width))
    sparse = bool(config.get("enable_moe_block", False))
    spec = llama_spec(
        config,
        head_dim=256,
        windows=windows,
        scale=1.0,
        names=_choose_names(config, own=bool(own), sparse=sparse),
        query_key_norm="head",
        value_norm=True,
        activation=config.get("hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=float(config.need("hidden_size")) ** 0.5,
        final_soft_cap=float(config.get("final_logit_softcapping", 0.0)),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        per_layer_inputs=_read_per_layer_inputs(config, own, int(config.get("pad_token_id", 0)))
        if own
        else None,
        **attention_bias(config),
    )
    shared = _sources(config, windows, 0)
    double = bool(config.get("use_double_wide_mlp", False))
    experts = _experts(config) if sparse else None
    layers = (
        _turn_layer(
            config,
            spec,
            replace(
                layer,
                ahead=layer.window > 0,
                sizes=_sizes(config, spec, i, layer),
                keys_as_values=not layer.window and bool(config.get("attention_k_eq_v", False)),
                reads_layer=shared[i],
                mlp_width=2 * spec.mlp_width if double and shared[i] is not None else 0,
                experts=experts,
                beside=experts is not None,
            ),
        )
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def _choose_names(config: ModelConfig, *, own: bool, sparse: bool) -> Names:
    mixture = names.GEMMA4_MOE_APART if config.get(SEPARATE_EXPERTS) else names.GEMMA4_MOE
    chosen = mixture if sparse else names.GEMMA4
    return replace(chosen, **names.OWN_INPUTS) if own else chosen


def _turn_layer(config: ModelConfig, spec: DecoderSpec, layer: LayerSpec) -> LayerSpec:
    """Return a layer with the rotary embedding of its kind and its heads."""
    dim, kind = spec.sizes(layer).dim, _SLIDING if layer.window else _FULL
    sets = config.get("rope_parameters") or _TURNING
    if _SLIDING in sets:
        sets = {**sets, _FULL: sets.get(_FULL) or _TURNING[_FULL]}
    config = without_loose_rotary(config)
    config = replace(config, values={**config.values, "rope_parameters": sets})
    return replace(layer, rotary=rotary(config, dim, layer_type=kind))


def _sizes(
    config: ModelConfig, spec: DecoderSpec, index: int, layer: LayerSpec
) -> HeadSizes | None:
    """Return the sizes of a layer's heads, or None: the model's.

    transformers 5.2x writes `per_layer_config`, by a layer's number or kind; published files have
    separate keys for layers without a window.
    """
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        kind = _SLIDING if layer.window else _FULL
        by_number = {int(key): said for key, said in by_layer.items() if key.isdigit()}  # "05"
        own: dict[str, Any] = by_number.get(index, by_layer.get(kind, {}))
    elif layer.window:
        own = {}
    else:
        own = {"head_dim": config.get("global_head_dim", 512)}
        if config.get("attention_k_eq_v", False):
            own["num_key_value_heads"] = config.get("num_global_key_value_heads")
    dim = int(own.get("head_dim") or spec.head_dim)
    kv_heads = int(own.get("num_key_value_heads") or spec.kv_heads)
    alike = (dim, kv_heads) == (spec.head_dim, spec.kv_heads)
    return None if alike else HeadSizes(kv_heads, dim, dim)


def _sources(config: ModelConfig, windows: list[int], default: int) -> list[int | None]:
    """Return the layer whose K and V each layer reads; None: its own.

    `default`: the number of layers without their own K and V. The last layers read those of the
    last earlier layer of their kind. Raises ValueError if there is none.
    """
    first = len(windows) - int(config.get("num_kv_shared_layers", default))
    last: dict[bool, int] = {bool(windows[i]): i for i in range(first)}
    missing = {bool(window) for window in windows[first:]} - last.keys()
    if missing:
        raise ValueError("num_kv_shared_layers leaves no layer whose keys and values are read")
    return [None] * first + [last[bool(window)] for window in windows[first:]]


def _read_per_layer_inputs(config: ModelConfig, width: int, image_token: int) -> PerLayerInputsSpec:
    rows = int(config.get("vocab_size_per_layer_input", 262144))
    return PerLayerInputsSpec(width=width, rows=rows, image_token=image_token)


def _experts(config: ModelConfig) -> ExpertsSpec:
    return ExpertsSpec(
        count=int(config.need("num_experts")),
        per_token=int(config.need("top_k_experts")),
        width=int(config.need("moe_intermediate_size")),
        normalise=True,
        gate_up="rows",
    )
