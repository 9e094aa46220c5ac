"""Models that no family of the table covers are run through transformers and say what it says."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.shard.torch_backend.fallback_support import WAYS
from tests.shard.torch_backend.golden import Golden, assert_as_golden
from tests.shard.torch_backend.models_support import (
    advance,
    generated,
    load,
    plan,
    prompts,
    sequence,
    tables,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.torch_backend.fallback import fallback_runner
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

PROMPTS = prompts(8)[2:]
NEW = 12
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]

ELSEWHERE = {"bart"}  # has tests of its own
CACHED, IN_A_CACHE = "falcon", {"alibi": True}
OUTSIDE = [
    *((family, way, {}) for family, way in WAYS.items()),
    # Variants that their family's function declines.
    (CACHED, "cached", IN_A_CACHE),
    ("olmoe", "paged", {"clip_qkv": 1.0}),
    ("ernie4_5_moe", "paged", {"moe_norm_min": 0.9}),
    ("gpt_oss", "cached", {"swiglu_alpha": 1.5, "sliding_window": 16}),
]


@pytest.mark.parametrize(
    ("family", "way", "changes"),
    [case for case in OUTSIDE if case[0] not in ELSEWHERE],
    ids=lambda v: str(v)[:20],
)
def test_through_transformers(
    checkpoint: Checkpoint, family: str, way: str, changes: dict[str, Any]
) -> None:
    folder, backend = checkpoint(family, **changes), f"transformers, {way}"
    assert_as_golden(folder, PROMPTS, NEW, backend=backend)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_paged_way_declines_frequencies_by_length(kind: str) -> None:
    """transformers takes one length for a whole flat batch, so rows would change each other."""
    from types import SimpleNamespace

    from tgi_trio.shard.torch_backend.fallback.modes import PagedWay

    text = SimpleNamespace(rope_parameters={"rope_type": kind})
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: text))
    assert PagedWay.try_make(model) is None


def test_prompt_logprobs_through_transformers(checkpoint: Checkpoint) -> None:
    folder = checkpoint("codegen")
    runner, _ = load(folder)
    prompt = PROMPTS[3]
    row = sequence(0, prompt, range(1, 9), new=2, prompt_logprobs=True)
    found: list[float] = []
    while row.length == len(prompt):
        found += advance(runner, [row], [min(6, row.length - row.computed)])[0].prompt_logprobs
    assert math.isnan(found[0])
    assert found[1:] == pytest.approx(Golden(folder).prompt_logprobs(prompt), abs=1e-4)


@pytest.mark.parametrize("family", ["jetmoe", "codegen", "ctrl"])
def test_prompt_logprobs_through_transformers_come_in_pieces(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    most = 7
    monkeypatch.setattr(fallback_runner, "rows_at_once", lambda vocabulary: most)
    folder, texts = checkpoint(family), prompts(8)[4:]
    runner, _ = load(folder)
    assert isinstance(runner, fallback_runner.FallbackRunner)
    forward, held = runner.way.forward, []

    def counted(plan: StepPlan, wanted: ListLike[Any]) -> list[Any]:
        held.append(sum(map(len, wanted)))
        return forward(plan, wanted)

    monkeypatch.setattr(runner.way, "forward", counted)
    blocks, golden = tables(texts, shuffle=2, new=2), Golden(folder)
    rows = [
        sequence(i, text, blocks[i], new=2, prompt_logprobs=i != 1, prompt_top_n=2 if i == 0 else 0)
        for i, text in enumerate(texts)
    ]
    found: list[list[float]] = [[] for _ in rows]
    tops: list[list[tuple[int, float]]] = []
    while any(row.computed < row.prompt_length for row in rows):
        counts = [min(23, row.length - row.computed) for row in rows]
        results = advance(runner, rows, counts)
        for values, result in zip(found, results, strict=True):
            values += result.prompt_logprobs
        tops += map(list, results[0].prompt_tops)
        assert not any(result.prompt_tops for result in results[1:])
    assert max(held) <= most + len(rows)
    golden.assert_prompt_tops(texts[0], tops, 2)
    for i, text in enumerate(texts):
        expected = golden.prompt_logprobs(text) if i != 1 else []
        assert found[i][1:] == pytest.approx(expected, abs=1e-4)
        first = generated(rows[i])[:1]
        assert first == golden.logits(text, first).argmax(-1).tolist()


def test_a_tensor_that_transformers_would_make_up_is_named(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("codegen"), tmp_path / "less"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.mlp.fc_in.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"'transformer.h.1.mlp.fc_in.weight' is missing"):
        load_torch_runner(ShardSettings(model_path=folder), read_config(folder))


def test_a_repeated_step_through_a_cache(checkpoint: Checkpoint) -> None:
    """The cache has moved on when the worker repeats a step; the answer is the same."""
    runner, _ = load(checkpoint(CACHED, **IN_A_CACHE))
    row = sequence(0, PROMPTS[3], range(1, 9), new=4)
    advance(runner, [row], [row.length])
    once = runner.step(plan([row], [1])).rows[0].token_ids
    assert runner.step(plan([row], [1])).rows[0].token_ids == once


def test_one_bad_row_through_transformers_fails_alone(checkpoint: Checkpoint) -> None:
    runner, _ = load(checkpoint(CACHED, **IN_A_CACHE))
    good = sequence(0, PROMPTS[3], range(1, 9), new=4)
    bad = sequence(1, [100_000], range(9, 12), new=4)  # outside the embedding
    results = runner.step(plan([bad, good], [1, good.length])).rows
    assert results[0].fault and "IndexError" in results[0].fault and not results[0].token_ids
    assert results[1].fault is None and len(results[1].token_ids) == 1


def test_dropping_a_row_frees_its_cache(checkpoint: Checkpoint) -> None:
    runner, _ = load(checkpoint(CACHED, **IN_A_CACHE))
    row = sequence(0, PROMPTS[3], range(1, 9), new=4)
    advance(runner, [row], [row.length])
    assert row.state
    runner.drop(row)
    assert not row.state
