"""Gemma 4's assistants: they draft what transformers drafts with them, and change no token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.shard.adapters.peft_support import install, write_adapter
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.speculation.assistant_support import (
    BASES,
    AssistantReference,
    assistant,
    gemma4,
)
from tests.shard.speculation.heads_support import Watched, answer
from tests.shard.torch_backend.models_support import GreedyRecorder
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.runner import Drafter, DraftRow, Runner

NEW, MOST = 20, 4
PROMPTS = [
    [5, 6, 7, 8, 9],
    [40, 41, 42],
    [7, 300, 21, 22, 4, 9, 9, 3, 12, 90, 91, 14, 33, 8, 2, 6, 7],  # longer than the window
]
GREEDY = [SamplingParameters(ignore_eos=True)] * len(PROMPTS)
ASKED = [
    SamplingParameters(ignore_eos=True, adapter=1),
    SamplingParameters(sample=True, seed=3, temperature=0.9, top_p=0.95, ignore_eos=True),
    SamplingParameters(grammar='{"grammars": [{"lark_grammar": "start: /[a-z ]+/"}]}'),
]
EVENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "prompts in pieces": {"budget": 5},
    "preempted": {"again": 6},
    "killed": {"again": 5, "killed": True},
}
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model and its assistant."""
    base = gemma4(tmp_path_factory.mktemp("base"))
    return base, assistant(tmp_path_factory.mktemp("assistant"), base)


def load(base: Path, folder: Path | None, **more: Any) -> Runner:
    settings: dict[str, Any] = {"cpu_backend": "torch", "cpu_threads": 1} | more
    return load_runner(ShardSettings(model_path=base, draft_model=folder, **settings))


class Corrected(Watched):
    """A drafter whose drafts are remembered, and replaced by what the model says every other time.

    So that states and positions behind right drafts are met as well. No sequence rests.
    """

    def __init__(self, drafter: Drafter, right: Sequence[Sequence[int]]) -> None:
        super().__init__(drafter)
        self._right = right

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        for row in rows:
            row.sequence.state.clear()
        counts = super().draft_rows(rows, spare)
        for row in rows:
            ids, length = row.sequence.token_ids, row.sequence.length
            text = next(own for own in self._right if own[:length] == ids[:length].tolist())
            known = text[length : length + counts.get(row.place, 0)]
            if length % 2:
                ids[length : length + len(known)] = np.array(known)
        return counts


def check_drafts(runner: Runner, reference: AssistantReference, **event: Any) -> None:
    """Hold all drafts of a run to those of transformers, and its tokens to a plain run's."""
    plain = answer(runner, PROMPTS, GREEDY, NEW)
    drafter = runner.drafter(MOST)
    assert drafter is not None
    texts = [[*ids, *plain.tokens[i]] for i, ids in enumerate(PROMPTS)]
    watched = Corrected(drafter, texts)
    found = answer(runner, PROMPTS, GREEDY, NEW, drafter=watched, **event)
    assert found.tokens == plain.tokens and found.steps < plain.steps
    some = [(known, own) for known, own in watched.drafted if own]
    assert len(some) > NEW and max(len(own) for _, own in some) >= 2
    for known, own in some:
        for token, best in zip(own, reference.drafts(known, len(own)), strict=True):
            assert token in best
            if len(best) > 1:  # what follows depends on which it was
                break


@pytest.mark.parametrize(
    ("family", "clusters", "budget", "backend"),
    [
        ("gemma4_text", True, 64, "torch"),
        ("gemma4_text", False, 6, "torch"),  # prompts in pieces
        ("gemma4_unified_text", True, 64, "torch"),
        ("gemma4_text", True, 6, "kernels"),
        ("gemma4_unified_text", False, 64, "kernels"),
    ],
)
def test_it_drafts_what_transformers_drafts(
    family: str, clusters: bool, budget: int, backend: str, tmp_path: Path
) -> None:
    base = gemma4(tmp_path / "base", family)
    folder = assistant(tmp_path / "own", base, clusters=clusters)
    runner = load(base, folder, cpu_backend=backend)
    check_drafts(runner, AssistantReference(folder, base), budget=budget)


@pytest.mark.parametrize("family", BASES)  # the second has a single global KV head, on both ranks
def test_two_ranks_draft_the_same(family: str, tmp_path: Path) -> None:
    base = gemma4(tmp_path / "base", family)
    folder = assistant(tmp_path / "own", base)
    with ranks_of(base, 2, GreedyRecorder(), draft_model=folder) as runner:
        check_drafts(runner, AssistantReference(folder, base))


@pytest.mark.parametrize("event", EVENTS)
def test_tokens_are_those_of_decoding_one_by_one(
    event: str, folders: Folders, tmp_path: Path
) -> None:
    base, folder = folders
    adapter = write_adapter(base, tmp_path, seed=1, target_modules=["q_proj", "k_proj", "v_proj"])
    more = {"tokenizer_file": base / "tokenizer.json", "max_lora_rank": 64}
    plain, drafting = load(base, None, **more), load(base, folder, **more)
    for runner in (plain, drafting):
        install(runner, 1, adapter)
    expected = answer(plain, PROMPTS, ASKED, NEW)
    drafter = drafting.drafter(MOST)
    found = answer(drafting, PROMPTS, ASKED, NEW, drafter=drafter, **EVENTS[event])
    assert found.tokens == expected.tokens and found.drafts > 0


def test_keys_and_values_of_eight_bits_are_read_as_well(folders: Folders) -> None:
    base, folder = folders
    expected = answer(load(base, None, kv_cache_dtype="fp8_e5m2"), PROMPTS, GREEDY, NEW)
    runner = load(base, folder, kv_cache_dtype="fp8_e5m2")
    found = answer(runner, PROMPTS, GREEDY, NEW, drafter=runner.drafter(MOST))
    assert found.tokens == expected.tokens and found.drafts > 0


def test_kernels_read_keys_and_values_of_sixteen_bits(folders: Folders) -> None:
    """Of bfloat16, two numbers of a key are neighbours; most drafts are those of float32."""
    base, folder = folders
    runner = load(base, folder, cpu_backend="kernels", dtype="bfloat16")
    reference, drafter = AssistantReference(folder, base), runner.drafter(MOST)
    assert drafter is not None
    texts = [[*ids, *answer(runner, [ids], GREEDY[:1], NEW).tokens[0]] for ids in PROMPTS]
    watched = Corrected(drafter, texts)
    answer(runner, PROMPTS, GREEDY, NEW, drafter=watched)
    firsts = [(known, own[0]) for known, own in watched.drafted if own]
    same = sum(token == reference.drafts(known, 1)[0][0] for known, token in firsts)
    assert same > 0.5 * len(firsts) > 8


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "an assistant that reads keys and values of 8 bits"),
        ({}, "an assistant with features in no multiples of 32"),
    ],
)
def test_torch_serves_what_kernels_cannot(
    settings: dict[str, Any],
    reason: str,
    folders: Folders,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, folder = folders
    if not settings:
        folder = assistant(tmp_path, base, intermediate_size=48)
    runner = load(base, folder, cpu_backend="auto", **settings)
    assert runner.info.backend == "torch"
    assert f"served with torch, not with the CPU kernels: {reason}" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match=reason):
        load(base, folder, cpu_backend="kernels", **settings)
