"""Frequencies that depend on a sequence's length: torch's are those of the CPU kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tgi_trio.model.specs.decoder import RotaryKind, RotarySpec
from tgi_trio.shard.positions.rotary_frequencies import compute_frequencies
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary, RotaryTable

DIM, LIMIT = 16, 40
LONG: dict[str, Any] = {
    "short_factor": [1.0 + 0.1 * i for i in range(DIM // 2)],
    "long_factor": [2.0 + 0.3 * i for i in range(DIM // 2)],
    "original_max_position_embeddings": LIMIT,
    "attention_factor": 1.0,
}
KINDS: dict[RotaryKind, dict[str, Any]] = {"dynamic": {"factor": 4.0}, "longrope": LONG}
LENGTHS = torch.tensor([LIMIT - 10, 3 * LIMIT])
POSITIONS = torch.tensor([7, 70])


def spec_of(kind: RotaryKind) -> RotarySpec:
    return RotarySpec(dim=DIM, kind=kind, max_positions=LIMIT, parameters=KINDS[kind])


def turn(spec: RotarySpec, factors: torch.Tensor | None = None) -> RotaryTable:
    return Rotary(spec, torch.device("cpu"), factors).table(POSITIONS, LENGTHS, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backwards", [False, True])
def test_direction_is_kept_at_every_length(kind: RotaryKind, backwards: bool) -> None:
    spec = replace(spec_of(kind), backwards=backwards)
    frequencies, _ = compute_frequencies(spec, LENGTHS.numpy())
    sines = np.sin(POSITIONS.numpy()[:, None] * frequencies)
    np.testing.assert_allclose(turn(spec).sin[:, 0, DIM // 2 :].numpy(), sines, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_learned_factors_count_at_every_length(kind: RotaryKind) -> None:
    """Twice the frequencies are those at twice the position."""
    spec = replace(spec_of(kind), learned=True)
    doubled, plain = turn(spec, torch.full((DIM // 2,), 2.0)), turn(spec)
    angles = [
        torch.atan2(each.sin[:, 0, DIM // 2 :], each.cos[:, 0, DIM // 2 :])
        for each in (doubled, plain)
    ]
    torch.testing.assert_close(angles[0].sin(), (2 * angles[1]).sin(), atol=1e-4, rtol=0)
