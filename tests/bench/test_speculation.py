"""Drafts are measured of models with states as of others: they change no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness import checkpoints
from bench.model import speculation
from tests.bench.test_bare import SMALL_HYBRID
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.backend import load_runner


@pytest.mark.parametrize("backend", ["kernels", "torch"])
def test_a_model_with_states_answers_as_without_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setitem(checkpoints.SHAPES, "H", checkpoints.SHAPES["H"] | SMALL_HYBRID)
    folder = checkpoints.make("H", tmp_path)
    settings = ShardSettings(model_path=folder, cpu_backend=backend, cpu_threads=1, dtype="float32")
    runner = load_runner(settings)
    memory = runner.warm_up(WarmupRequest(64, 256, 4, 2048))
    prompts = [[5, 6, 7] * 4, [9, 8], [3, 4, 3, 4, 3]]
    with_and_without = [
        speculation.run(runner, memory, 2, prompts, speculate=n, new=200, sample=False)
        for n in (0, 2)
    ]
    plain, drafted = with_and_without
    assert memory.state_slots and drafted.drafts > plain.drafts == 0
    assert plain.tokens == drafted.tokens
    assert all(len(tokens) == 200 for tokens in plain.tokens.values())
