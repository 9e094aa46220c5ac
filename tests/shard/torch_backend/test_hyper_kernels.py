"""The kernels of hyper-connections, against the same in torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.shard.torch_backend.experts_support import some_experts
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.decoder import HyperSpec, NormKind
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.streams.hyper_connections import (
    HyperConnection,
    HyperEnds,
    HyperStates,
)
from tgi_trio.shard.torch_backend.layers.streams.hyper_weights import HyperWeights

need_triton()

from tgi_trio.shard.torch_backend.kernels.streams import hyper_connections as kernels  # noqa: E402
from tgi_trio.shard.torch_backend.layers.streams import hyper_kernels  # noqa: E402

HIDDEN = 40


def connection(count: int, iterations: int) -> HyperConnection:
    spec = HyperSpec(count, iterations, eps=1e-6, added=1.5, added_eps=1e-3)
    weights, kinds = 2 * count, 2
    if iterations:
        weights, kinds = weights + count * count, 3
    draw = torch.Generator().manual_seed(count)
    mix = torch.randn(weights, count * HIDDEN, generator=draw).to(DEVICE)
    base, scale = (torch.randn(size, generator=draw).to(DEVICE) for size in (weights, kinds))
    return HyperConnection(spec, HyperWeights(0.2 * mix, base, scale, 1e-6))


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("iterations", [0, 1, 20])
def test_what_is_read_and_its_weights_are_those_of_torch(count: int, iterations: int) -> None:
    own, streams = connection(count, iterations), some(5, count, HIDDEN)
    norm = Norm("rms", some(HIDDEN), None, 1e-6, HIDDEN)
    parts = hyper_kernels.mix(own.weights, streams)
    ours = hyper_kernels.read(own.spec, own.weights, streams, parts, norm)
    read, added, mixture = own.weigh(own.weights.of(streams))
    torch.testing.assert_close(ours[0], norm((read.unsqueeze(-1) * streams).sum(dim=1)))
    torch.testing.assert_close(ours[1], added)
    assert (ours[2] is None) == (mixture is None) == (iterations == 0)
    if ours[2] is not None and mixture is not None:
        torch.testing.assert_close(ours[2], mixture, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["rms_plus_one", "layer", None])
@pytest.mark.parametrize("tokens", [1, 17, 70])
def test_any_norm_follows_and_programs_share_the_numbers(
    monkeypatch: pytest.MonkeyPatch, kind: NormKind | None, tokens: int
) -> None:
    """Also for more tokens than few, whose programs have more of them."""
    monkeypatch.setattr(hyper_kernels, "_FEW", 4)
    own, streams = connection(4, 3), some(tokens, 4, HIDDEN)
    bias = some(HIDDEN) if kind == "layer" else None
    norm = None if kind is None else Norm(kind, some(HIDDEN), bias, 1e-6, HIDDEN)
    parts = hyper_kernels.mix(own.weights, streams)
    found, added, _ = hyper_kernels.read(own.spec, own.weights, streams, parts, norm)
    read, expected, _ = own.weigh(own.weights.of(streams))
    summed = (read.unsqueeze(-1) * streams).sum(dim=1)
    torch.testing.assert_close(found, summed if norm is None else norm(summed))
    torch.testing.assert_close(added, expected)


@pytest.mark.parametrize("iterations", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [6, 70])
def test_states_get_of_each_other_and_of_the_result(
    monkeypatch: pytest.MonkeyPatch, iterations: int, dtype: torch.dtype, tokens: int
) -> None:
    """And are multiplied for the weights that follow, as they are by themselves."""
    monkeypatch.setattr(hyper_kernels, "_FEW", 4)
    own, later = connection(3, iterations), connection(3, 1)
    states = HyperStates(some(tokens, 3, HIDDEN, dtype=dtype))
    found = some(tokens, HIDDEN, dtype=dtype)
    _, added, mixture = own.weigh(own.weights.of(states.streams))
    left, mixed = hyper_kernels.write(states.streams, found, added, mixture, later.weights)
    near = 3e-2 if dtype is torch.bfloat16 else 1e-5
    expected = own.leave(states, found, added, mixture, later.weights).streams
    torch.testing.assert_close(left, expected, rtol=near, atol=near)
    assert mixed is not None
    summed, apart = (part.sum(dim=1) for part in (mixed, hyper_kernels.mix(later.weights, left)))
    torch.testing.assert_close(summed, apart, rtol=1e-4, atol=1e-4)
    alone, nothing = hyper_kernels.write(states.streams, found, added, mixture, None)
    assert torch.equal(alone, left) and nothing is None


@pytest.mark.parametrize("kind", ["shared and gates", "beside", "alone"])
@pytest.mark.parametrize("tokens", [3, 70])
def test_experts_are_summed_where_states_get_of_them(
    monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int
) -> None:
    """By the same numbers as in a launch of their own."""
    monkeypatch.setattr(hyper_kernels, "_FEW", 4)
    own, streams = connection(3, 2), some(tokens, 3, HIDDEN, dtype=torch.bfloat16)
    found = some_experts(tokens, HIDDEN, kind)
    _, added, mixture = own.weigh(own.weights.of(streams))
    apart, together = (
        hyper_kernels.write(streams, each, added, mixture, own.weights)
        for each in (found.combine(), found)
    )
    assert torch.equal(apart[0], together[0])
    assert apart[1] is not None and together[1] is not None
    assert torch.equal(apart[1], together[1])


def test_states_are_joined_at_the_end() -> None:
    own, streams = connection(4, 0), some(9, 4, HIDDEN)
    first = HyperWeights(own.weights.mix[:4], own.weights.base[:4], own.weights.scale[:1], 1e-6)
    ends = HyperEnds(own.spec, first)
    mixed = hyper_kernels.mix(first, streams)
    joined = ends.join(HyperStates(streams, mixed))
    torch.testing.assert_close(joined, ends.join(HyperStates(streams)))


def test_any_number_of_shares_is_read_by_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is compiled once, while the shares follow from the number of tokens."""
    own, compiled, shares = connection(4, 1), list[dict[str, Any]](), list[int]()
    launch = kernels.read_streams

    class Noted:
        def __getitem__(self, grid: Any) -> Any:
            def run(*args: Any, **constants: Any) -> None:
                compiled.append(constants)
                shares.append(args[-1])
                launch[grid](*args, **constants)

            return run

    monkeypatch.setattr(kernels, "read_streams", Noted())
    for programs in (1, 2):
        monkeypatch.setattr(hyper_kernels, "_PROGRAMS", programs)
        streams = some(2, 4, HIDDEN)
        parts = hyper_kernels.mix(own.weights, streams)
        hyper_kernels.read(own.spec, own.weights, streams, parts)
    assert shares == [1, 2] and compiled[0] == compiled[1]


@pytest.mark.parametrize(("tiles", "steps", "shares"), [(1, 256, 64), (1, 3, 2), (9, 99, 32)])
def test_shares_are_as_many_as_there_is_work_for(tiles: int, steps: int, shares: int) -> None:
    assert hyper_kernels.count_shares(tiles, steps) == shares
    assert hyper_kernels.count_shares(5000, steps) == 1
