"""config.json of a GGUF file: its metadata in the terms of the model's family."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.gguf.architectures import ARCHITECTURES, Architecture
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.header import refusing
from tgi_trio.model.gguf.stated import Values, read_count, read_factors

# Keys of every architecture, without its name as prefix.
_COMMON: Final = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_NEEDED: Final = (
    "max_position_embeddings",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
)
_YARN: Final = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
}


def make_config(model: GgufModel, files: list[Path]) -> Values:
    """Return config.json of a model; raises ModelLoadError for an unsupported one."""
    architecture = ARCHITECTURES.get(model.architecture)
    if architecture is None:
        raise ModelLoadError(
            f"{files[0]} is a model of the architecture {model.architecture!r}, which is not "
            f"served as GGUF; served are {', '.join(sorted(ARCHITECTURES))}."
        )
    with refusing(files[0]):
        values = _common(model, architecture)
        _check(model, values, architecture)
        if architecture.latent:
            values["head_dim"] = read_count(model, "rope.dimension_count")
        elif "num_attention_heads" in values:
            if not architecture.narrow_values:
                _check_lengths(model)
            if "head_dim" not in values:
                values["head_dim"] = _head_dim(model, values)
        if "head_dim" in values:
            values |= _scaling(model, values["head_dim"])
        values |= architecture.config(model, values)
    return values


def _common(model: GgufModel, architecture: Architecture) -> Values:
    absent = architecture.without
    values = {ours: value for key, ours in _COMMON.items() if (value := model.get(key)) is not None}
    for name in absent:
        if values.pop(name, 0) != 0:
            raise ValueError(f"it states {name}, of which this architecture has none")
    if (width := model.get("expert_feed_forward_length")) is not None:
        values.setdefault("intermediate_size", width)  # the only one that mixtures state
    if missing := [name for name in _NEEDED if name not in values and name not in absent]:
        keys = {ours: key for key, ours in _COMMON.items()}
        raise ValueError(f"it has no {model.architecture}.{keys[missing[0]]}")
    if "token_embd.weight" in model.tensors:  # the actual number of rows
        values["vocab_size"] = model.tensors["token_embd.weight"][1].shape[0]
    return values | {
        "num_nextn_predict_layers": model.get("nextn_predict_layers", 0),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "torch_dtype": _dtype(model),
        "attention_bias": any(
            name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in model.tensors
        ),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in model.tensors),
    }


def _check(model: GgufModel, values: Values, architecture: Architecture) -> None:
    """Raise ValueError for values that are not valid numbers, or that no family of ours has."""
    for key, name in _COMMON.items():
        value, real = values.get(name), name in ("rms_norm_eps", "rope_theta")
        if value is None:
            continue
        if isinstance(value, list):  # one value per layer
            differs = name in architecture.by_layer
            kept = [one for one in value if one or not differs]
            if kept and all(one == kept[0] for one in kept):
                value = values[name] = kept[0]
            elif kept and differs and all(type(one) is int and 0 < one < 1 << 31 for one in kept):
                continue
        if isinstance(value, bool) or not isinstance(value, (int, float) if real else int):
            raise ValueError(f"its {model.architecture}.{key} is {value!r}, which is not served")
        if not 0 < value < 1 << 31:
            raise ValueError(f"its {model.architecture}.{key} cannot be {value!r}")
    if values["num_hidden_layers"] > len(model.tensors):
        raise ValueError(
            f"its {model.architecture}.block_count is {values['num_hidden_layers']}, and it has "
            f"{len(model.tensors)} tensors"
        )


def _check_lengths(model: GgufModel) -> None:
    """Raise ValueError if a head's key and value have different lengths."""
    lengths = model.get("attention.key_length"), model.get("attention.value_length")
    if lengths[0] != lengths[1]:
        raise ValueError(f"its keys and values are of different lengths, {lengths}")


def _head_dim(model: GgufModel, values: Values) -> int:
    """Return the length of a head in a file that does not state it; ValueError if they differ."""
    if isinstance(values["num_attention_heads"], list):
        raise ValueError(f"it has no {model.architecture}.attention.key_length")
    return int(values["hidden_size"] // values["num_attention_heads"])


def _dtype(model: GgufModel) -> str:
    """Return the dtype of most of the file's bytes; bfloat16 if they are quantised."""
    sizes: dict[str, int] = {}
    for _, info in model.tensors.values():
        sizes[info.kind.name] = sizes.get(info.kind.name, 0) + info.end - info.first
    most = max(sizes, key=lambda name: sizes[name], default="F32")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _scaling(model: GgufModel, head: int) -> Values:
    """Return the rotary settings: the rotated part of a head, and the scaling."""
    rotary_dims = model.get("rope.dimension_count") or head
    if not isinstance(rotary_dims, int) or not 0 < rotary_dims <= head:
        raise ValueError(f"it turns {rotary_dims!r} of {head} dimensions")
    part = rotary_dims / head
    if int(head * part) < rotary_dims:
        part = math.nextafter(part, 2)
    values: Values = {"partial_rotary_factor": part}
    kind, factor = model.get("rope.scaling.type"), model.get("rope.scaling.factor")
    if factor is None and (scale := model.get("rope.scale_linear")):  # its older name
        kind, factor = "linear", scale
    original = model.get("rope.scaling.original_context_length")
    factors = {name: read_factors(model, f"rope_{name}.weight", rotary_dims) for name in _FACTORS}
    if found := factors["freqs"]:  # Llama 3's
        long = short = found
        rope: Values = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
    elif factors["factors_long"] and factors["factors_short"]:
        long, short = factors["factors_long"], factors["factors_short"]
        rope = {"rope_type": "longrope"}
        if (attention := model.get("rope.scaling.attn_factor")) is not None:
            rope["attention_factor"] = attention
    elif kind in ("linear", "yarn") and factor:
        rope = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            rope |= {our: v for key, our in _YARN.items() if (v := model.get(key)) is not None}
        return values | {"rope_scaling": rope} | _original(original)
    elif kind in (None, "none", "linear", "longrope"):
        return values
    else:
        raise ValueError(f"its rotary scaling {kind!r} is not served")
    rope |= {"long_factor": long, "short_factor": short}
    return values | {"rope_scaling": rope} | _original(original)


_FACTORS: Final = ("freqs", "factors_long", "factors_short")


def _original(length: Any) -> Values:
    return {"original_max_position_embeddings": length} if isinstance(length, int) else {}
