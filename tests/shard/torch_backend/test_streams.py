"""Kernels of layers that compute one of several hidden states, against torch's operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.decoder import NormKind, StreamsSpec
from tgi_trio.shard.torch_backend.layers import gating, opening, per_layer_inputs
from tgi_trio.shard.torch_backend.layers.activation import ACTIVATIONS, SparseActivation
from tgi_trio.shard.torch_backend.layers.gating import Gate, open_own
from tgi_trio.shard.torch_backend.layers.linears import plain_product
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.per_layer_inputs import PerLayerInput
from tgi_trio.shard.torch_backend.layers.streams import alternating_updates
from tgi_trio.shard.torch_backend.layers.streams.alternating_parts import Added, Routing
from tgi_trio.shard.torch_backend.layers.streams.alternating_updates import (
    LayerStreams,
    Streams,
    holds_streams,
)

need_triton()

TOKENS, HIDDEN, RANK = 3, 40, 8
DTYPES = (torch.float32, torch.bfloat16)


def some(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_of(seed: int, dtype: torch.dtype, kind: NormKind = "rms") -> Norm:
    return Norm(kind, 1.0 + 0.2 * some(HIDDEN, seed=seed, dtype=dtype), None, 1e-5, HIDDEN)


def layer_of(spec: StreamsSpec, dtype: torch.dtype, kind: NormKind = "rms") -> LayerStreams:
    count = spec.count
    router = some(count, HIDDEN, seed=3, dtype=dtype)
    return LayerStreams(
        spec,
        routing=Routing(norm_of(1, dtype, kind), router),
        prediction=some(count * count, count, seed=4, dtype=dtype),
        correction=some(count, count, seed=5, dtype=dtype),
        scale=some(HIDDEN, seed=6, dtype=dtype),
        detour_down=Linear(some(RANK, HIDDEN, seed=7, dtype=dtype) / 8),
        detour_up=Linear(some(HIDDEN, RANK, seed=8, dtype=dtype)),
        detour_norm=norm_of(2, dtype, kind),
    )


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Sums are in another order, so a last bit may differ, which later steps pass on."""
    assert ours.dtype is theirs.dtype
    tolerance = 1e-5 if ours.dtype is torch.float32 else 2.0**-4
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def in_kernels(patch: pytest.MonkeyPatch) -> None:
    for module in (alternating_updates, gating, opening, plain_product):
        patch.setattr(module, "runs_kernels", lambda device: True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (StreamsSpec(4, 0, scaled=True, detour_rank=RANK), "rms"),
        (StreamsSpec(3, 2, scaled=False, detour_rank=RANK), "rms_plus_one"),
    ],
    ids=["the first of four", "the last of three"],
)
def test_a_layer_says_what_torch_says(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, spec: StreamsSpec, kind: NormKind
) -> None:
    """Each launch by itself, for the same input."""
    own = layer_of(spec, dtype, kind)
    hidden = some(spec.count, TOKENS, HIDDEN, seed=9, dtype=dtype)
    before, after = norm_of(10, dtype, kind), norm_of(11, dtype, kind)
    said, mixed, found = (some(TOKENS, HIDDEN, seed=i, dtype=dtype) for i in (12, 13, 14))
    for added in (None, Added(said, after)):
        theirs = own.predict(hidden, added, before)
        detour = own.detour_up(own.detour_down(theirs[1]))
        joined = own.join(*theirs, mixed, detour, after, before)
        corrected = own.correct(theirs[0], joined[0], found, after)
        with monkeypatch.context() as patch:
            in_kernels(patch)
            ours = (
                *own.predict(hidden, added, before),
                *own.join(*theirs, mixed, detour, after, before),
                *own.correct(theirs[0], joined[0], found, after),
            )
        for mine, wanted in zip(ours, (*theirs, *joined, *corrected), strict=True):
            agree(mine, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds", [True, False])
def test_states_are_made_and_joined_as_in_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, adds: bool
) -> None:
    """One of them nearly nothing, whose magnitude has a bound."""
    into, out = (
        [Linear(some(HIDDEN, HIDDEN, seed=i + s, dtype=dtype) / 8) for i in range(3)]
        for s in (0, 3)
    )
    into[1].weight.mul_(1e-5)
    ends, x = Streams(into, out), some(TOKENS, HIDDEN, seed=9, dtype=dtype)
    added = Added(some(TOKENS, HIDDEN, seed=8, dtype=dtype), norm_of(7, dtype)) if adds else None
    split = ends.split(x)
    joined = ends.join(split, added)
    in_kernels(monkeypatch)
    agree(ends.split(x), split)
    agree(ends.join(split, added), joined)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "silu"])
def test_gates_are_cut_at_the_bound_of_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, act: str, paired: bool
) -> None:
    """Which is that of a row's gates alone; where there is a NaN, there is no bound."""
    gate = Gate(SparseActivation(ACTIVATIONS[act], 0.8), paired=paired)
    inner = some(TOKENS, 2 * 70, seed=1, dtype=dtype) + 0.5
    inner[1, 2] = torch.nan
    theirs = gate(inner)
    in_kernels(monkeypatch)
    ours = gate(inner)
    assert torch.equal(ours.isnan(), theirs.isnan()) and ours[1].isnan().all()
    agree(ours[::2], theirs[::2])
    zeros = (ours[::2] == 0).float().mean()
    assert 0.7 < zeros < 0.9
    assert torch.equal(gate(inner[2:]), ours[2:])


def test_what_no_kernel_cuts_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    sparse = Gate(SparseActivation(functional.silu, 0.8))
    inner = some(TOKENS, 2 * 40, seed=1, dtype=torch.float32)
    others = [
        replace(sparse, scale=2.0),
        replace(sparse, limit=1.0),
        Gate(SparseActivation(torch.tanh, 0.8)),
    ]
    expected = [gate(inner) for gate in others]
    in_kernels(monkeypatch)
    assert sparse.cuts(40) and not any(gate.cuts(40) for gate in others)
    assert all(torch.equal(gate(inner), e) for gate, e in zip(others, expected, strict=True))
    assert not sparse.cuts(1 << 16)
    assert holds_streams(4, 8192) and not holds_streams(5, 8192)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layers_own_embeddings_are_opened(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """They lie beside those of other layers."""
    act = ACTIVATIONS["gelu_pytorch_tanh"]
    gate = some(TOKENS, 24, seed=1, dtype=dtype)
    own = some(TOKENS, 5, 24, seed=2, dtype=dtype).transpose(0, 1)[3]
    expected = open_own(gate, own, act)
    assert torch.equal(expected, act(gate) * own)
    in_kernels(monkeypatch)
    agree(open_own(gate, own, act), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("width", [24, 80])
def test_what_gates_let_through_is_multiplied_at_once(
    monkeypatch: pytest.MonkeyPatch, width: int, tokens: int, dtype: torch.dtype
) -> None:
    """By tiles for few tokens and for many; as by two launches, which other matrices have."""
    monkeypatch.setattr(per_layer_inputs, "_DEPTH", 32)
    gate = Linear(some(width, HIDDEN, seed=1, dtype=dtype) / 6)
    up = Linear(some(100, width, seed=2, dtype=dtype) / 6)
    layer = PerLayerInput(gate, ACTIVATIONS["gelu_pytorch_tanh"], up, norm_of(1, dtype))
    x = some(tokens, HIDDEN, seed=3, dtype=dtype)
    own = some(tokens, 5, width, seed=4, dtype=dtype).transpose(0, 1)[3]
    expected, launched = layer(x, own), []
    in_kernels(monkeypatch)
    multiply = per_layer_inputs.multiply_opened

    def note(*given: Any) -> torch.Tensor:
        launched.append(len(given[0]))
        return multiply(*given)

    monkeypatch.setattr(per_layer_inputs, "multiply_opened", note)
    agree(layer(x, own), expected)
    up.invariant = True
    agree(layer(x, own), expected)
    assert launched == [tokens]
