"""Numbers of a spec that no model can have, whichever family's function has read them.

A config.json may say anything where a number stands: NaN, a negative width, a billion layers. Most
is shown by the tensors, whose shapes would be others; the rest would be computed with.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Final, cast

from tgi_trio.model.config import MOST, MOST_LAYERS
from tgi_trio.model.specs.attention import RotarySpec
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.records import walk_records

_MOST_EXPERTS: Final = 2**18  # of all layers together
_INTEGERS: Final = ("int", "int | None", "tuple[int, ...]")
_FLOATS: Final = ("float", "float | None", "tuple[float, ...]")
# What a model is nothing without, by the names of records.
_POSITIVE: Final[dict[str, tuple[str, ...]]] = {
    "DecoderSpec": ("hidden_size",),
    "LayerSpec": ("scale",),
    "RotarySpec": ("theta",),
    "QueryScale": ("step",),
    "HeadSizes": ("kv_heads", "dim"),
    "LatentSpec": ("rank", "value_dim"),
    "SharedKeySpec": ("query_rank", "groups", "group_rank"),
    "CompressionSpec": ("rate",),
    "IndexSpec": ("heads", "dim", "most"),
    "BlockIndexSpec": ("dim", "size", "most"),
    "PooledIndexSpec": ("heads", "dim", "size", "most"),
    "ExpertsSpec": ("width",),
    "ShortConvolution": ("channels", "taps"),
    "DeltaRule": ("key_heads", "value_heads", "key_dim", "value_dim", "taps"),
    "Mamba1": ("channels", "state_dim", "step_rank", "taps"),
    "Mamba2": ("heads", "head_dim", "groups", "state_dim", "taps"),
    "RecurrentGate": ("heads", "head_dim", "taps"),
    "T5Spec": (
        "vocab_size",
        "hidden_size",
        "heads",
        "head_dim",
        "mlp_width",
        "encoder_layers",
        "decoder_layers",
        "buckets",
        "max_distance",
    ),
}
_SIGNED: Final = frozenset({"DeltaRule.least_decay", "Mamba2.multipliers"})  # may be negative
_UNBOUNDED: Final = frozenset({"Mamba2.most_step"})  # may be infinite
_LARGE: Final = frozenset({"NgramsSpec.factors"})  # are made here, of 64 bits
# Parameters of rotary scalings that are no lists; 0 is none where it may be left out.
_SCALING: Final = frozenset(
    {
        *("low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "mscale"),
        *("attention_factor", "beta_fast", "beta_slow", "short_mscale", "long_mscale"),
        *("factor", "mscale_all_dim", "llama_4_scaling_beta"),
    }
)
_PER_PAIR: Final = ("short_factor", "long_factor")
_DIVIDED: Final = ("linear", "dynamic", "llama3")  # by what they call their factor


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Which numbers a field may have."""

    whole: bool = False
    below: float = math.inf
    positive: bool = False  # 0 is none
    signed: bool = False  # numbers below 0 are some as well
    finite: bool = True

    def hold(self, value: Any) -> bool:
        """Return whether a value is such a number."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            return False
        if not self.finite and value == math.inf:
            return True
        least = -math.inf if self.signed else 0
        return least <= value < self.below and not (self.positive and value == 0)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        least = "" if self.signed else " above 0" if self.positive else " of at least 0"
        return f"{kind}{least}" + (f", below {self.below}" if self.below < math.inf else "")


_NUMBER: Final = _Bounds()
_FACTOR: Final = _Bounds(positive=True)


def check_numbers(spec: Any) -> None:
    """Raise ValueError for a number in a spec, at any depth, that no model has.

    `spec`: a dataclass; what its fields are is read from their annotations.
    """
    for record in walk_records(spec):
        for name, bounds in _numbers(cast(Hashable, type(record))):
            value = getattr(record, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not bounds.hold(number):
                    raise ValueError(f"{name} would be {value!r}, and has to be {bounds}")
    if isinstance(spec, DecoderSpec):
        _check_extent(spec)


def _check_extent(spec: DecoderSpec) -> None:
    """Raise ValueError for no layer, for attention without heads, and for so many parts that a
    list of them would fill memory.
    """
    if not 0 < len(spec.layers) <= MOST_LAYERS:
        raise ValueError(f"it would have {len(spec.layers)} layers: 1 to {MOST_LAYERS} are read")
    for sizes in {spec.sizes(layer) for layer in spec.layers if layer.attends}:
        for name in ("heads", "kv_heads", "dim", "value_dim"):
            if (value := getattr(sizes, name)) < 1:
                raise ValueError(f"{name} of heads would be {value}, and there is attention")
    mixtures = (layer.experts for layer in (*spec.layers, *spec.mtp))
    experts = sum(mixture.count + mixture.idle for mixture in mixtures if mixture)
    if experts > _MOST_EXPERTS:
        raise ValueError(
            f"its layers would have {experts} experts: up to {_MOST_EXPERTS} together are read"
        )


def check_scaling(spec: RotarySpec) -> None:
    """Raise ValueError for parameters, as read, that frequencies cannot be computed from."""
    if spec.kind == "default":
        return  # has none
    for name, value in spec.parameters.items():
        if name in _PER_PAIR and spec.kind in ("longrope", "divided"):
            whole = isinstance(value, list) and len(value) == spec.dim // 2
            if not whole or not all(map(_FACTOR.hold, value)):
                raise ValueError(
                    f"{name} must be a list of {spec.dim // 2} numbers above 0, one for each pair "
                    "of dimensions that turn"
                )
        elif name in _SCALING and value is not None and not _NUMBER.hold(value):
            raise ValueError(f"{name} of its rotary scaling is {value!r}, and has to be {_NUMBER}")
    if spec.kind in _DIVIDED and not _FACTOR.hold(spec.parameters.get("factor")):
        raise ValueError(
            f"factor of its rotary scaling is {spec.parameters.get('factor')!r}, and has to be "
            f"{_FACTOR}"
        )


@cache
def _numbers(kind: Any) -> tuple[tuple[str, _Bounds], ...]:
    """Return the fields of a record that are numbers, and their bounds."""
    found = []
    for field in fields(kind) if is_dataclass(kind) else ():
        key = f"{kind.__name__}.{field.name}"
        positive = field.name in _POSITIVE.get(kind.__name__, ())
        if field.type in _INTEGERS:
            most = 2**63 if key in _LARGE else MOST
            found.append((field.name, _Bounds(whole=True, below=most, positive=positive)))
        elif field.type in _FLOATS:
            small = field.name.endswith("eps") or field.name == "sparsity"
            bounds = _Bounds(
                below=1 if small else math.inf,
                positive=positive,
                signed=key in _SIGNED,
                finite=key not in _UNBOUNDED,
            )
            found.append((field.name, bounds))
    return tuple(found)
