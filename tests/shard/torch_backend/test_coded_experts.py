"""Experts whose matrices stay codes, against those of the numbers that the codes stand for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.decoder import ExpertsSpec
from tgi_trio.shard.torch_backend.layers import mlp as layers_mlp
from tgi_trio.shard.torch_backend.layers.activation import ACTIVATIONS
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, ExpertsMlp

need_triton()

from tests.shard.torch_backend.test_coded_products import (  # noqa: E402
    coded,
    numbers_of,
    some_parts,
)
from tgi_trio.shard.torch_backend.layers.linears.coded_linear import CodedLinear  # noqa: E402

HIDDEN, WIDTH, COUNT = 96, 64, 4
SPEC = ExpertsSpec(width=WIDTH, count=COUNT, per_token=2, normalise=True)
GATES = {
    "halves": Gate(functional.silu),
    "limited pairs": Gate(ACTIVATIONS["quick_gelu"], 0.7, paired=True),
    "learned": Gate(ACTIVATIONS["gelu_pytorch_tanh"], 0.0, scale=2.0),  # no kernel has it
}


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def both(
    kind: str, heads: str, outputs: int, inputs: int, seed: int, biased: bool, dtype: torch.dtype
) -> tuple[Linear, Linear]:
    """Return a linear of codes and one of their numbers in float32."""
    parts = some_parts(kind, outputs, inputs, 16, heads, seed)
    if kind == "t4":  # a format's
        parts = replace(parts, table=np.linspace(-1, 1, 16, dtype=np.float32))
    bias = some(outputs, seed=seed, dtype=dtype) if biased else None
    plain = torch.from_numpy(numbers_of(parts)).float().to(DEVICE)
    return (
        CodedLinear([coded(parts)], bias, dtype, torch.device(DEVICE)),
        Linear(plain, None if bias is None else bias.float()),
    )


def mixtures(
    kinds: list[str],
    heads: list[str],
    gate: Gate,
    dtype: torch.dtype,
    *,
    biased: bool = False,
    shared: bool = False,
    inputs: bool = False,
) -> tuple[ExpertsMlp, ExpertsMlp]:
    """Return a mixture of codes, one of their numbers; each expert is of the next kind and sort.

    `inputs`: weights multiply what goes into experts.
    """
    made: tuple[list[DenseMlp], list[DenseMlp]] = ([], [])
    for i in range(COUNT + shared):
        kind, head = kinds[i % len(kinds)], heads[i % len(heads)]
        up = both(kind, head, 2 * WIDTH, HIDDEN, 2 * i, biased, dtype)
        down = both(kind, head, HIDDEN, WIDTH, 2 * i + 1, biased, dtype)
        for where, one, other in zip(made, up, down, strict=True):
            where.append(DenseMlp(one, other, gate))
    router = some(COUNT, HIDDEN, seed=77)
    ours, theirs = (
        ExpertsMlp(
            replace(SPEC, weighs_inputs=inputs),
            router=Linear(router),
            experts=every[:COUNT],
            shared=every[COUNT] if shared else None,
            shared_router=Linear(some(1, HIDDEN, seed=78, dtype=own)) if shared else None,
        )
        for every, own in zip(made, (dtype, torch.float32), strict=True)
    )
    return ours, theirs


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_mlp, "runs_kernels", lambda device: True)


def check(ours: ExpertsMlp, theirs: ExpertsMlp, x: torch.Tensor, tolerance: float) -> None:
    taken = ours.nbytes()
    expected = theirs(x.float())
    assert ours.group() and ours.nbytes() == taken and not ours.experts
    found = ours(x).float()
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=tolerance * largest, rtol=0.0)


@pytest.mark.parametrize(
    ("kind", "heads", "gate"),
    [
        ("u4", "zeros", "halves"),
        ("t4", "wide scales", "limited pairs"),
        ("u6", "constant", "learned"),
        ("u2", "nested lows", "halves"),
        ("u5", "lows", "limited pairs"),
        ("i8", "nested", "halves"),
        ("e4m3", "scales", "halves"),
    ],
)
def test_every_kind_of_codes(kind: str, heads: str, gate: str) -> None:
    biased = gate == "limited pairs"
    mixed = mixtures([kind], [heads], GATES[gate], torch.float32, biased=biased)
    check(*mixed, some(2, HIDDEN, seed=8), 1e-5)


def test_weights_of_inputs() -> None:
    mixed = mixtures(["u4"], ["zeros"], GATES["halves"], torch.float32, shared=True, inputs=True)
    check(*mixed, some(9, HIDDEN, seed=8), 1e-5)


def test_an_expert_of_every_token_is_computed_beside_them() -> None:
    mixed = mixtures(["u4"], ["zeros"], GATES["halves"], torch.float32, shared=True)
    check(*mixed, some(2, HIDDEN, seed=9), 1e-5)
    assert mixed[0].shared is not None


def test_many_tokens_fill_tiles_of_many_rows() -> None:
    """In half precision; numbers of four bytes have small tiles alone."""
    mixed = mixtures(["u4"], ["constant"], GATES["halves"], torch.bfloat16)
    check(*mixed, some(90, HIDDEN, seed=9, dtype=torch.bfloat16), 0.03)


def test_scales_that_need_float32_in_one_expert_have_it_in_all() -> None:
    mixed = mixtures(["u4"], ["scales", "wide scales"], GATES["halves"], torch.float32)
    check(*mixed, some(2, HIDDEN, seed=8), 1e-5)


@pytest.mark.parametrize(
    ("kinds", "heads"), [(["u4", "u6"], ["scales"]), (["u4"], ["zeros", "lows"])]
)
def test_what_is_stored_in_several_ways_is_not_grouped(kinds: list[str], heads: list[str]) -> None:
    """And says the same one by one."""
    ours, theirs = mixtures(kinds, heads, GATES["halves"], torch.float32)
    assert not ours.group() and len(ours.experts) == COUNT
    x = some(2, HIDDEN, seed=8)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-4)
