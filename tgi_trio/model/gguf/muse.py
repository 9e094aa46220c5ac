"""Muse Glimmer: the scale of its normalised heads is a norm's weight in its files."""

from __future__ import annotations

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import (
    SLIDING,
    Values,
    read_number,
    read_vector,
    read_windows,
)


def muse_glimmer(model: GgufModel, values: Values) -> Values:
    """Return the config; like llama.cpp, we turn layers with a window alone."""
    layers = values["num_hidden_layers"]
    windows = read_windows(model, layers, every=4)
    kinds = windows.get("layer_types", [])
    if SLIDING not in kinds:
        raise ValueError("no layer of it has a window")
    theta = values.get("rope_theta", 1e4)
    return windows | {
        "model_type": "muse_glimmer_text",
        "layer_rope_theta": [theta if kind == SLIDING else 0 for kind in kinds],
        "qk_scale_factor": _scale(model, layers, values["head_dim"]),
        "output_multiplier": read_number(model, "logit_scale", 1.0),
        "final_logit_softcapping": read_number(model, "final_logit_softcapping", 0.0),
    }


def _scale(model: GgufModel, layers: int, head: int) -> float:
    """Return by what scores are multiplied; ValueError if heads' norms have any other weights."""
    found = {"q": set[float](), "k": set[float]()}
    for layer in range(layers):
        for part, weights in found.items():
            weights.update(read_vector(model, f"blk.{layer}.attn_{part}_norm.weight", head))
    if len(found["q"]) != 1 or found["k"] != {1.0}:
        raise ValueError("the norms of its heads differ among numbers or layers")
    (scale,) = found["q"]
    return scale
