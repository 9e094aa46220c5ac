"""Heads for a model are learnt from its documents, and written as TGI reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from tgi_trio.model.speculators.recognise import base_of_heads, read_heads
from tgi_trio.testing.checkpoints import make_checkpoint
from tools.demo.train import TrainingBatch
from tools.demo.train_heads import HeadsRecipe, save, train


def counting() -> Iterator[TrainingBatch]:
    """Documents that count by a step of their own, from 3 to 60."""
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(0, 58, (16, 1), generator=generator)
        ids = 3 + (starts + torch.arange(24)) % 58
        yield TrainingBatch(ids[:, :-1], ids[:, 1:], torch.ones(16, 23))


def test_heads_learn_what_comes_further_on(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama", head_dim=32)
    recipe = HeadsRecipe(heads=2, steps=1, threads=1)
    _, before = train(recipe, folder, counting())
    heads, after = train(
        HeadsRecipe(heads=2, steps=100, threads=1, learning_rate=2e-2), folder, counting()
    )
    assert len(after) == 2
    assert all(late > early + 0.3 for early, late in zip(before, after, strict=True))
    save(heads, tmp_path / "heads", str(folder))
    assert base_of_heads(tmp_path / "heads") == str(folder)
    spec = read_heads(tmp_path / "heads", hidden=64, vocabulary=512)
    assert spec.heads == 2
