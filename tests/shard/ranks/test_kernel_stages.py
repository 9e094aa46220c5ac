"""Stages in the CPU kernels say, bit for bit, what one process of the same kernels says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.ranks.rank_processes import Ranks, groups, kernel_ranks_of
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    generated,
    prompts,
    run,
    sequences,
)
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard import backend
from tgi_trio.shard.cpu_backend import loading
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.machine.cores import share_cores
from tgi_trio.shard.runner import Runner

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")

WARMUP = WarmupRequest(64, 256, 16, 100 * BLOCK)
PROMPTS = prompts(8)[3:]
# The last of two stages keeps states and no K and V, or K and V and no states.
HYBRID = FITTING["granitemoehybrid"]
# Of which two ranks can have parts that fit the kernels.
DIVIDED = {"head_dim": 32, "intermediate_size": 128}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", 2, FITTING["llama"], {}),
    "three": ("llama", 3, FITTING["llama"] | {"num_hidden_layers": 4}, {}),
    "eight bits": ("llama", 2, FITTING["llama"], {"quantize": "eetq", "dtype": "bfloat16"}),
    "gemma2": ("gemma2", 2, FITTING["gemma2"], {}),
    "gpt2": ("gpt2", 2, FITTING["gpt2"], {}),
    "opt": ("opt", 2, FITTING["opt"], {"quantize": "q8_0"}),  # linears at both ends
    "qwen3_moe": ("qwen3_moe", 2, FITTING["qwen3_moe"], {}),
    "blocks": ("minimax_m3_vl_text", 2, FITTING["minimax_m3_vl_text"], {}),
    "states last": ("granitemoehybrid", 2, HYBRID, {}),
    "states first": (
        *("granitemoehybrid", 2, HYBRID | {"layer_types": ["mamba", "mamba", "attention"]}),
        {},
    ),
}


def play(runner: Runner, recorder: GreedyRecorder) -> list[tuple[list[int], torch.Tensor]]:
    """Return the tokens of all prompts, which come in pieces and one after the other, and the
    logits that they were chosen from.
    """
    runner.warm_up(WARMUP)
    rows = sequences(PROMPTS, shuffle=3, new=8)
    run(runner, rows, chunk=20, joins=2)
    return [(generated(row), recorder.logits(row.id)) for row in rows]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_stages_say_what_one_process_says(checkpoint: Checkpoint, case: str) -> None:
    family, size, overrides, options = CASES[case]
    folder, alone, staged = checkpoint(family, **overrides), GreedyRecorder(), GreedyRecorder()
    settings = ShardSettings(model_path=folder, cpu_threads=1, **options)
    one = load_cpu_runner(settings, read_config(folder), sampler=alone)
    expected = play(one, alone)
    weights = one.warm_up(WARMUP).weight_bytes
    one.close()
    with kernel_ranks_of(folder, size, staged, stages=size, **options) as (ranks, parts):
        found = play(ranks, staged)
        check_parts(ranks, [part.warm_up for part in parts], weights)
        assert ranks.info.backend.endswith(f"one of {size} stages)")
    for (tokens, logits), (own_tokens, own_logits) in zip(expected, found, strict=True):
        assert tokens == own_tokens
        assert torch.equal(logits, own_logits)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_stages_whose_layers_are_divided_say_what_one_process_says(
    checkpoint: Checkpoint, family: str
) -> None:
    """Two stages of two ranks; sums are made in another order than by one rank."""
    folder, alone, staged = checkpoint(family, **DIVIDED), GreedyRecorder(), GreedyRecorder()
    one = load_cpu_runner(
        ShardSettings(model_path=folder, cpu_threads=1), read_config(folder), sampler=alone
    )
    expected = play(one, alone)
    one.close()
    with kernel_ranks_of(folder, 4, staged, stages=2) as (ranks, parts):
        found = play(ranks, staged)
        assert ranks.info.backend.endswith("one of 2 stages of 2 ranks)")
        results = ranks._together(lambda rank: parts[rank].warm_up(WARMUP))
        assert len({(each.blocks, each.state_slots) for each in results}) == 1
    for (tokens, logits), (own_tokens, own_logits) in zip(expected, found, strict=True):
        assert tokens == own_tokens
        torch.testing.assert_close(logits, own_logits, atol=1e-4, rtol=1e-4)


def check_parts(ranks: Ranks, warm_ups: list[Callable[..., Any]], whole: int) -> None:
    """Check that each has room for as much, and the weights of its own layers alone."""
    results = ranks._together(lambda rank: warm_ups[rank](WARMUP))
    assert len({(each.blocks, each.state_slots) for each in results}) == 1
    held = [each.weight_bytes for each in results]
    assert all(0 < each < whole for each in held)
    # A tied head is packed on the last one, and rows of the embedding are on the first.
    assert sum(held) == whole


def test_what_cannot_be_cut_is_refused(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama", **FITTING["llama"])
    with pytest.raises(ModelLoadError, match="layers cannot be cut into 3 stages"):
        with kernel_ranks_of(folder, 3, GreedyRecorder(), stages=3):
            pass


@pytest.mark.parametrize("asked", ["auto", "kernels"])
def test_all_stages_are_computed_with_the_kernels_or_none(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str,
) -> None:
    folder = checkpoint("llama", **FITTING["llama"])
    real = loading.load_cpu_runner

    def fail_on_rank_1(settings: ShardSettings, *given: Any, **named: Any) -> Any:
        if settings.rank == 1:
            raise UnsupportedError("this processor has no vectors")
        return real(settings, *given, **named)

    monkeypatch.setattr(loading, "load_cpu_runner", fail_on_rank_1)

    def load_rank(rank: int) -> str:
        settings = ShardSettings(
            model_path=folder,
            cpu_threads=1,
            cpu_backend=asked,
            pipeline_stages=2,
            rank=rank,
            world_size=2,
        )
        try:
            return backend.load_runner(settings, ranks=members[rank]).info.backend
        except ConfigurationError as error:
            return str(error)

    affinity = os.sched_getaffinity(0)
    with groups(2, 2) as (together, members):
        found = together(load_rank)
    assert os.sched_getaffinity(0) == affinity
    if asked == "auto":
        assert not any("kernels" in each for each in found)
        said = capsys.readouterr().err
        assert "another rank cannot compute its part with them" in said
        assert "this processor has no vectors" in said
    else:
        assert "another rank cannot compute its part with them" in found[0]
        assert "this processor has no vectors" in found[1]


def test_ranks_share_out_the_processors_of_a_machine() -> None:
    cores = [0, 2, 4, 6]
    assert [share_cores(cores, place, 2) for place in range(2)] == [[0, 2], [4, 6]]
    assert [share_cores(cores, place, 2, 1) for place in range(2)] == [[0], [2]]
    assert [share_cores(cores, place, 3, 2) for place in range(3)] == [[0, 2], [4, 6], [0, 2]]
    assert [share_cores([5], place, 2) for place in range(2)] == [[5], [5]]
    assert share_cores(cores, 0, 1) == cores
    assert share_cores(cores, 0, 1, 3) == [0, 2, 4]
    assert share_cores(cores, 0, 1, 9) == cores
