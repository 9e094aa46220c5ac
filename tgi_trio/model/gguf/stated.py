"""What a file states of its model beyond the common keys: counts that are checked, and experts."""

from __future__ import annotations

from typing import Any, Final

from tgi_trio.model.gguf.files import GgufModel

Values = dict[str, Any]

_MOST: Final = 1 << 31


def read_count(model: GgufModel, *keys: str, default: int | None = None) -> int:
    """Return the first of some keys that is there, a whole number above 0; raises ValueError."""
    found = ((key, model.get(key)) for key in keys)
    key, value = next((pair for pair in found if pair[1] is not None), (keys[0], default))
    if value is None:
        raise ValueError(f"it has no {model.architecture}.{key}")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _MOST:
        raise ValueError(f"its {model.architecture}.{key} cannot be {value!r}")
    return value


def read_number(model: GgufModel, key: str, default: float) -> float:
    """Return a number above or equal to 0; raises ValueError for another value."""
    value = model.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _MOST:
        raise ValueError(f"its {model.architecture}.{key} cannot be {value!r}")
    return float(value)


def read_experts(model: GgufModel, layer: int = 0) -> Values:
    """Return how many experts there are, and take part; raises ValueError for other tensors.

    `layer`: the first that has any.
    """
    count, used = model.get("expert_count"), model.get("expert_used_count")
    shape = find_shape(model, "ffn_up_exps", layer)
    whole = isinstance(used, int) and not isinstance(used, bool)
    if len(shape) != 3 or shape[0] != count or not whole or not 0 < used <= count:
        raise ValueError(f"its {used!r} of {count!r} experts are not those of its tensors")
    return {"num_experts": count, "num_local_experts": count, "num_experts_per_tok": used}


def expert_width(model: GgufModel, role: str = "ffn_up_exps", layer: int = 0) -> int:
    """Return the width of an expert, which not all files state; raises ValueError without any."""
    shape = find_shape(model, role, layer)
    return shape[-2] if len(shape) > 1 else 0


def find_shape(model: GgufModel, role: str, layer: int = 0) -> tuple[int, ...]:
    """Return the shape of a layer's tensor; raises ValueError where there is none."""
    name = f"blk.{layer}.{role}.weight"
    if name not in model.tensors:
        raise ValueError(f"it has no tensor {name!r}")
    return model.tensors[name][1].shape
