"""What an index chooses, and that nothing of what it leaves out is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import load, prompts, run, sequences
from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.shard.torch_backend.layers.attention.block_index import score_blocks
from tgi_trio.shard.torch_backend.layers.attention.index import (
    IndexQueries,
    choose_best,
    score_keys,
)

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_best_are_chosen_and_of_equals_the_first() -> None:
    none = float("-inf")
    scores = torch.tensor([[1.0, 3.0, 0.0, 0.0, 0.0, 2.0], [0.0, none, none, none, none, none]])
    assert choose_best(scores, 4).tolist() == [[0, 1, 2, 5], [0, 1, 2, 3]]
    assert choose_best(scores, 6).tolist() == [list(range(6))] * 2


def test_a_row_of_nan_leaves_the_choice_of_others() -> None:
    scores = torch.tensor([[1.0, float("nan"), 2.0], [float("nan")] * 3, [3.0, 2.0, 1.0]])
    assert choose_best(scores, 2).tolist() == [[0, 2], [0, 1], [0, 1]]


def test_scores_are_weighted_sums_of_what_is_positive() -> None:
    queries = torch.tensor([[[1.0, 0.0], [0.0, -1.0]]])  # one token, two heads
    keys = torch.tensor([[2.0, 1.0], [-3.0, -4.0]])
    assert score_keys(IndexQueries(queries, torch.tensor([[1.0, -0.5]])), keys).tolist() == [
        [2.0, -2.0]
    ]


def test_a_block_is_as_good_as_its_best_token() -> None:
    """Of those that are seen; the last blocks are better than all others."""
    scores = torch.tensor([[5.0, 1.0, 2.0, 3.0, 9.0, 4.0, 8.0, 8.0]]).expand(3, 2, 8)
    reach, none, best = torch.tensor([[0], [4], [7]]), float("-inf"), float("inf")
    index = BlockIndexSpec(dim=1, size=2, most=2, local=1)
    found = score_blocks(scores, reach, index)[:, 1]
    assert found.tolist() == [[best, none, none, none], [5, 3, best, none], [5, 3, 9, best]]
    found = score_blocks(scores, reach, replace(index, local=2))[:, 0]
    assert found.tolist() == [[best, none, none, none], [5, best, best, none], [5, 3, best, best]]
    found = score_blocks(scores, reach, replace(index, local=0))[:, 0]
    assert found.tolist() == [[5, none, none, none], [5, 3, 9, none], [5, 3, 9, 8]]


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text"])
def test_what_nobody_has_written_is_not_read(checkpoint: Checkpoint, family: str) -> None:
    """A block's last owner may have left NaN, behind a row's end and in the null block."""
    folder = checkpoint(family)
    runner, recorder = load(folder)
    inside: Any = runner
    with torch.inference_mode():
        inside._cache.key.fill_(torch.nan)
        inside._cache.value.fill_(torch.nan)
    rows = sequences(prompts(8)[2:6], shuffle=5, new=6)
    run(runner, rows, chunk=20, joins=2)
    golden = Golden(folder)
    for row in rows:
        assert_greedy(golden, recorder, row)
