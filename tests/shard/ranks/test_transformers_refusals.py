"""What ranks cannot divide of models that run through transformers is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.ranks.transformers_support import (
    EXPERTS,
    PLAIN,
    build_in_turns,
    change_plan,
    check_ranks,
    refused,
)
from tests.shard.torch_backend.models_support import GreedyRecorder, load
from tgi_trio.errors import ConfigurationError, ModelLoadError

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    build_in_turns(monkeypatch)


@pytest.mark.parametrize(
    ("style", "message"),
    [
        ("sequence_parallel", r"splits model\.layers\.0\.mlp\.down_proj by 'sequence_parallel'"),
        ("colwise", "whose plan does not say of 2 shards what one says: "),
        ("replicate", "whose plan does not say of 2 shards what one says: transformers failed"),
    ],
)
def test_a_plan_that_is_unknown_or_wrong_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, style: str, message: str
) -> None:
    change_plan(monkeypatch, mlp__down_proj=style)
    refused(checkpoint(PLAIN), message)


def test_a_plan_that_forgets_a_sum_is_found_out(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing fails: numbers alone are wrong."""
    change_plan(monkeypatch, mlp="replicate")
    check_ranks(checkpoint(PLAIN))  # which changes nothing
    change_plan(monkeypatch, mlp="all_reduce")
    refused(checkpoint(PLAIN), "what one says: its logits differ; use --num-shard 1")


@pytest.mark.parametrize(
    ("family", "changes", "size", "message"),
    [
        ("jetmoe", {}, 2, "'jetmoe' .* no plan of how to split its layers .*--num-shard 1"),
        ("diffllama", {}, 2, "no plan of how to split its layers"),  # of its embedding alone
        ("minimax", EXPERTS, 2, "with its own attention, which ours cannot replace"),
        (PLAIN, {}, 4, "2 key-value heads cannot .* 4 shards; choose a --num-shard that"),
        (PLAIN, {}, 3, "4 attention heads cannot be split over 3 shards"),
        (PLAIN, {"intermediate_size": 129}, 2, r"129 numbers of .*mlp.* over 2 shards"),
        ("bart", {}, 2, "an encoder-decoder that runs through transformers"),
    ],
)
def test_what_cannot_be_split_is_refused(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any], size: int, message: str
) -> None:
    refused(checkpoint(family, **changes), message, size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lora_rank": 8}, "no linears are known by name"),
        ({"quantize": "fp8"}, "--quantize fp8 rounds the weights of models that are computed here"),
        ({"kv_cache_dtype": "fp8_e4m3fn"}, "--kv-cache-dtype fp8_e4m3fn is for the models of the"),
        ({"pipeline_stages": 2}, "whose models are not cut into stages here: leave"),
    ],
)
def test_what_one_rank_refuses_is_refused_by_several(
    checkpoint: Checkpoint, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigurationError, ModelLoadError), match=message):
        with ranks_of(checkpoint(PLAIN), 2, GreedyRecorder(), **options):
            pass


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        (PLAIN, {}, ""),
        (PLAIN, {"num_key_value_heads": 1}, "1 key-value heads cannot be split over 2 shards"),
        ("jetmoe", {}, "no plan of how to split its layers"),
        ("bart", {}, "an encoder-decoder"),
        ("doge", {}, "with its own attention"),
    ],
)
def test_one_rank_says_whether_more_could_divide_its_model(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any], why: str
) -> None:
    said = load(checkpoint(family, **changes))[0].info.undivided
    assert why in said and bool(why) == bool(said)
