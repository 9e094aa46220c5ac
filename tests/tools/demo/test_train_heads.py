"""Heads for a model are learnt from what it says itself, and written as vLLM has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tgi_trio.model.speculators.recognise import base_of_heads, read_heads
from tgi_trio.testing.checkpoints import make_checkpoint
from tools.demo.train import IGNORED, TrainingBatch
from tools.demo.train_heads import HeadsRecipe, read_batch, run, save

PROMPT, NEW = 4, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", "llama", head_dim=32)


@pytest.fixture(scope="module")
def said(folder: Path) -> torch.Tensor:
    """Prompts of four tokens, and what the model says behind them: int64 [rows, 16]."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompts = torch.randint(3, 512, (32, PROMPT), generator=torch.Generator().manual_seed(1))
    ids: torch.Tensor = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, pad_token_id=0,
        min_new_tokens=NEW, max_new_tokens=NEW,
    )  # fmt: skip
    return ids


def batch_of(ids: torch.Tensor) -> TrainingBatch:
    weights = torch.ones(len(ids), ids.shape[1] - 1)
    weights[:, : PROMPT - 1] = 0.1  # heard, not said
    return TrainingBatch(ids[:, :-1], ids[:, 1:], weights)


def test_heads_learn_what_the_model_says_further_on(
    folder: Path, said: torch.Tensor, tmp_path: Path
) -> None:
    def documents() -> Iterator[TrainingBatch]:
        return cycle([batch_of(said)])

    recipe = HeadsRecipe(
        heads=2,
        steps=1,
        examples=300,
        threads=1,
        batch_size=128,
        warmup_steps=1,
        learning_rate=2e-2,
    )
    _, before = run(recipe, folder, documents())
    heads, after = run(replace(recipe, steps=60), folder, documents())
    assert len(after) == 2 and after[1] <= after[0]
    assert all(late > early + 0.3 for early, late in zip(before, after, strict=True))
    save(heads, tmp_path, str(folder))
    assert base_of_heads(tmp_path) == str(folder)
    spec = read_heads(tmp_path, hidden=64, vocabulary=512)
    assert (spec.heads, spec.tensors[-1]) == (2, "token_map")


def test_examples_are_of_places_where_the_document_is_what_the_model_says(
    folder: Path, said: torch.Tensor
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    whole = read_batch(model, batch_of(said), 2)
    expected = [[*row[t + 2 : t + 4], IGNORED][:2] for row in said.tolist()
                for t in range(PROMPT - 1, PROMPT + NEW - 2)]  # fmt: skip
    assert whole.choices.tolist() == expected
    other = said.clone()
    at = PROMPT + 5
    other[:, at] = (said[:, at] + 1) % 512  # not what it says: what leads there is no example
    kept = read_batch(model, batch_of(other), 2)
    first = said[0].tolist()
    expected = [first[t + 2 : t + 4] for t in range(PROMPT - 1, at - 1)]
    expected[-1][1] = IGNORED  # it is not known what would follow
    assert kept.choices[: len(expected)].tolist() == expected
    assert len(kept.choices) < len(whole.choices)
