"""Rotary positions in the CPU kernels: tables by position, and those of long sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import generated, prompts, run, sequences
from tgi_trio.model.specs.decoder import RotaryKind, RotarySpec
from tgi_trio.shard.cpu_backend.rotary_tables import RotaryTables
from tgi_trio.shard.torch_backend.layers.attention.rotary import Rotary

PROMPTS = prompts(8)[2:]
LONG: dict[str, Any] = {
    "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.3 * i for i in range(16)],
    "original_max_position_embeddings": 40,
}
SHARPER = {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3}
KINDS: dict[RotaryKind, dict[str, Any]] = {
    "default": {},
    "dynamic": {"factor": 4.0},
    "longrope": LONG | {"short_mscale": 1.1, "long_mscale": 1.3},
}
LIMITS: dict[RotaryKind, int] = {"dynamic": 40, "longrope": 160}

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kinds", [["dynamic"], ["longrope", "default"]], ids=str)
def test_tables_are_those_of_torch(kinds: list[RotaryKind]) -> None:
    """Of short and long sequences in one step; layers may turn differently."""
    keys = [
        (
            RotarySpec(
                dim=32, kind=kind, max_positions=LIMITS.get(kind, 512), parameters=KINDS[kind]
            ),
            64,
        )
        for kind in kinds
    ]
    tables = RotaryTables(keys, 300, 7, whole=True)
    positions = np.array([0, 39, 40, 299, 12, 39, 7], np.int32)
    lengths = np.array([1, 40, 41, 300, 90, 50, 40], np.int32)
    turns = tables.turn_far(positions, lengths)
    assert turns is not None
    for rotary, head_dim in keys:
        held = tables.rows(rotary, head_dim)
        expected = Rotary(rotary, torch.device("cpu")).table(
            torch.from_numpy(positions).long(), torch.from_numpy(lengths).long(), torch.float32
        )
        for found, right in zip(held, expected[:2], strict=True):
            np.testing.assert_allclose(
                np.abs(found[turns]), right[:, 0, :16].abs().numpy(), atol=3e-5
            )


def test_what_is_short_turns_by_position() -> None:
    rotary = RotarySpec(dim=32, kind="dynamic", max_positions=40, parameters={"factor": 4.0})
    tables = RotaryTables([(rotary, 32)], 300, 7, whole=True)
    assert len(tables.rows(rotary, 32)[0]) == 40 + 7
    assert tables.turn_far(np.arange(7, dtype=np.int32), None) is None
    always = RotaryTables([(RotarySpec(dim=32), 32)], 300, 7, whole=True)
    assert len(always.rows(RotarySpec(dim=32), 32)[0]) == 300
    assert always.turn_far(np.array([299], np.int32), np.array([300], np.int32)) is None


@pytest.mark.parametrize("kind", LIMITS)
def test_frequencies_change_as_sequences_grow(checkpoint: Checkpoint, kind: RotaryKind) -> None:
    """Only decoding step by step says what is right."""
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **LONG}
    if kind == "dynamic":
        parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    folder = checkpoint(
        "llama", head_dim=32, rope_parameters=parameters, max_position_embeddings=LIMITS[kind]
    )
    with cpu_runner(folder) as (runner, _):
        assert not runner.info.prefix_reuse  # a prompt's K hangs on its length
        rows = sequences(PROMPTS, shuffle=3, new=12)
        run(runner, rows, chunk=20, joins=2)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        # A model of its own per prompt: transformers' dynamic frequencies outlive a sequence.
        assert generated(row) == Golden(folder).greedy(prompt, 12)[0]
    assert len({tuple(generated(row)) for row in rows}) == len(rows)


def test_heads_are_normalised_behind_a_turn_that_makes_them_longer(checkpoint: Checkpoint) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, **SHARPER}
    folder = checkpoint(
        "llama4_text", head_dim=32, intermediate_size=64, rope_parameters=parameters
    )
    golden = Golden(folder)
    with cpu_runner(folder) as (runner, recorder):
        rows = sequences(PROMPTS, shuffle=3, new=12)
        run(runner, rows, chunk=20, joins=2)
        for row in rows:
            assert_greedy(golden, recorder, row, 1e-4)
