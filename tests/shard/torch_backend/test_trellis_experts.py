"""Experts whose matrices stay EXL3's, against those of the weights that they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.shard.checkpoint.quantised_cases import Case, open_matrix
from tests.shard.torch_backend.interpreter import DEVICE, need_triton, sum_in_order
from tests.support.exl3 import EXL3, store_exl3
from tgi_trio.model.specs.decoder import ExpertsSpec
from tgi_trio.shard.checkpoint.formats.exl3 import read_rings
from tgi_trio.shard.torch_backend.layers import mlp as layers_mlp
from tgi_trio.shard.torch_backend.layers.activation import ACTIVATIONS
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.mlp import DenseMlp, ExpertsMlp

need_triton()

from tests.shard.torch_backend.test_coded_experts import check, some  # noqa: E402  (Triton's)
from tgi_trio.shard.torch_backend.kernels.experts.grouped_trellis import turn_groups  # noqa: E402
from tgi_trio.shard.torch_backend.layers.experts import grouped_trellis  # noqa: E402
from tgi_trio.shard.torch_backend.layers.experts.grouped_trellis import TrellisMatrices  # noqa: E402
from tgi_trio.shard.torch_backend.layers.linears.stored_trellis import (  # noqa: E402
    Trellis,
    encode_rings,
)
from tgi_trio.shard.torch_backend.layers.linears.trellis_linear import TrellisLinear  # noqa: E402

HIDDEN, WIDTH, COUNT = 200, 128, 4  # what goes in and comes out is padded
SPEC = ExpertsSpec(width=WIDTH, count=COUNT, per_token=2, normalise=True)
SILU = Gate(functional.silu)
LIMITED = Gate(functional.silu, 0.7)
KINDS = ("3 mcg", "4 mcg")
BOUNDED = Gate(functional.silu, 0.7, raised=False, bounds_opened=True)
PAIRED = Gate(ACTIVATIONS["quick_gelu"], 0.7, paired=True)


class Counting:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self._kernel[grid]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_mlp, "runs_kernels", lambda device: True)


def matrix(
    folder: Path, outputs: int, inputs: int, bits: float, book: str, seed: int, alike: int | None
) -> tuple[Trellis, torch.Tensor]:
    """Return a matrix of any rings, and its weights as the CPU reads them."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    like = np.full((outputs, inputs), 1.0, np.float32)
    like[0] = 2.0
    tensors, _ = store_exl3(bits, book)("a", like)
    words = draw.integers(-(1 << 15), 1 << 15, tensors["a.trellis"].shape).astype(np.int16)
    tensors["a.trellis"] = torch.from_numpy(words)
    if alike is not None:
        draw = np.random.default_rng(alike)
    for name, most in (("suh", 1.0), ("svh", inputs**-0.5)):
        own = draw.uniform(-most, most, tensors[f"a.{name}"].shape).astype(np.float16)
        tensors[f"a.{name}"] = torch.from_numpy(own)
    stored = open_matrix(folder, Case(EXL3, tensors, like, int(np.ceil(bits)), 128))
    rings = read_rings(stored)
    assert rings is not None
    return encode_rings(rings, stored.shape), torch.from_numpy(stored.dequantised())


def both(
    folder: Path, outputs: tuple[int, ...], inputs: int, dtype: torch.dtype, seed: int, kind: str
) -> tuple[Linear, Linear]:
    """Return a linear of matrices one below the other, and one of their weights in float32."""
    bits, book = (float(kind.split()[0]), kind.split()[1])
    alike = 10 * seed if "alike" in kind else None  # of scales
    made = [
        matrix(folder / f"{seed} {i}", count, inputs, bits, book, 10 * seed + i, alike)
        for i, count in enumerate(outputs)
    ]
    bias = some(sum(outputs), seed=seed, dtype=dtype) if "biased" in kind else None
    parts = [part for part, _ in made]
    ours = TrellisLinear(parts, bias, dtype, torch.device(DEVICE))
    weight = torch.cat([weight for _, weight in made])
    return ours, Linear(weight.to(DEVICE), None if bias is None else bias.float())


def mixtures(
    folder: Path, kind: str, gate: Gate, dtype: torch.dtype, width: int = WIDTH
) -> tuple[ExpertsMlp, ExpertsMlp]:
    made: tuple[list[DenseMlp], list[DenseMlp]] = ([], [])
    for i in range(COUNT):
        up = both(folder, (width, width), HIDDEN, dtype, 2 * i, kind)
        down = both(folder, (HIDDEN,), width, dtype, 2 * i + 1, kind)
        for where, one, other in zip(made, up, down, strict=True):
            where.append(DenseMlp(one, other, gate))
    router = some(COUNT, HIDDEN, seed=77)
    ours, theirs = (
        ExpertsMlp(replace(SPEC, width=width), router=Linear(router), experts=every)
        for every in made
    )
    return ours, theirs


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "gate"),
    [
        ("3 3inst", SILU),
        ("6 mcg biased", LIMITED),
        ("2.5 mul1", PAIRED),
        ("4 mcg alike", SILU),
    ],
)
@pytest.mark.parametrize("rows", [1, 21])
def test_experts_of_a_width(tmp_path: Path, kind: str, gate: Gate, rows: int) -> None:
    """Gates and ups of an expert scale their inputs in two ways, or in one."""
    mixed = mixtures(tmp_path, kind, gate, torch.float32)
    check(*mixed, some(rows, HIDDEN, seed=8), 1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [2, 90])
def test_half_precision(tmp_path: Path, rows: int) -> None:
    """Few rows and tiles of many."""
    mixed = mixtures(tmp_path, "3 mcg", SILU, torch.bfloat16)
    check(*mixed, some(rows, HIDDEN, seed=9, dtype=torch.bfloat16), 0.03)


@pytest.mark.parametrize(
    ("kind", "gate", "width"),
    [
        ("3 mcg", SILU, 64),
        ("2.5 mul1 biased", LIMITED, 200),
        ("4 mcg alike", SILU, 130),
        ("3 mcg biased", BOUNDED, 72),  # whose gates are opened behind the product
    ],
)
def test_gates_whose_number_128_does_not_divide(
    tmp_path: Path, kind: str, gate: Gate, width: int
) -> None:
    """Gates and ups are padded to whole blocks each, as the file has them."""
    mixed = mixtures(tmp_path, kind, gate, torch.float32, width)
    check(*mixed, some(5, HIDDEN, seed=8), 1e-5)


def test_gates_and_ups_that_are_not_alike_are_apart(tmp_path: Path) -> None:
    """No launch has both: they are of several widths, or one is plain."""
    ours, _ = mixtures(tmp_path, "3 mcg", SILU, torch.float32, width=64)
    for i, each in enumerate(ours.experts):
        gates, _ = matrix(tmp_path / f"gates {i}", 64, HIDDEN, 3, "mcg", i, None)
        ups, weight = matrix(tmp_path / f"ups {i}", 64, HIDDEN, 4, "mcg", i, None)
        parts: list[Any] = [gates, ups if i else weight.to(DEVICE)]
        each.up = TrellisLinear(parts, None, torch.float32, torch.device(DEVICE))
    assert not ours.group()


@pytest.mark.parametrize("width", [128, 200])
def test_what_is_turned_for_the_next_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """By the programs that find it is to the bit what a launch of its own would turn."""
    sum_in_order(monkeypatch)
    ours, _ = mixtures(tmp_path, "3 mcg", SILU, torch.bfloat16, width)
    assert ours.group()
    x = some(9, HIDDEN, seed=9, dtype=torch.bfloat16)
    turned = Counting(turn_groups)
    monkeypatch.setattr(grouped_trellis, "turn_groups", turned)
    found = ours(x)
    assert turned.launches == 1
    monkeypatch.setattr(TrellisMatrices, "feeds", lambda *_: False)
    torch.testing.assert_close(ours(x), found, atol=0, rtol=0)
    assert turned.launches == 1 + 2


def test_experts_that_are_not_stored_alike_are_apart(tmp_path: Path) -> None:
    first, other = (mixtures(tmp_path / kind, kind, SILU, torch.float32)[0] for kind in KINDS)
    first.experts[1] = other.experts[1]
    assert not first.group()


def test_tokens_alone_and_among_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, though other tokens have the same experts."""
    sum_in_order(monkeypatch)
    ours, _ = mixtures(tmp_path, "3 mcg", SILU, torch.float32)
    assert ours.group()
    x = some(9, HIDDEN, seed=9)
    every = ours(x)
    for part in (slice(0, 1), slice(4, 7)):
        torch.testing.assert_close(ours(x[part]), every[part], atol=0, rtol=0)
