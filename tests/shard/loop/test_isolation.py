"""A sequence whose numbers break fails alone, on a real model: nobody else's text changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import (
    BLOCK,
    generated,
    plan,
    prompts,
    sequence,
    sequences,
    tables,
)
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import Runner
from tgi_trio.testing.checkpoints import poison_token

POISON, NEW = 77, 20
PROMPTS = [[token for token in prompt if token != POISON] or [5] for prompt in prompts(7)]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes nothing but NaN behind one token."""
    original = checkpoint("llama", **FITTING["llama"])
    copy = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(original, copy)
    poison_token(copy, POISON)
    return copy


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[list[int]]:
    """What transformers says to every prompt."""
    golden = Golden(folder)
    return [golden.greedy(prompt, NEW)[0] for prompt in PROMPTS]


@pytest.fixture(params=["kernels", "torch"])
def runner(folder: Path, request: pytest.FixtureRequest) -> Runner:
    runner = load_runner(
        ShardSettings(model_path=folder, dtype="float32", cpu_threads=1, cpu_backend=request.param)
    )
    runner.warm_up(WarmupRequest(256, 256, 16, 63 * BLOCK))
    return runner


def run(runner: Runner, rows: list[ShardSequence], chunk: int = 256) -> dict[int, tuple[int, str]]:
    """Run rows together to their ends; return the faults: tokens generated until then, message."""
    faults: dict[int, tuple[int, str]] = {}
    while rows:
        counts = [min(chunk, row.length - row.computed) for row in rows]
        results = runner.step(plan(rows, counts)).rows
        for row, count, result in zip(rows, counts, results, strict=True):
            row.computed += count
            if result.fault is not None:
                faults[row.id] = (len(generated(row)), result.fault)
                row.remaining = 0
            for token in result.token_ids:
                row.token_ids[row.length] = token
                row.length, row.remaining = row.length + 1, row.remaining - 1
            if not row.remaining:
                runner.drop(row)
        rows = [row for row in rows if row.remaining]
    return faults


@pytest.mark.parametrize("chunk", [256, 7])
def test_a_row_that_turns_nan_fails_alone(
    runner: Runner, texts: list[list[int]], chunk: int
) -> None:
    ill = [*PROMPTS[5][:9], POISON, *PROMPTS[5][9:]]
    given = [*PROMPTS, ill, PROMPTS[4]]
    rows = sequences(given, shuffle=1, new=NEW)
    # One is ill from the start; one falls ill as it says the word.
    rows[8] = sequence(8, given[8], rows[8].block_ids, new=NEW, logit_bias=((POISON, 1e6),))
    faults = run(runner, rows, chunk)
    assert {i: count for i, (count, _) in faults.items()} == {7: 0, 8: 1}
    for i, place in ((7, len(ill) - 1), (8, len(given[8]))):
        assert faults[i][1] == f"the model's logits contain NaN at position {place}"
    assert [generated(row) for row in rows[:7]] == texts


def test_blocks_that_hold_nan_serve_the_next_sequences(
    runner: Runner, texts: list[list[int]]
) -> None:
    places = (1, 6)  # a short and a long one: what the short one lacks must not be looked at
    blocks = tables([PROMPTS[i] for i in places], new=NEW)
    filled = [
        sequence(i, [POISON] * (len(table) * BLOCK), table, new=1) for i, table in enumerate(blocks)
    ]
    assert run(runner, filled).keys() == {0, 1}
    again = [sequence(i, PROMPTS[i], blocks[n], new=NEW) for n, i in enumerate(places)]
    assert not run(runner, again, chunk=5)
    assert [generated(row) for row in again] == [texts[i] for i in places]
