"""The kernels of mixtures of experts: a tiny model through them at every start that has any.

`python -m` of it compiles them: its argument is the variant, as JSON.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np

from tgi_trio.model.families.names import QWEN2_MOE
from tgi_trio.model.spec import DecoderSpec, ExpertsSpec
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.machine.garbage import pause_collection
from tgi_trio.shard.numba_backend import self_test
from tgi_trio.shard.numba_backend.kernels import is_marked, mark
from tgi_trio.shard.numba_backend.kernels.apart import compile_apart
from tgi_trio.shard.numba_backend.kernels.mixture.mixing import mix_experts
from tgi_trio.shard.numba_backend.self_test import RandomWeights
from tgi_trio.shard.numba_backend.variant import Variant

_EXPERTS = ExpertsSpec(count=5, per_token=2, width=32, normalise=True, shared_width=64)


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    mixture = (compile_mixtures(variant), _with_experts, _mix)
    return self_test.find_fault(variant.kv.numbers, variant, mixture=mixture)


def compile_mixtures(variant: Variant) -> int:
    """Compile, or take from the cache; return the address of the entry.

    Raises what the compiler raises without instructions for it.
    """
    where = compile_apart(mix_experts, variant)
    mark(_name(variant))
    return where


def words(variant: Variant) -> list[str]:
    """Return what `python -m` gets to compile for a variant; nothing where the cache has it."""
    if is_marked(_name(variant)):
        return []
    return [__name__, variant.as_json()]


def _name(variant: Variant) -> str:
    numbers = f"{variant.weights}{variant.kv}{variant.rows}"
    return "mixture-" + "".join(c for c in numbers if c.isalnum())


def _with_experts(spec: DecoderSpec) -> DecoderSpec:
    layers = tuple(replace(layer, experts=_EXPERTS) for layer in spec.layers)
    return replace(spec, layers=layers, names=QWEN2_MOE)


def _mix(spec: DecoderSpec, weights: RandomWeights, x: Floats) -> Any:
    """Return what the mixture makes of x [T, hidden], in plain numpy."""
    names, prefix, hidden = spec.names, spec.names.layer.format(0), spec.hidden_size

    def linear(x: Floats, name: str, outputs: int) -> Any:
        return x @ weights.tensor(f"{prefix}{name}.weight", (outputs, x.shape[1])).T

    def gated(x: Floats, place: str, width: int) -> Any:
        gate, up = (linear(x, f"{place}{part}_proj", width) for part in ("gate", "up"))
        return linear(gate / (1.0 + np.exp(-gate)) * up, f"{place}down_proj", hidden)

    logits = linear(x, names.router, _EXPERTS.count)
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    best = np.sort(odds, axis=1)[:, -_EXPERTS.per_token, None]
    parts = np.where(odds >= best, odds, 0.0)
    parts /= parts.sum(axis=1, keepdims=True)
    opened = 1.0 / (1.0 + np.exp(-linear(x, names.shared_router, 1)))
    result = opened * gated(x, names.shared_expert, _EXPERTS.shared_width)
    for i in range(_EXPERTS.count):
        result += parts[:, i, None] * gated(x, names.experts.format(i), _EXPERTS.width)
    return result


def main(argv: list[str]) -> None:
    """Compile for the variant that `argv` describes."""
    (text,) = argv
    with pause_collection():
        compile_mixtures(Variant.from_json(text))


if __name__ == "__main__":
    main(sys.argv[1:])
