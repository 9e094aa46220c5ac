"""Which blocks an index chooses, and that nothing of what it leaves out is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import load, prompts, run, sequences
from tgi_trio.model.specs.pooled_index import PooledIndexSpec
from tgi_trio.shard.torch_backend.layers.attention.pooled_index import PooledIndex, score_pooled
from tgi_trio.shard.torch_backend.layers.norm import Norm

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


def test_scores_are_sums_of_what_is_positive() -> None:
    queries = torch.tensor([[[1.0, 0.0], [0.0, -1.0]]])  # one token, two heads
    keys = torch.tensor([[2.0, 1.0], [-3.0, -4.0], [1.0, -2.0]])
    assert score_pooled(queries, keys).tolist() == [[2.0, 4.0, 3.0]]


def test_the_key_of_a_block_is_the_norm_of_its_tokens_mean() -> None:
    norm = Norm("rms", torch.tensor([1.0, 2.0]), None, 0.0, 2)
    scorer = PooledIndex(PooledIndexSpec(1, 2, 2, 1), query_norm=norm, key_norm=norm, number=0)
    keys = torch.tensor([[[1.0, 6.0], [5.0, 2.0]]])  # mean 3 and 4, their root mean square 3.5355
    torch.testing.assert_close(scorer.join(keys), torch.tensor([[[0.6, 1.6]]]) * 2**0.5)
    queries, own = scorer.queries(torch.tensor([[3.0, 4.0, 5.0, 6.0]]))
    torch.testing.assert_close(queries, torch.tensor([[[0.6, 1.6]]]) * 2**0.5)
    assert own.tolist() == [[[5.0, 6.0]]]  # nothing is done to it before its block is whole


@pytest.mark.parametrize("size", [4, 24])  # within a page of the cache, and over several
def test_what_nobody_has_written_is_not_read(checkpoint: Checkpoint, size: int) -> None:
    """A page's last owner may have left NaN, behind a row's end and in the null block."""
    budget = {"indexer_compress_ratio": size, "indexer_budget": 24 - 24 % size}
    folder = checkpoint("qwen4_exp_text", **budget)
    runner, recorder = load(folder)
    inside: Any = runner
    with torch.inference_mode():
        inside._cache.key.fill_(torch.nan)
        inside._cache.value.fill_(torch.nan)
    rows = sequences(prompts(8)[2:], shuffle=5, new=6)
    run(runner, rows, chunk=20, joins=2)
    golden = Golden(folder)
    for row in rows:
        assert_greedy(golden, recorder, row)


def test_index_keys_take_their_part_of_the_cache(checkpoint: Checkpoint) -> None:
    runner, _ = load(checkpoint("qwen4_exp_text"))
    # One layer attends: two heads of 16 numbers in K and in V, and an index key of 16, in float32;
    # and the three positions of a token are int32.
    assert runner.info.kv_bytes_per_token == (2 * 2 * 16 + 16 + 3) * 4
