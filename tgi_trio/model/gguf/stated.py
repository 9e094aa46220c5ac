"""Reading further metadata of a GGUF file: checked counts, experts, values per layer."""

from __future__ import annotations

import struct
from typing import Any, Final

from tgi_trio.model.gguf.files import GgufModel

Values = dict[str, Any]

_MOST: Final = 1 << 31
_GATES_UPS: Final = "ffn_gate_up_exps"  # gate and up of all experts, in one tensor
_LONGEST_VECTOR: Final = 1 << 15  # of those that are read here
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
_SIGMOID: Final = 2  # of `expert_gating_func`


def read_count(model: GgufModel, *keys: str, default: int | None = None) -> int:
    """Return the value of the first key that exists, an integer above 0; raises ValueError."""
    found = ((key, model.get(key)) for key in keys)
    key, value = next((pair for pair in found if pair[1] is not None), (keys[0], default))
    if value is None:
        raise ValueError(f"it has no {model.architecture}.{key}")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MOST:
        raise ValueError(f"its {model.architecture}.{key} cannot be {value!r}")
    return value


def read_number(model: GgufModel, key: str, default: float) -> float:
    """Return a number that is not negative; raises ValueError for another value."""
    value = model.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise ValueError(f"its {model.architecture}.{key} cannot be {value!r}")
    return float(value)


def read_experts(model: GgufModel, layer: int = 0) -> Values:
    """Return the numbers of experts and of chosen ones; raises ValueError if tensors differ.

    `layer`: the first with experts.
    """
    count, used = model.get("expert_count"), model.get("expert_used_count")
    shape = find_shape(model, "ffn_up_exps", layer)
    whole = isinstance(used, int) and not isinstance(used, bool)
    if len(shape) != 3 or shape[0] != count or not whole or not 0 < used <= count:
        raise ValueError(f"its {used!r} of {count!r} experts are not those of its tensors")
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": used}


def expert_width(model: GgufModel, role: str = "ffn_up_exps", layer: int = 0) -> int:
    """Return an expert's width from its tensor, since not all files state it; raises ValueError."""
    shape = find_shape(model, role, layer)
    return shape[-2] if len(shape) > 1 else 0


def find_shape(model: GgufModel, role: str, layer: int = 0) -> tuple[int, ...]:
    """Return the shape of a layer's tensor; for experts' up also if it is in one tensor with gate.

    Raises ValueError if there is none.
    """
    name = f"blk.{layer}.{role}.weight"
    both = f"blk.{layer}.{_GATES_UPS}.weight"
    if name not in model.tensors and role == "ffn_up_exps" and both in model.tensors:
        *experts, rows, columns = model.tensors[both][1].shape
        return (*experts, rows // 2, columns)
    if name not in model.tensors:
        raise ValueError(f"it has no tensor {name!r}")
    return model.tensors[name][1].shape


def read_by_layer(model: GgufModel, key: str, layers: int) -> list[int]:
    """Return a number for each layer, from a list or a single one; raises ValueError otherwise."""
    value = model.get(key)
    if value is None:
        raise ValueError(f"it has no {model.architecture}.{key}")
    numbers = value if isinstance(value, list) else [value] * layers
    if len(numbers) < layers:
        raise ValueError(f"its {model.architecture}.{key} names not all layers")
    if not all(isinstance(each, int) and 0 <= each < _MOST for each in numbers):
        raise ValueError(f"its {model.architecture}.{key} cannot be {value!r}")
    return [int(each) for each in numbers[:layers]]


def read_own_layers(model: GgufModel, values: Values) -> int:
    """Return the number of layers without those for multi-token prediction."""
    drafting = model.get("nextn_predict_layers", 0)
    if not isinstance(drafting, int) or not 0 <= drafting < values["num_hidden_layers"]:
        raise ValueError(f"its {model.architecture}.nextn_predict_layers is {drafting!r}")
    return int(values["num_hidden_layers"] - drafting)


def read_first_sparse(model: GgufModel, values: Values) -> int:
    """Return the number of the first layer that is a mixture of experts."""
    dense = model.get("leading_dense_block_count", 0)
    if not isinstance(dense, int) or not 0 <= dense < values["num_hidden_layers"]:
        raise ValueError(f"its {model.architecture}.leading_dense_block_count is {dense!r}")
    return dense


def read_windows(
    model: GgufModel, layers: int, *, every: int | None = None, first: bool = False
) -> Values:
    """Return the window and the kinds of `layers`; no window and no kinds if the file has none.

    `every`, `first`: as for `read_kinds`.
    """
    if not model.get("attention.sliding_window"):
        return {"sliding_window": None}
    window = read_count(model, "attention.sliding_window")
    kinds = read_kinds(model, layers, every=every, first=first)
    return {"sliding_window": window, "layer_types": kinds}


def read_kinds(
    model: GgufModel, layers: int, *, every: int | None = None, first: bool = False
) -> list[str]:
    """Return the kind of each layer, FULL or SLIDING, as the file's pattern has it.

    A pattern is a list, or a number n: the last of every n layers has no window, or the `first`.
    `every`: that number if the file has no pattern. Raises ValueError for another pattern.
    """
    key = "attention.sliding_window_pattern"
    if isinstance(model.get(key), list):
        return [SLIDING if windowed else FULL for windowed in read_by_layer(model, key, layers)]
    period = read_count(model, key, default=every)
    full = 0 if first else period - 1
    return [FULL if index % period == full else SLIDING for index in range(layers)]


def read_sparse(model: GgufModel, layers: int) -> list[bool]:
    """Return which layers have experts, which their tensors show; ValueError if none has."""
    sparse = [f"blk.{layer}.ffn_gate_inp.weight" in model.tensors for layer in range(layers)]
    if True not in sparse:
        raise ValueError("it has no experts")
    return sparse


def read_counted_experts(
    model: GgufModel, layer: int, count: str, used: str, shared: str = ""
) -> Values:
    """Return the width of experts, and the numbers of all, of chosen and of shared ones.

    `layer`: the first with experts; `count`, `used`, `shared`: the family's config keys.
    """
    experts, width = read_experts(model, layer), expert_width(model, layer=layer)
    config = {
        "moe_intermediate_size": width,
        count: experts["num_experts"],
        used: experts["num_experts_per_tok"],
    }
    if not shared:
        return config
    role = "ffn_up_shexp"
    all_shared = 0
    if f"blk.{layer}.{role}.weight" in model.tensors:
        all_shared = expert_width(model, role, layer)
    if all_shared % width:
        raise ValueError(f"its shared experts are {all_shared} wide, and others {width}")
    return config | {shared: all_shared // width}


def read_expert_scale(model: GgufModel) -> float:
    """Return what experts' weights are multiplied by; files may state 0 for 1."""
    return read_number(model, "expert_weights_scale", 1.0) or 1.0


def read_limits(model: GgufModel, key: str, layers: int) -> list[float] | None:
    """Return the limits of activated gates by layer, 0 for none; None if the file has none."""
    limits = model.get(key)
    if limits is None:
        return None
    if not isinstance(limits, list) or len(limits) < layers:
        raise ValueError(f"its {model.architecture}.{key} names not all layers")
    if not all(isinstance(limit, float) and 0 <= limit < 1e6 for limit in limits):
        raise ValueError(f"its {model.architecture}.{key} cannot be {limits}")
    return limits[:layers]


def read_limit(model: GgufModel, layers: int) -> float:
    """Return the limit of gates, the same in all layers; raises ValueError otherwise."""
    limits = read_limits(model, "swiglu_clamp_exp", layers) or []
    shared = read_limits(model, "swiglu_clamp_shexp", layers) or limits
    if len({*limits, *shared}) != 1:
        raise ValueError(f"its {model.architecture}.swiglu_clamp_exp is not the same everywhere")
    return limits[0]


def check_sigmoid(model: GgufModel) -> None:
    """Raise ValueError if experts are chosen by anything but a sigmoid."""
    gating = model.get("expert_gating_func", _SIGMOID)  # older files do not state it
    if gating != _SIGMOID:
        raise ValueError(f"its {model.architecture}.expert_gating_func is {gating!r}")


def check_normalised(model: GgufModel) -> None:
    """Raise ValueError if the weights of experts do not add up to one."""
    if not model.get("expert_weights_norm", True):
        raise ValueError("the weights of its experts are not normalised")


def has_tensor(model: GgufModel, ending: str) -> bool:
    """Return whether any layer has a tensor whose name ends so."""
    return any(name.endswith(f".{ending}") for name in model.tensors)


def read_factors(model: GgufModel, name: str, rotary_dims: int) -> list[float] | None:
    """Return the divisors of the frequencies, None if the file has none.

    Raises ValueError for a tensor of another shape or type.
    """
    return read_vector(model, name, rotary_dims // 2) if name in model.tensors else None


def read_vector(model: GgufModel, name: str, count: int) -> list[float]:
    """Return the numbers of a float32 tensor [count]; raises ValueError for any other tensor."""
    if name not in model.tensors:
        raise ValueError(f"it has no tensor {name!r}")
    file, info = model.tensors[name]
    if info.kind.name != "F32" or info.shape != (count,) or count > _LONGEST_VECTOR:
        raise ValueError(f"its tensor {name!r} is no table of {count} numbers")
    with file.open("rb") as opened:
        opened.seek(info.first)
        return list(struct.unpack(f"<{count}f", opened.read(info.end - info.first)))


def read_query_scale(model: GgufModel, values: Values, *, sharper: float) -> Values:
    """Return the rotary scaling, including the scaling of queries and of longer contexts' scores.

    `sharper`: the factor of the latter. Queries are scaled by their position if the file states the
    factor, in steps of the length that was trained for.
    """
    scaling = values.get("rope_scaling")
    if scaling is None:
        return {}
    config = {"mscale": sharper, "mscale_all_dim": sharper} if sharper else {}
    if beta := read_number(model, "attention.temperature_scale", 0.0):
        config["llama_4_scaling_beta"] = beta
    return {"rope_scaling": scaling | config}
