"""Stages of a pipeline give what transformers gives, one send from each to the next."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    BLOCK,
    TOLERANCES,
    GreedyRecorder,
    prompts,
    run,
    sequences,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.layer_work import head_work, layer_work
from tgi_trio.model.stages import Stage
from tgi_trio.testing.tiny_families import GEMMA3N_SPARSE

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("work", "head", "runs"),
    [
        ([1] * 4, 0, {1: [0, 1], 0: [2, 3]}),
        ([1] * 5, 0, {1: [0, 1, 2], 0: [3, 4]}),
        ([1] * 8, 0, {1: [0, 1, 2], 2: [3, 4, 5], 0: [6, 7]}),
        ([1] * 8, 4, {1: [0, 1, 2, 3, 4, 5], 0: [6, 7]}),
        ([1] * 3, 9, {1: [0], 2: [1], 0: [2]}),
    ],
)
def test_rank_0_is_the_last_stage_and_has_the_head_as_well(
    work: list[int], head: int, runs: dict[int, list[int]]
) -> None:
    size = len(runs)
    for rank, run_of in runs.items():
        assert list(Stage(rank, size).layers(work, head)) == run_of
    stages = sorted((Stage(rank, size) for rank in range(size)), key=lambda each: each.index)
    assert [each.rank for each in stages] == list(runs)
    assert [each.is_first for each in stages] == [True] + [False] * (size - 1)
    assert all(b.before == a.rank and a.after == b.rank for a, b in pairwise(stages))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 30), st.data())
def test_no_other_cut_has_a_slowest_stage_that_is_faster(
    work: list[int], head: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(work)))
    by_place = sorted((Stage(rank, size) for rank in range(size)), key=lambda each: each.index)
    runs = [each.layers(work, head) for each in by_place]
    assert [layer for run in runs for layer in run] == list(range(len(work)))
    assert all(runs)

    def slowest(ends: tuple[int, ...]) -> int:
        sums = [sum(work[start:end]) for start, end in pairwise((0, *ends, len(work)))]
        return max(*sums[:-1], sums[-1] + head, 0)

    every = combinations(range(1, len(work)), size - 1)
    assert slowest(tuple(run.stop for run in runs[:-1])) == min(map(slowest, every))


def test_the_work_of_a_layer_is_what_a_token_is_multiplied_by(checkpoint: Checkpoint) -> None:
    """Counted by transformers: every parameter that is a matrix, and of experts a token's."""
    for family in ("llama", "gpt2", "qwen3_moe"):
        folder = checkpoint(family)
        spec = decoder_spec(read_config(folder))
        assert spec is not None
        model = AutoModelForCausalLM.from_pretrained(folder)
        config = model.config
        layers = model.get_submodule("transformer.h" if family == "gpt2" else "model.layers")
        for layer, work in zip(layers.children(), layer_work(spec), strict=True):
            sizes = {name: each for name, each in layer.named_parameters() if each.dim() > 1}
            share = 1.0
            if family == "qwen3_moe":
                share = config.num_experts_per_tok / config.num_experts
            counted = [
                each.numel() * (share if ".experts." in f".{name}" else 1)
                for name, each in sizes.items()
            ]
            assert work == sum(counted)
        assert head_work(spec) == config.vocab_size * config.hidden_size


# Its first stage keeps states, the last one none.
LEFT_BEHIND = {"layer_types": ["mamba", "mamba", "attention"]}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        *((family, {}) for family in ("llama", "gemma2", "gpt2", "granitemoehybrid", "qwen3_moe")),
        ("granitemoehybrid", LEFT_BEHIND),
        ("minimax_m3_vl_text", {}),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4], ids=["of a rank", "of two ranks"])
def test_two_stages_say_what_one_process_says(
    checkpoint: Checkpoint, family: str, overrides: dict[str, Any], ranks: int
) -> None:
    """Also where the ranks of a stage divide its layers."""
    folder, recorder, rows = (
        checkpoint(family, **overrides),
        GreedyRecorder(),
        sequences(prompts(8)[4:], shuffle=3, new=6),
    )
    with ranks_of(folder, ranks, recorder, pipeline_stages=2) as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 100 * BLOCK))
        run(runner, rows, chunk=20, joins=2)
    golden = Golden(folder)
    for row in rows:
        assert_greedy(golden, recorder, row, TOLERANCES.get(family, 1e-4))


def test_each_rank_of_a_stage_goes_on_with_its_counterpart() -> None:
    """Four stages of two: ranks 2 and 3 are the first, 0 and 1 the last."""
    every = [Stage.of(rank, 8, 4) for rank in range(8)]
    assert [each.index for each in every] == [3, 3, 0, 0, 1, 1, 2, 2]
    assert [each.place for each in every] == [0, 1] * 4
    assert [each.after for each in every] == [2, 3, 4, 5, 6, 7, 0, 1]
    assert all(every[each.before].after == each.rank for each in every)


@pytest.mark.parametrize(
    ("family", "overrides", "size", "message"),
    [
        ("llama", {}, 9, "layers cannot be cut into 9 stages; choose a smaller"),
        ("gemma3n_text", GEMMA3N_SPARSE, 2, "need more of others than a hidden state"),
        ("zamba2", {}, 2, "need more of others than a hidden state"),
        ("glm_moe_dsa", {}, 2, "need more of others than a hidden state"),  # a choice
        ("qwen4_exp_text", {}, 2, "need more of others than a hidden state"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    checkpoint: Checkpoint, family: str, overrides: dict[str, int], size: int, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        with ranks_of(
            checkpoint(family, **overrides), size, GreedyRecorder(), pipeline_stages=size
        ):
            pass
