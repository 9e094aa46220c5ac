"""Reading of config.json that several families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.specs.decoder import QueryScale, RotarySpec
from tgi_trio.model.specs.plausible import check_scaling

# The rotary scalings that are computed -> the parameters that they require.
_SCALINGS: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
# "mrope": text has one position, images have three. "xdrope": Hunyuan VL, as it was published.
_OLDER_NAMES: Final = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}


def rotary(
    config: ModelConfig,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    layer_type: str = "",
) -> RotarySpec:
    """Read a model's rotary embedding; raises ModelLoadError for an unknown scaling, ValueError for
    parameters of one that make no sense.

    `theta` and `partial`: the family's defaults; `layer_type`: chooses one of several sets.
    """
    parameters = _rope_parameters(config, layer_type)
    kind: Any = parameters.get("rope_type") or "default"
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise ModelLoadError(f"Rotary scaling {kind!r} is not known; known are {known}.")
    for name in _SCALINGS[kind]:
        if parameters.get(name) is None:
            raise ModelLoadError(
                f"{config.folder / 'config.json'} asks for the rotary scaling {kind!r} without "
                f"its {name!r}."
            )
    if kind == "longrope" and _is_the_same_at_every_length(parameters):
        kind = "divided"
    part = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor", partial)
    if kind == "proportional":  # `partial` applies to frequencies over the whole head
        part = 1.0
    original = config.get("original_max_position_embeddings")
    if original:
        parameters["original_max_position_embeddings"] = original
    else:
        parameters.setdefault("original_max_position_embeddings", config.trained_positions)
    found = RotarySpec(
        dim=int(head_dim * part),
        theta=float(parameters.get("rope_theta") or config.get("rope_theta", theta)),
        kind=kind,
        interleaved=interleaved,
        max_positions=config.trained_positions,
        parameters=parameters,
        query_scale=_query_scale(parameters),
    )
    check_scaling(found)
    return found


def with_rotary(config: ModelConfig, parameters: Mapping[str, Any]) -> ModelConfig:
    """Return the config with a family's default `rope_parameters`, if it has none of its own."""
    if config.get("rope_parameters") or config.get("rope_scaling"):
        return config
    return replace(config, values={**config.values, "rope_parameters": dict(parameters)})


def without_loose_rotary(config: ModelConfig) -> ModelConfig:
    """Return the config without base and rotated part beside `rope_parameters`.

    For families whose classes in transformers do not read them there.
    """
    loose = dict.fromkeys(("rope_theta", "partial_rotary_factor"))
    return replace(config, values={**config.values, **loose})


def _is_the_same_at_every_length(parameters: Mapping[str, Any]) -> bool:
    """Whether longrope has one set of divisors and one scale, as for Llama 3 in GGUF."""
    pairs = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
    return all(parameters.get(short) == parameters.get(long) for short, long in pairs)


def with_sections(
    spec: RotarySpec, default: tuple[int, int, int], *, alternate: bool
) -> RotarySpec:
    """Return the rotary embedding with three positions for the tokens of images (M-RoPE).

    `default`: the family's `mrope_section`; `alternate`: axes alternate pair by pair. Raises
    ModelLoadError for sections that do not make up a head.
    """
    given = spec.parameters.get("mrope_section") or default
    pairs = spec.dim // 2
    whole = len(given) == 3 and all(isinstance(count, int) and count >= 0 for count in given)
    if not whole or (sum(given) != pairs and not alternate):
        raise ModelLoadError(
            f"mrope_section must be three numbers that add up to {pairs}, the pairs of dimensions "
            f"that turn, not {given!r}."
        )
    return replace(spec, sections=tuple(given), sections_alternate=alternate)


def _query_scale(parameters: dict[str, Any]) -> QueryScale | None:
    """Return the scaling of queries by position, by its name in Mistral's config."""
    beta = parameters.get("llama_4_scaling_beta")
    step = int(parameters["original_max_position_embeddings"])
    return QueryScale(float(beta), step) if beta and step else None


def _rope_parameters(config: ModelConfig, layer_type: str) -> dict[str, Any]:
    """Return `rope_parameters` of a kind of layers, merged with the older `rope_scaling`.

    transformers 5 writes the former; the latter is older, or was added by hand, and wins, as in
    transformers. If there are sets by kind of layer, it applies to layers with full attention. It
    only replaces the scaling: base and rotated part stay those of the former (transformers would
    use the family's default base, not the one of training). Raises ModelLoadError for one set where
    each kind of layers has its own: transformers passes over it, or fails.
    """
    newer = _object(config, "rope_parameters")
    stated = [own for own in newer.values() if own is not None]
    if layer_type and stated and not any(isinstance(own, dict) for own in stated):
        raise ModelLoadError(
            f"{config.folder / 'config.json'} has one set of rope_parameters, and model type "
            f"{config.model_type!r} turns each kind of layers by a set of its own: "
            f"rope_parameters.{layer_type} is missing."
        )
    older = _name_type(_object(config, "rope_scaling"))
    if isinstance(newer.get(layer_type), dict):
        own = _name_type(newer[layer_type])
        return {**own, **older} if layer_type == "full_attention" else own
    if not older:
        return _name_type(newer)
    kept = ("rope_theta", "partial_rotary_factor")
    return {**{name: newer[name] for name in kept if name in newer}, **older}


def _object(config: ModelConfig, name: str) -> dict[str, Any]:
    """Return an object of config.json, {} where it is null; raises ValueError for anything else."""
    value = config.get(name)
    if value and not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}, which is no object")
    return value or {}


def _name_type(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with the kind as `rope_type`, by its newer name."""
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind is None:
        return dict(parameters)
    return {**parameters, "rope_type": _OLDER_NAMES.get(kind, kind)}


def read_sliding_windows(
    config: ModelConfig, every: int = 0, window: int = 4096, *, first: bool = False
) -> list[int]:
    """Return each layer's sliding window, 0 for none; `window`: the family's default.

    `layer_types` states which layers have one. In older files, with `every`: all layers but every
    n-th (Gemma), which is the first of each n if `first`; without: those from `max_window_layers`
    on if `use_sliding_window` (Qwen).
    """
    count = int(config.need("num_hidden_layers"))
    window = int(config.get("sliding_window", window))
    kinds = config.get("layer_types")
    if kinds:
        return windows_by_kind(kinds, window)
    if every:
        whole = 0 if first else every - 1  # the layer without a window among every n
        return [window if i % every != whole else 0 for i in range(count)]
    if not config.get("use_sliding_window", False):
        return [0] * count
    begin = int(config.get("max_window_layers", 28))
    return [window if i >= begin else 0 for i in range(count)]


def windows_by_kind(kinds: Sequence[str], window: int) -> list[int]:
    """Return each layer's sliding window, 0 for none, by its kind in `layer_types`.

    Raises ValueError for a kind that is neither full nor sliding attention.
    """
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types has {sorted(unknown)[0]!r}, which this family does not have")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]
