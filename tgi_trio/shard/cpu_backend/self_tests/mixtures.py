"""Self-test of the kernels of mixtures of experts with a tiny model, at every start with one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tgi_trio.model.families.names import QWEN2_MOE
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.machine_code.entry import MIX_EXPERTS
from tgi_trio.shard.cpu_backend.self_tests import step as self_test
from tgi_trio.shard.cpu_backend.self_tests.step import RandomWeights
from tgi_trio.shard.cpu_backend.variant import Variant, narrowed

_EXPERTS = ExpertsSpec(count=5, per_token=2, width=32, normalise=True, shared_width=64)

_NEAR = 0.1  # between logits of experts, of deviation 1: rounding moves them by a tenth of that


def find_fault(variant: Variant) -> str | None:
    """Return what is wrong with the kernels of these numbers, or None."""
    mixture = (MIX_EXPERTS.open(narrowed(variant)).address, _with_experts, _mix)
    return self_test.find_fault(variant.kv.numbers, variant, mixture=mixture)


def _with_experts(spec: DecoderSpec) -> DecoderSpec:
    layers = tuple(replace(layer, experts=_EXPERTS) for layer in spec.layers)
    return replace(spec, layers=layers, names=QWEN2_MOE)


def _mix(spec: DecoderSpec, weights: RandomWeights, x: Floats) -> Any:
    """Return the output of the mixture for x [T, hidden], in plain numpy; NaN: not to be compared.

    That is where rounding may decide which experts a token has.
    """
    names, prefix, hidden = spec.names, spec.names.layer.format(0), spec.hidden_size

    def linear(x: Floats, name: str, outputs: int) -> Any:
        return x @ weights.tensor(f"{prefix}{name}.weight", (outputs, x.shape[1])).T

    def gated(x: Floats, place: str, width: int) -> Any:
        gate, up = (linear(x, f"{place}{part}_proj", width) for part in ("gate", "up"))
        return linear(gate / (1.0 + np.exp(-gate)) * up, f"{place}down_proj", hidden)

    logits = linear(x, names.router, _EXPERTS.count)
    left, last = np.sort(logits, axis=1)[:, -_EXPERTS.per_token - 1 : -_EXPERTS.per_token + 1].T
    parts = np.exp(logits - logits.max(axis=1, keepdims=True))
    parts[logits < last[:, None]] = 0.0
    parts /= parts.sum(axis=1, keepdims=True)
    opened = 1.0 / (1.0 + np.exp(-linear(x, names.shared_router, 1)))
    result = opened * gated(x, names.shared_expert, _EXPERTS.shared_width)
    for i in range(_EXPERTS.count):
        result += parts[:, i, None] * gated(x, names.experts.format(i), _EXPERTS.width)
    result[last - left < _NEAR] = np.nan
    return result
