"""Whoever drafts, the tokens are those of decoding one by one: drafters by what may happen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shard.adapters.peft_support import install, write_adapter
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.speculation.eagle_support import eagle, eagle_one
from tests.shard.speculation.heads_support import (
    Answers,
    answer,
    counting_model,
    medusa,
    mlp_speculator,
)
from tests.shard.torch_backend.models_support import GreedyRecorder
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.speculation.drafted_runner import DraftedRunner
from tgi_trio.testing.checkpoints import make_checkpoint

HIDDEN, VOCAB, NEW, MOST = 64, 512, 14, 3
PROMPTS = [
    [7, 8, 9, 10, 7, 8, 9, 10, 7, 8, 9],
    [40, 41, 42],
    [7, 300, 21, 22, 4, 9, 9, 3, 12, 90, 91, 14, 33, 8, 2, 6, 7],
    [5, 6, 7, 8, 9],
]
ASKED = [
    SamplingParameters(ignore_eos=True),
    SamplingParameters(sample=True, seed=3, temperature=0.9, top_p=0.95, ignore_eos=True),
    SamplingParameters(
        repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.5, ignore_eos=True
    ),
    SamplingParameters(grammar='{"grammars": [{"lark_grammar": "start: /[a-z ]+/"}]}'),
]
DRAFTERS: dict[str, Callable[[Path, Path], Path]] = {
    "medusa": lambda folder, base: medusa(folder, base, HIDDEN, VOCAB, layers=1, own=False),
    "mlp": lambda folder, base: mlp_speculator(folder, base, HIDDEN, VOCAB, tied=False),
    "eagle": lambda folder, base: eagle(folder, base, VOCAB),
    "first eagle": lambda folder, base: eagle_one(folder, base, VOCAB),
    "model": lambda folder, base: make_checkpoint(
        folder, "llama", head_dim=32, num_hidden_layers=1, seed=5
    ),
}
EVENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "prompts in pieces": {"budget": 5},
    "preempted": {"again": 6},
    "preempted in their prompts": {"again": 2, "budget": 12},
    "killed": {"again": 5, "killed": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return make_checkpoint(folder, "llama", head_dim=32)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(base, tmp_path_factory.mktemp("adapter"), seed=1)


@pytest.fixture(scope="module")
def plain(base: Path, adapter: Path) -> dict[str, dict[int, list[int]]]:
    """The tokens of each prompt with nothing that drafts, by backend."""
    found = {}
    for backend in ("torch", "kernels"):
        runner = load(base, None, adapter, backend)
        found[backend] = answer(runner, PROMPTS, with_adapters(), NEW).tokens
    return found


@pytest.fixture(
    scope="module", params=[*((kind, "torch") for kind in DRAFTERS), ("eagle", "kernels")]
)
def run(
    request: pytest.FixtureRequest,
    base: Path,
    adapter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Callable[..., Answers]]]:
    kind, backend = request.param
    folder = DRAFTERS[kind](tmp_path_factory.mktemp("drafter"), base)
    runner = load(base, folder, adapter, backend)

    def drafted(**event: Any) -> Answers:
        drafter = runner.drafter(MOST)
        return answer(runner, PROMPTS, with_adapters(), NEW, drafter=drafter, **event)

    yield backend, drafted


def load(base: Path, folder: Path | None, adapter: Path, backend: str) -> Runner:
    settings = ShardSettings(
        model_path=base, draft_model=folder, cpu_backend=backend, cpu_threads=1,
        tokenizer_file=base / "tokenizer.json", max_lora_rank=64,
    )  # fmt: skip
    runner = load_runner(settings)
    install(runner, 1, adapter)
    return runner


def with_adapters() -> list[SamplingParameters]:
    """Return what is asked for each prompt: two rows have an adapter, heads know of none."""
    return [replace(asked, adapter=i % 2) for i, asked in enumerate(ASKED)]


@pytest.mark.parametrize("event", EVENTS)
def test_the_tokens_are_those_of_decoding_one_by_one(
    event: str,
    run: tuple[str, Callable[..., Answers]],
    plain: dict[str, dict[int, list[int]]],
) -> None:
    backend, drafted = run
    found = drafted(**EVENTS[event])
    assert found.tokens == plain[backend]
    assert found.drafts > 0


def test_right_and_wrong_drafts_of_every_kind_take_turns(tmp_path: Path) -> None:
    """A model that counts: drafts are right, and wrong where a sampler or a penalty differs."""
    base = counting_model(tmp_path / "model", tmp_path / "heads")
    settings = ShardSettings(model_path=base, cpu_backend="torch", cpu_threads=1)
    asked, prompts = ASKED[:3], [[*range(20, 40), 20, 21], *PROMPTS[1:3]]  # n-grams find 22, 23
    expected = answer(load_runner(settings), prompts, asked, NEW)
    for folder in (tmp_path / "heads", base, None):
        runner = load_runner(replace(settings, draft_model=folder))
        for event in EVENTS.values():
            found = answer(runner, prompts, asked, NEW, drafter=runner.drafter(3), **event)
            assert found.tokens == expected.tokens and found.drafts > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["medusa", "mlp", "eagle", "first eagle"])
def test_beside_two_ranks_as_well(kind: str, base: Path, tmp_path: Path) -> None:
    folder = DRAFTERS[kind](tmp_path, base)
    greedy = [SamplingParameters(ignore_eos=True)] * 3
    with ranks_of(base, 2, GreedyRecorder(), draft_model=folder) as runner:
        expected = answer(runner, PROMPTS[:3], greedy, NEW)
        for event in (EVENTS["nothing"], EVENTS["killed"]):
            drafter = runner.drafter(MOST)
            found = answer(runner, PROMPTS[:3], greedy, NEW, drafter=drafter, **event)
            assert found.tokens == expected.tokens and found.drafts > 0


@pytest.mark.parametrize("kind", ["n-grams", "model"])
def test_beside_two_ranks_of_a_model_that_counts(kind: str, tmp_path: Path) -> None:
    """N-grams find 22 behind 21, 52 behind 51; the smaller model is the same one, on rank 0."""
    base = counting_model(tmp_path / "model", tmp_path / "heads")
    greedy = [SamplingParameters(ignore_eos=True)] * 2
    prompts = [[*range(20, 40), 20, 21], [*range(50, 70), 50, 51]]
    with ranks_of(base, 2, GreedyRecorder()) as ranks:
        expected = answer(ranks, prompts, greedy, NEW)
        runner: Runner = ranks
        if kind == "model":
            settings = ShardSettings(model_path=base, cpu_backend="torch", cpu_threads=1)
            runner = DraftedRunner(ranks, load_runner(settings))
        for event in (EVENTS["nothing"], EVENTS["killed"]):
            found = answer(runner, prompts, greedy, NEW, drafter=runner.drafter(MOST), **event)
            assert found.tokens == expected.tokens and found.drafts > 0
            assert found.steps < expected.steps
