"""Kernels between the products of gated hidden states, against torch's operations."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.experts_support import some_experts
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.shard.torch_backend.layers import norm_gate, opening, residual
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.norm_gate import NormGate
from tgi_trio.shard.torch_backend.layers.residual import Addends
from tgi_trio.shard.torch_backend.layers.streams import gated_streams
from tgi_trio.shard.torch_backend.layers.streams.gated_streams import (
    LayerOutput,
    StreamGates,
    StreamNorm,
)

need_triton()

TOKENS, COUNT, HIDDEN, RANK = 3, 3, 40, 24
DTYPES = (torch.float32, torch.bfloat16)


def some(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def gates_of(dtype: torch.dtype, *, adds: bool = True) -> StreamGates:
    norm = StreamNorm("rms_plus_one", some(COUNT * HIDDEN, seed=1, dtype=dtype), 1e-5, COUNT)
    inner = some(RANK + COUNT * adds, COUNT * HIDDEN, seed=2, dtype=dtype)
    outer = some(COUNT * HIDDEN, RANK, seed=3, dtype=dtype)
    return StreamGates(COUNT, RANK, norm, Linear(inner), Linear(outer))


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Sums are in another order, so a last bit may differ, which products pass on."""
    assert ours.dtype is theirs.dtype
    tolerance = 1e-5 if ours.dtype is torch.float32 else 2.0**-5
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_what_is_read_is_what_torch_finds(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, adds: bool, joined: bool
) -> None:
    """Behind a part that said something, or at the beginning; the last one adds nothing more.

    Gates are multiplied where they are opened, or by themselves.
    """
    gates = gates_of(dtype, adds=adds)
    streams = some(TOKENS, COUNT * HIDDEN, seed=4, dtype=dtype)
    factors = some(TOKENS, RANK + COUNT, seed=6, dtype=dtype)[:, RANK:]  # part of a projection
    addends = [None, LayerOutput(some(TOKENS, HIDDEN, seed=5, dtype=dtype), factors)]
    for addend in addends:
        theirs = gates.read(streams, addend)
        with monkeypatch.context() as patch:
            patch.setattr(gated_streams, "runs_kernels", lambda device: True)
            patch.setattr(gated_streams, "_BLOCK", 16)
            patch.setattr(opening, "runs_kernels", lambda device: joined)
            ours = gates.read(streams, addend)
            summed = gated_streams.add_said(streams, addend, COUNT)
        for mine, wanted in zip(ours, theirs, strict=True):
            agree(mine, wanted)
        assert torch.equal(summed, ours.streams)
        torch.testing.assert_close(ours.streams, theirs.streams, atol=0.0, rtol=2.0**-7)
        assert theirs.factors.shape == (TOKENS, COUNT * adds)


@pytest.mark.parametrize("tokens", [3, 20])
def test_experts_are_summed_where_states_get_of_them(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """By the same numbers as in a launch of their own: for each state, or once for all of many."""
    monkeypatch.setattr(gated_streams, "runs_kernels", lambda device: True)
    monkeypatch.setattr(gated_streams, "_FEW", 4)
    gates = gates_of(torch.bfloat16)
    streams = some(tokens, COUNT * HIDDEN, seed=4, dtype=torch.bfloat16)
    factors = some(tokens, COUNT, seed=6, dtype=torch.bfloat16)
    parts = some_experts(tokens, HIDDEN, "shared and gates")
    apart, together = (
        gates.read(streams, LayerOutput(each, factors)) for each in (parts.combine(), parts)
    )
    assert all(map(torch.equal, apart, together))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 300])  # one for each tile
def test_gates_behind_norms_are_opened_as_torch_opens_them(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tokens: int
) -> None:
    down, up = (some(*shape, seed=7, dtype=dtype) for shape in ((RANK, 70), (70, RANK)))
    gate, normed = NormGate(Linear(down / 8), Linear(up)), some(tokens, 70, seed=8, dtype=dtype)
    theirs = gate(normed)
    monkeypatch.setattr(opening, "runs_kernels", lambda device: True)
    agree(gate(normed), theirs)


def gate_of(rank: int, size: int, dtype: torch.dtype) -> NormGate:
    down, up = (some(*shape, seed=7, dtype=dtype) for shape in ((rank, size), (size, rank)))
    return NormGate(Linear(down / 8), Linear(up))


def count_opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have kernels run; return a list that gets the tokens of each launch that opens norms."""
    for module in (opening, residual):
        monkeypatch.setattr(module, "runs_kernels", lambda device: True)
    launched, own = list[int](), NormGate._launch

    def launch(gate: NormGate, x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        launched.append(len(x))
        return own(gate, x, *given)

    monkeypatch.setattr(NormGate, "_launch", launch)
    return launched


@pytest.mark.parametrize("tokens", [1, 2, 7])  # of a tile of one token, and of two of four
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*product(("nothing", "a sum"), DTYPES), ("experts", torch.bfloat16)],
    ids=str,
)
def test_sums_are_normalised_and_opened_at_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int, dtype: torch.dtype
) -> None:
    """By blocks of numbers, the last of which is not whole."""
    x, more = (some(tokens, HIDDEN + 5, seed=seed, dtype=dtype) for seed in (8, 9))
    norm = Norm("rms", some(HIDDEN + 5, seed=10, dtype=dtype), None, 1e-5, HIDDEN + 5)
    first = some_experts(tokens, HIDDEN + 5, "shared") if kind == "experts" else more
    addends = None if kind == "nothing" else Addends(first)
    gate = gate_of(RANK, HIDDEN + 5, dtype)
    for name, of in (("_LONE", 1), ("_SOME", 4)):
        monkeypatch.setattr(norm_gate, name, norm_gate.OpenedTile(of, 32, 2))
    monkeypatch.setattr(norm_gate, "_LONE_TOKENS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(residual, "runs_kernels", lambda device: kind == "experts")
        summed, normed = residual.add_and_normalise(x, addends, norm)
        theirs = gate(normed)
    launched = count_opened(monkeypatch)
    ours = gate.add_and_open(x, addends, norm)
    assert launched == [tokens]
    torch.testing.assert_close(ours[0], summed, atol=0.0, rtol=2.0**-7)
    agree(ours[1], theirs)


def test_of_many_tokens_and_wide_gates_norms_are_opened_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(norm_gate, "MOST_TOKENS", 3)
    monkeypatch.setattr(norm_gate, "_MOST_BYTES", 2 * 16 * HIDDEN * 4)
    launched, norm = (
        count_opened(monkeypatch),
        Norm("rms", torch.ones(HIDDEN, device=DEVICE), None, 1e-5, HIDDEN),
    )
    for rank, tokens in ((16, 3), (16, 4), (17, 3)):
        x = some(tokens, HIDDEN, seed=8, dtype=torch.float32)
        gate = gate_of(rank, HIDDEN, torch.float32)
        agree(gate.add_and_open(x, None, norm)[1], gate(norm(x)))
    assert launched == [3]
