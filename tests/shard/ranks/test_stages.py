"""Stages of a pipeline give what transformers gives, one send from each to the next."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.models_support import (
    BLOCK,
    TOLERANCES,
    Golden,
    GreedyRecorder,
    assert_greedy,
    prompts,
    run,
    sequences,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.stages import Stage
from tgi_trio.testing.tiny_families import GEMMA3N_SPARSE

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("count", "size", "runs"),
    [
        (4, 2, {1: [0, 1], 0: [2, 3]}),
        (5, 2, {1: [0, 1, 2], 0: [3, 4]}),
        (8, 3, {1: [0, 1, 2], 2: [3, 4, 5], 0: [6, 7]}),
    ],
)
def test_rank_0_is_the_last_stage_and_never_has_more(
    count: int, size: int, runs: dict[int, list[int]]
) -> None:
    for rank, run_of in runs.items():
        assert list(Stage(rank, size).layers(count)) == run_of
    stages = sorted((Stage(rank, size) for rank in range(size)), key=lambda each: each.index)
    assert [each.rank for each in stages] == list(runs)
    assert [each.is_first for each in stages] == [True] + [False] * (size - 1)
    assert all(b.before == a.rank and a.after == b.rank for a, b in pairwise(stages))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "granitemoehybrid", "qwen3_moe"])
def test_two_stages_say_what_one_process_says(checkpoint: Checkpoint, family: str) -> None:
    folder, recorder, rows = (
        checkpoint(family),
        GreedyRecorder(),
        sequences(prompts(8)[4:], shuffle=3, new=6),
    )
    with ranks_of(folder, 2, recorder, pipeline_stages=2) as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        run(runner, rows, chunk=20, joins=2)
    golden = Golden(folder)
    for row in rows:
        assert_greedy(golden, recorder, row, TOLERANCES.get(family, 1e-4))


@pytest.mark.parametrize(
    ("family", "overrides", "size", "message"),
    [
        ("llama", {}, 9, "layers cannot be cut into 9 stages; choose a smaller"),
        ("gemma3n_text", GEMMA3N_SPARSE, 2, "need more of others than a hidden state"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    checkpoint: Checkpoint, family: str, overrides: dict[str, int], size: int, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        with ranks_of(
            checkpoint(family, **overrides), size, GreedyRecorder(), pipeline_stages=size
        ):
            pass
