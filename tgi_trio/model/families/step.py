"""The text of Step 3.7 Flash (StepFun 2026), of the type Step 3.5.

Layers with a window have more query heads; a head's output has a gate, and in the last layers
activated gates of MLPs are bounded. Lists of layers go on with those that draft tokens ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.balanced import set_sparse
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, HeadSizes, LayerSpec

# A key in the config that we make of a GGUF file, beside which there is no code.
WITHOUT_CODE: Final = "without_code"
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Names in published files -> those that transformers writes.
_OLDER_NAMES: Final = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}


def step3p5(config: ModelConfig) -> DecoderSpec | None:
    """None for the type by itself, whose code comes with it, and for parts that none has used."""
    own_code = config.model_type == "step3p5" and not config.get(WITHOUT_CODE)
    if own_code or config.get("mlp_bias", False):
        return None
    if config.get("gating", True) not in (True, "per-head"):
        return None
    if config.get("use_bidirectional_attention", False):
        return None
    renamed = {new: config.get(old) for old, new in _OLDER_NAMES.items() if config.get(old)}
    config = replace(config, values={**config.values, **renamed})
    count, head_dim = int(config.need("num_hidden_layers")), int(config.get("head_dim", 128))
    kinds, sparse = _described(_kinds(config, count), _sparse(config, count), count)
    window = int(config.values.get("sliding_window") or 0)
    rotary_spec = {
        kind: rotary(_select_rotary(config, kinds, kind), head_dim, layer_type=kind)
        for kind in kinds
    }
    spec = llama_spec(
        config,
        rotary_spec=rotary_spec[kinds[0]],
        windows=[window if kind == _SLIDING else 0 for kind in kinds],
        names=names.STEP3P5,
        norm="rms_plus_one",
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        scale=float(config.get("query_pre_attn_scalar", head_dim)) ** -0.5,
        query_key_norm="head",
        gated_heads=True,
        activation="silu",
        **attention_bias(config),
    )
    routed, limits = (
        _limits(config, f"swiglu_limits{part}", count, len(kinds)) for part in ("", "_shared")
    )
    pairs = enumerate(zip(limits, sparse, strict=True))
    bounded = [i for i, (limit, own) in pairs if limit and not own]
    if bounded and bounded[0] < count:
        return None
    heads = {_FULL: spec.heads, _SLIDING: _sliding_heads(config, spec.heads)}
    layers = (
        replace(
            la,
            rotary=rotary_spec[kind],
            sizes=HeadSizes(spec.kv_heads, head_dim, head_dim, heads[kind]),
        )
        for la, kind in zip(spec.layers, kinds, strict=True)
    )
    spec = set_sparse(replace(spec, layers=tuple(layers)), _experts(config), sparse)
    every = tuple(_bound(*layer) for layer in zip(spec.layers, routed, limits, strict=True))
    return replace(spec, layers=every[:count], mtp=() if bounded else every[count:])


def _kinds(config: ModelConfig, count: int) -> list[str]:
    """Return the kinds of the model's layers, and of those that draft as far as they are said."""
    drafting, kinds = int(config.get("num_nextn_predict_layers") or 0), config.get("layer_types")
    if not kinds:
        return [_FULL] * (count + drafting)
    further = config.get("mtp_layer_types") or kinds[count:]
    return [*kinds[:count], *further[:drafting]]


def _described(kinds: list[str], sparse: list[bool], count: int) -> tuple[list[str], list[bool]]:
    """Return both lists, cut behind the last layer that both describe, but not before `count`."""
    known = max(count, min(len(kinds), len(sparse)))
    return kinds[:known], sparse[:known]


def _experts(config: ModelConfig) -> ExpertsSpec:
    return ExpertsSpec(
        count=int(config.get("n_routed_experts", config.get("num_local_experts", 288))),
        per_token=int(config.get("num_experts_per_tok", 8)),
        width=int(config.get("moe_intermediate_size", 1280)),
        normalise=True,
        shared_width=int(config.get("share_expert_dim", 1280)),
        routing="grouped-sigmoid",
        scale=float(config.get("moe_router_scaling_factor", 1.0)),
    )


def _bound(layer: LayerSpec, limit: float, shared: float) -> LayerSpec:
    """Return a layer with the limits of its experts and of the shared one; 0: none."""
    if layer.experts is None or not (limit or shared):
        return layer
    own = replace(
        layer.experts,
        limit=limit,
        shared_limit=None if shared == limit else shared,
        raised=False,
        bounds_opened=True,
    )
    return replace(layer, experts=own)


def _sparse(config: ModelConfig, count: int) -> list[bool]:
    """Return which layers are mixtures of experts; published files list their numbers."""
    drafting = int(config.get("num_nextn_predict_layers") or 0)
    kinds, listed = config.get("mlp_layer_types"), config.get("moe_layers_enum")
    if kinds:
        further = config.get("mtp_mlp_layer_types") or kinds[count:]
        return [kind == "sparse" for kind in (*kinds[:count], *further)]
    if listed is None:
        return [3 <= i < count for i in range(count + drafting)]
    items = listed.split(",") if isinstance(listed, str) else listed
    own = {int(item) for item in items if str(item).strip()}
    return [i in own for i in range(count + drafting)]


def _limits(config: ModelConfig, name: str, count: int, every: int) -> list[float]:
    """Return the limits of `every` layer, 0 for none: of the model's, `count`, and further ones."""
    limits = [float(limit or 0.0) for limit in config.get(name) or [0.0] * count]
    return (limits + [0.0] * (every - count))[:every]


def _sliding_heads(config: ModelConfig, heads: int) -> int:
    """Return the number of query heads of layers with a window."""
    other = dict(config.get("attention_other_setting") or {})
    return int(config.get("num_sliding_attention_heads", other.get("num_attention_heads", heads)))


def _select_rotary(config: ModelConfig, kinds: Sequence[str], kind: str) -> ModelConfig:
    """Return the config with one set of rotary parameters, that of a kind of layer.

    Published files have a base and a rotated part for each layer; their scaling is that of layers
    without a window.
    """
    values: dict[str, Any] = {**config.values, "partial_rotary_factor": None}
    said = dict(config.get("rope_parameters") or {})
    if not isinstance(said.get(kind), dict):
        place, own = kinds.index(kind), {"rope_type": "default"}
        bases, parts = config.get("rope_theta", 10000.0), config.get("partial_rotary_factors")
        said = {kind: own | {"rope_theta": bases[place] if isinstance(bases, list) else bases}}
        if parts:
            said[kind]["partial_rotary_factor"] = parts[place]
    return replace(config, values={**values, "rope_theta": None, "rope_parameters": said})
