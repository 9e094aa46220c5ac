"""Programs of a lone row's products with another share of a matrix: the same numbers, if chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.model.specs.decoder import RotarySpec
from tgi_trio.shard.torch_backend.attention.interface import HeadPlaces
from tgi_trio.shard.torch_backend.attention.paged.few_heads import HeadProjection, choose_pairs
from tgi_trio.shard.torch_backend.layers.attention.heads import HeadSteps
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary
from tgi_trio.shard.torch_backend.layers.gating import Gate
from tgi_trio.shard.torch_backend.layers.linears import few_rows, lone_shares
from tgi_trio.shard.torch_backend.layers.linears.few_rows import FewTile, choose_few_tile, project
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.layers.linears.lone_shares import choose_shares, give_shares
from tgi_trio.shard.torch_backend.layers.norm import Norm
from tgi_trio.shard.torch_backend.layers.residual import Addends

need_triton()

BF16 = torch.bfloat16
RANDOM = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=RANDOM).to(DEVICE, BF16)


def linear(outputs: int, inputs: int, fused: int = 1) -> Linear:
    own = Linear(numbers(outputs, inputs))
    own.fused = frozenset({fused})
    return own


def test_a_program_has_twice_as_many_outputs_of_short_rows_and_half_as_many_of_long_ones() -> None:
    def tiles(inputs: int, *, gated: bool = False) -> tuple[FewTile, FewTile]:
        usual = choose_few_tile(inputs, 1, gated=gated)
        return usual, choose_few_tile(inputs, 1, gated=gated, other=True)

    assert tiles(2048) == ((4, 4), (8, 2))
    assert tiles(2048, gated=True) == ((2, 4), (4, 2))
    assert tiles(4096) == ((2, 4), (4, 2))
    assert tiles(8192) == ((2, 2), (1, 3))
    assert tiles(8192, gated=True) == ((1, 2), (1, 2))  # there is nothing between
    assert tiles(14336) == ((1, 2), (1, 2))
    sizes = (1024, 2048, 4096, 8192, 14336)
    pairs = [(choose_pairs(n, 128), choose_pairs(n, 128, other=True)) for n in sizes]
    assert pairs == [(4, 8), (2, 4), (2, 1), (2, 1), (1, 1)]
    assert choose_pairs(2048, 4, other=True) == 2  # a head has no more


@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"), [(37, 2048, False), (44, 1500, True), (9, 5000, False)]
)
def test_a_lone_row_finds_the_same_numbers(outputs: int, inputs: int, gated: bool) -> None:
    own, x, first = linear(outputs, inputs), numbers(1, inputs), numbers(1, inputs)
    norm = Norm("rms", numbers(inputs), None, 1e-5, inputs)
    act = Gate(functional.silu) if gated else None
    found = []
    for other in (False, True):
        give_shares([own], other=other)
        found.append(project(own, x, Addends(first), norm, act))
    for usual, ours in zip(*found, strict=True):
        assert torch.equal(usual, ours)


def test_two_rows_keep_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    own, x, others = linear(8, 64, fused=2), numbers(2, 64), list[bool]()
    choose = few_rows.choose_few_tile

    def note(inputs: int, rows: int, *, gated: bool, other: bool = False) -> FewTile:
        others.append(other)
        return choose(inputs, rows, gated=gated, other=other)

    monkeypatch.setattr(few_rows, "choose_few_tile", note)
    give_shares([own], other=True)
    project(own, x, Addends(x), None)
    own.fused = frozenset({1})
    project(own, x[:1], Addends(x[:1]), None)
    assert others == [False, True]


def test_heads_turn_alike() -> None:
    heads, kv_heads, dim, inputs = 2, 1, 64, 2048
    steps = HeadSteps(
        heads,
        kv_heads,
        dim,
        rotary=Rotary(RotarySpec(dim=dim, max_positions=64), torch.device(DEVICE)),
    )
    own = linear((heads + 2 * kv_heads) * dim, inputs)
    position = torch.tensor([5], device=DEVICE)
    assert steps.rotary is not None
    table = steps.rotary.table(position, position + 1, BF16)
    x, found = numbers(1, inputs), []
    for other in (False, True):
        give_shares([own], other=other)
        memory = torch.zeros(2, 3, kv_heads, dim, dtype=BF16, device=DEVICE)
        places = HeadPlaces(memory[0], memory[1], torch.tensor([1], device=DEVICE))
        query = HeadProjection(own, None, steps).project(x, None, table, places)[1]
        found.append((query, memory))
    assert all(torch.equal(usual, ours) for usual, ours in zip(*found, strict=True))


class Steps:
    """A step, and what it takes by the outputs of the matrices that have another share."""

    def __init__(self, linears: list[Linear], saved: dict[int, float], took: float = 1e-3) -> None:
        self.linears, self.saved, self.took = linears, saved, took
        self.seen: list[set[int]] = []

    def __call__(self) -> torch.Tensor:
        return torch.ones(1)

    def seconds(self, step: Callable[[], torch.Tensor]) -> float:
        step()
        self.seen.append({len(own.weight) for own in self.linears if own.other_share})
        return self.took * (1 - sum(self.saved.get(outputs, 0.0) for outputs in self.seen[-1]))


def test_what_takes_a_step_less_is_kept() -> None:
    """The smaller matrices are tried first; those that another kernel multiplies are not."""
    mine = [linear(outputs, 64) for outputs in (32, 8, 16, 8)]
    others = [linear(4, 64, fused=2), linear(2, 64, fused=16)]
    steps = Steps([*mine, *others], {8: 0.01, 16: 0.004, 32: 0.006})
    choose_shares([*mine, *others], steps, steps.seconds)
    assert steps.seen == [set(), {8}, {8, 16}, {8, 32}]
    assert [own.other_share for own in mine] == [True, True, False, True]
    assert not any(own.other_share for own in others)
    choose_shares(mine, steps := Steps(mine, {}), steps.seconds)  # another warm-up
    assert len(steps.seen) == 4 and not any(own.other_share for own in mine)
    choose_shares(others, steps := Steps(others, {}), steps.seconds)
    assert not steps.seen


@pytest.mark.parametrize(("took", "tried"), [(0.01, 2), (0.02, 1), (0.03, 0)])
def test_no_more_are_tried_than_there_is_time_for(took: float, tried: int) -> None:
    mine = [linear(outputs, 64) for outputs in (32, 8, 16)]
    steps = Steps(mine, {8: 0.1, 16: 0.1, 32: 0.1}, took)
    choose_shares(mine, steps, steps.seconds)
    assert sorted(len(own.weight) for own in mine if own.other_share) == [8, 16][:tried]


def test_a_share_that_finds_other_numbers_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    own = linear(8, 64)

    class Wrong(Steps):
        def __call__(self) -> torch.Tensor:
            return torch.full((1,), 2.0 if own.other_share else 1.0)

    steps = Wrong([own], {8: 0.5})
    choose_shares([own], steps, steps.seconds)
    assert not own.other_share and lone_shares._LEFT in capsys.readouterr().err
