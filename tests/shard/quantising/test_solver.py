"""GPTQ of one matrix: codes that lose less of its outputs than the nearest ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.quantised import Rounded, pack_gptq
from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.quantising.output import pack, unpack
from tgi_trio.shard.quantising.solver import ZERO, Gram, Solved, solve


def correlated(tokens: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Return inputs of which a few directions have most."""
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(inputs, inputs, generator=draw) * torch.logspace(0, -2, inputs)[:, None]
    return torch.randn(tokens, inputs, generator=draw) @ mixed


def gram_of(x: torch.Tensor) -> torch.Tensor:
    gram = Gram()
    for piece in x.split(50):
        gram.add(piece)
    assert gram.tokens == len(x)
    torch.testing.assert_close(gram.mean(x.shape[1]), x.T @ x / len(x))
    return gram.mean(x.shape[1])


def weights(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(9))


def nearest(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Return what independent inputs leave nothing to correct in."""
    solved = solve(weight, torch.eye(weight.shape[1]), group=group, damping=0, by_activation=False)
    return solved.weight()


def test_independent_inputs_are_rounded_to_the_nearest() -> None:
    weight = weights(16, 96)
    found = solve(weight, torch.eye(96), group=32, damping=0.01, by_activation=False)
    runs = weight.view(16, 3, 32)
    assert torch.equal(found.scales, (runs.abs().amax(2) * (2 / 15)).half())
    exact = runs / found.scales.float()[..., None]
    assert torch.equal(found.codes.view(16, 3, 32).float(), (exact.round() + ZERO).clamp(0, 15))


@pytest.mark.parametrize("by_activation", [False, True])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_outputs_are_nearer_than_those_of_the_nearest_codes(
    group: int, by_activation: bool
) -> None:
    x, weight = correlated(400, 256), weights(48, 256)
    solved = solve(weight, gram_of(x), group=group, damping=0.01, by_activation=by_activation)
    error = (x @ (solved.weight() - weight).T).norm()
    assert error < 0.7 * (x @ (nearest(weight, group) - weight).T).norm()
    counts = torch.bincount(solved.groups)
    assert counts.tolist() == ([256] if group == -1 else [group] * (256 // group))
    assert torch.equal(solved.groups, torch.arange(256) // counts[0]) != by_activation or group < 0


def test_few_tokens_and_idle_inputs_are_enough() -> None:
    """The products are singular: damping grows until there is an inverse."""
    x = correlated(3, 64)
    x[:, 5] = 0
    solved = solve(weights(32, 64), gram_of(x), group=32, damping=0.0, by_activation=True)
    assert solved.weight().isfinite().all()
    assert (solved.weight()[:, 5] == 0).all()
    never = Gram().mean(64)
    assert torch.equal(never, torch.eye(64))  # an expert that nobody chose


def test_inputs_that_are_no_numbers_end_it() -> None:
    gram = gram_of(correlated(40, 64))
    gram[3, 3] = float("nan")
    with pytest.raises(ModelLoadError, match="computes what is no number"):
        solve(weights(32, 64), gram, group=32, damping=0.01, by_activation=False)


def test_what_is_packed_is_what_others_pack() -> None:
    draw = np.random.default_rng(0)
    groups = draw.permutation(np.arange(64) // 32)
    codes = draw.integers(0, 16, (16, 64))
    scales = draw.uniform(0.1, 1, (16, 2)).astype(np.float16)
    rounded = Rounded(codes, np.full((16, 2), ZERO), scales, groups)
    solved = Solved(
        torch.from_numpy(codes.astype(np.uint8)),
        torch.from_numpy(scales),
        torch.from_numpy(groups.astype(np.int32)),
    )
    packed = {f"m.{name}": tensor for name, tensor in pack(solved).items()}
    expected = pack_gptq("m", rounded, 4)
    assert packed.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(packed[name], tensor), name
    again = unpack(packed, "m")
    assert torch.equal(again.codes, solved.codes)
    np.testing.assert_array_equal(again.weight().numpy(), rounded.weight)
