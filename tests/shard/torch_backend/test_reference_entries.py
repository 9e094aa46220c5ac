"""Entries, keys of whole runs of tokens: how they are made, and when they are made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    advance,
    drafting_plan,
    load,
    prompts,
    run,
    sequences,
)
from tgi_trio.shard.torch_backend.attention.entries import reference_entries
from tgi_trio.shard.torch_backend.attention.indexed import reference_groups
from tgi_trio.shard.torch_backend.layers.attention.compressor import Compressor
from tgi_trio.shard.torch_backend.layers.norm import Norm

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 9


def mean(numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the normalised mean of `numbers` [tokens, dim]."""
    found = (numbers * weights.softmax(dim=0)).sum(dim=0)
    return found * torch.rsqrt(found.square().mean() + 1e-6)


def test_an_entry_is_a_mean_of_its_run() -> None:
    made = Compressor(
        2, overlaps=False, bias=torch.randn(3, 2), norm=Norm("rms", torch.ones(2), None, 1e-6, 2)
    )
    kept = torch.randn(1, 3, 4)
    numbers, weights = kept[0].split(2, dim=-1)
    found = made.compress(kept, torch.zeros(1, 3, dtype=torch.bool))
    torch.testing.assert_close(found[0], mean(numbers, weights + made.bias))
    assert made.last == slice(0, 2)


def test_an_entry_that_overlaps_reads_other_numbers_of_the_run_before() -> None:
    made = Compressor(
        2, overlaps=True, bias=torch.randn(3, 4), norm=Norm("rms", torch.ones(2), None, 1e-6, 2)
    )
    kept = torch.randn(2, 6, 8)
    missing = torch.zeros(2, 6, dtype=torch.bool)
    missing[0, :3] = True  # there is no run before the first
    found = made.compress(kept, missing)
    own = kept[:, 3:, 2:4], kept[:, 3:, 6:8] + made.bias[:, 2:]
    before = kept[:, :3, :2], kept[:, :3, 4:6] + made.bias[:, :2]
    torch.testing.assert_close(found[0], mean(own[0][0], own[1][0]))
    both = (torch.cat((earlier[1], later[1])) for earlier, later in zip(before, own, strict=True))
    torch.testing.assert_close(found[1], mean(*both))
    assert made.last == slice(2, 4)


def test_what_nobody_has_written_is_not_read(checkpoint: Checkpoint) -> None:
    """A block's last owner may have left NaN, behind a row's end and in the null block."""
    folder = checkpoint("deepseek_v4")
    runner, recorder = load(folder)
    inside: Any = runner
    with torch.inference_mode():
        inside._cache.key.fill_(torch.nan)
    rows = sequences(prompts(8)[2:6], shuffle=5, new=NEW)
    run(runner, rows, chunk=20, joins=2)
    golden = Golden(folder)
    for row in rows:
        assert_greedy(golden, recorder, row)


def test_few_tokens_at_a_time_say_the_same(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_entries, "_GATHERED", 15)  # entries of three tokens
    monkeypatch.setattr(reference_entries, "_READ", 20)
    monkeypatch.setattr(reference_groups, "_SCORES", 400)
    folder = checkpoint("deepseek_v4")
    runner, recorder = load(folder)
    rows = sequences(prompts(8)[4:], shuffle=3, new=NEW)
    run(runner, rows, chunk=30, joins=2)
    golden = Golden(folder)
    for row in rows:
        assert_greedy(golden, recorder, row)


@pytest.mark.parametrize("length", [16, 17, 18, 19])
def test_wrong_drafts_that_end_runs_leave_nothing_behind(
    checkpoint: Checkpoint, length: int
) -> None:
    """Five of them end a run of four at every length, and at two of them one of twenty-four."""
    folder = checkpoint("deepseek_v4")
    runner, recorder = load(folder)
    (row,) = sequences([prompts(8)[7][:length]], new=NEW)
    advance(runner, [row], [length])
    runner.step(drafting_plan([row], [[7, 6, 5, 4, 3]]))
    while row.remaining:
        advance(runner, [row], [1])
    assert_greedy(Golden(folder), recorder, row)
