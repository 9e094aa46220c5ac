"""Batch invariance where ranks divide layers, or a model's layers, over stand-in devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import GreedyRecorder

need_triton()

from tests.shard.torch_backend.invariant_support import (  # noqa: E402  (it imports Triton)
    small_parts,  # noqa: F401  (a fixture)
    start_invariant,
)
from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402
from tests.shard.torch_backend.test_batch_invariance import (  # noqa: E402
    CROWD,
    FEW,
)
from tests.shard.torch_backend.test_invariant_choices import FAMILIES  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(("llama", SMALL), ("deepseek_v3", SMALL)),
        pytest.param("deepseek_v4", FAMILIES["deepseek_v4"], marks=pytest.mark.thorough),
    ],
)
def test_two_ranks(checkpoint: Checkpoint, family: str, changes: dict[str, Any]) -> None:
    """What one of a library would add up is gathered (`test_distributed.py` has four of them)."""
    folder, recorder = checkpoint(family, **changes), GreedyRecorder()
    with (
        StandInDevice() as device,
        two_ranks(folder, device, sampler=recorder, batch_invariant=True) as (runner, steps),
    ):
        assert not CROWD.differing(runner, recorder)
        launched = Counter[str]()
        for counts in steps:
            launched.update(counts.launches)
    assert launched["all_gather"] and not launched["all_reduce"]


def test_two_stages(checkpoint: Checkpoint) -> None:
    """A stage computes what it is sent; it says what a device that has all layers says."""
    folder, recorder = checkpoint("llama", num_hidden_layers=2), GreedyRecorder()
    told: dict[str, Any] = {"batch_invariant": True, "pipeline_stages": 2}
    with StandInDevice() as device:
        expected = FEW.logits(*start_invariant(folder, device))
        with two_ranks(folder, device, sampler=recorder, **told) as (runner, steps):
            assert not FEW.differing(runner, recorder)
            found = FEW.logits(runner, recorder)
    assert any(counts.launches["send"] for counts in steps)
    assert all(map(torch.equal, found, expected))
