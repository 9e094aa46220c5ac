"""A file that llama.cpp made gives what transformers computes from its dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.shard.cpu_backend.kernel_support import cpu_runner
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    advance,
    generated,
    load,
    run,
    sequence,
    tables,
)
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.shard.runner import Runner

pytestmark = pytest.mark.usefixtures("one_thread")

# Q4_K, Q6_K and float32 in one file. The prompts' log-probabilities, the greedy tokens after them
# and how far behind the second best token was are of transformers, in float32.
FILES = sorted(Path(__file__).parent.glob("*.gguf"))
CLEAR = 0.25  # margin above which a token is certain


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def file(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@contextmanager
def torch_runner(folder: Path) -> Iterator[Runner]:
    yield load(folder, dtype="float32")[0]


@contextmanager
def kernel_runner(folder: Path) -> Iterator[Runner]:
    with cpu_runner(folder) as (runner, _):
        yield runner


@contextmanager
def two_ranks(folder: Path) -> Iterator[Runner]:
    with ranks_of(folder, 2, GreedyRecorder(), dtype="float32") as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 511 * BLOCK))
        yield runner


RUNNERS = {"torch": torch_runner, "kernels": kernel_runner, "two ranks": two_ranks}


@pytest.mark.parametrize("backend", RUNNERS)
def test_logprobs_and_tokens_are_those_of_the_dequantised_model(
    file: Path, tmp_path: Path, backend: str
) -> None:
    folder = gguf_folder(file, tmp_path)
    cases = json.loads(file.with_suffix(".json").read_text())
    with RUNNERS[backend](folder) as runner:
        for case in cases:
            check(runner, [case])
        check(runner, (cases * 8)[:8])


def check(runner: Runner, cases: list[dict[str, Any]]) -> None:
    """Run cases at once, and hold log-probabilities and greedy tokens to what is expected."""
    answered = [case["input_ids"] + case["ids"] for case in cases]
    blocks = tables(answered, new=1)
    scored = [
        sequence(i, ids, blocks[i], new=1, prompt_logprobs=True) for i, ids in enumerate(answered)
    ]
    results = advance(runner, scored, [len(ids) for ids in answered])
    for result, case in zip(results, cases, strict=True):
        expected = case["prompt_logprobs"] + case["logprobs"]
        assert result.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    rows = [
        sequence(i, case["input_ids"], blocks[i], new=len(case["ids"]))
        for i, case in enumerate(cases)
    ]
    run(runner, rows)
    for row, case in zip(rows, cases, strict=True):
        for token, expected, margin in zip(
            generated(row), case["ids"], case["margin"], strict=True
        ):
            if token != expected:  # what follows is another text
                assert margin < CLEAR
                break
