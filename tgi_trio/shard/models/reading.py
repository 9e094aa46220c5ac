"""Reading of config.json that several families share."""

from __future__ import annotations

from typing import Any

from tgi_trio.shard.model_config import ModelConfig
from tgi_trio.shard.models.specs import RotarySpec


def rotary(
    config: ModelConfig,
    head_dim: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    layer_type: str = "",
) -> RotarySpec:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    `theta` and `partial` are the family's defaults; `layer_type` picks one of several sets.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if isinstance(parameters.get(layer_type), dict):
        parameters = dict(parameters[layer_type])
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    part = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor", partial)
    original = config.get("original_max_position_embeddings")
    if original:
        parameters["original_max_position_embeddings"] = original
    else:
        parameters.setdefault("original_max_position_embeddings", config.max_positions)
    return RotarySpec(
        dim=int(head_dim * part),
        theta=float(parameters.get("rope_theta") or config.get("rope_theta", theta)),
        kind="longrope" if kind == "su" else kind,
        interleaved=interleaved,
        max_positions=config.max_positions,
        parameters=parameters,
    )


def sliding_windows(config: ModelConfig, every: int = 0) -> list[int]:
    """Return each layer's sliding window, 0 where a layer sees everything.

    `layer_types` says which layers have one. Older files: with `every`, all layers but each
    every-th (Gemma); without, those from `max_window_layers` on if `use_sliding_window` (Qwen).
    """
    count = int(config.need("num_hidden_layers"))
    window = int(config.get("sliding_window", 4096))
    kinds = config.get("layer_types")
    if kinds:
        return [window if kind == "sliding_attention" else 0 for kind in kinds]
    if every:
        return [window if (i + 1) % every else 0 for i in range(count)]
    if not config.get("use_sliding_window", False):
        return [0] * count
    first = int(config.get("max_window_layers", 28))
    return [window if i >= first else 0 for i in range(count)]
