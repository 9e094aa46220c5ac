"""Ranks that divide every layer in the CPU kernels give what transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.model.support import Asked
from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.ranks.rank_processes import groups, kernel_ranks_of
from tests.shard.test_quantised_models import STORED
from tests.shard.torch_backend.golden import Golden, assert_greedy, check_prompt_logprobs
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    generated,
    prompts,
    run,
    sequences,
)
from tests.support.quantised import quantise
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_undivided
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.ranks import exchange, portions
from tgi_trio.shard.ranks.portions import Portions

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = FITTING["llama"]
WARMUP = WarmupRequest(64, 256, 16, 100 * BLOCK)
# Biases that one rank adds; norms behind branches; fewer KV heads than ranks; parallel branches
# that both join; joined matrices; a scaled residual stream; norms of heads, each with its weights;
# sums that are normalised, and narrower embeddings.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 2, LLAMA),
    "four": ("llama", 4, LLAMA | {"vocab_size": 509}),
    "gemma2": ("gemma2", 2, FITTING["gemma2"]),
    "gemma": ("gemma", 2, FITTING["gemma"]),
    "gpt_neox": ("gpt_neox", 2, FITTING["gpt_neox"]),
    "gpt2": ("gpt2", 2, FITTING["gpt2"]),
    "phi3": ("phi3", 2, {"hidden_size": 128}),
    "granite": ("granite", 2, FITTING["granite"]),
    "cohere": ("cohere", 2, FITTING["cohere"]),
    "opt": ("opt", 2, FITTING["opt"]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_ranks_say_what_transformers_says(checkpoint: Checkpoint, case: str) -> None:
    family, size, overrides = CASES[case]
    folder, recorder = checkpoint(family, **overrides), GreedyRecorder()
    golden, rows = Golden(folder), sequences(prompts(8, vocab=509)[3:], shuffle=3, new=8)
    with kernel_ranks_of(folder, size, recorder) as (ranks, _):
        ranks.warm_up(WARMUP)
        run(ranks, rows, chunk=20, joins=2)
        assert ranks.info.backend.endswith(f"one of {size} ranks)")
        for row in rows:
            assert_greedy(golden, recorder, row, 2e-4)
        if case == "llama":
            check_prompt_logprobs(ranks, golden, prompts(8)[5:7], 20)


def test_codes_are_divided_at_the_borders_of_their_blocks(checkpoint: Checkpoint) -> None:
    folder, alone, divided = checkpoint("llama", **LLAMA), GreedyRecorder(), GreedyRecorder()
    ways: dict[str, Any] = {"quantize": "q8_0", "dtype": "float32"}
    settings = ShardSettings(model_path=folder, cpu_threads=1, **ways)
    one = load_cpu_runner(settings, read_config(folder), sampler=alone)
    expected, found = (sequences(prompts(8)[3:], new=8) for _ in range(2))
    one.warm_up(WARMUP)
    run(one, expected, joins=2)
    one.close()
    with kernel_ranks_of(folder, 2, divided, **ways) as (ranks, _):
        ranks.warm_up(WARMUP)
        run(ranks, found, joins=2)
        assert "q8_0" in ranks.info.backend
    for row, own in zip(expected, found, strict=True):
        assert generated(row) == generated(own)
        logits = alone.logits(row.id), divided.logits(own.id)
        torch.testing.assert_close(*logits, atol=1e-3, rtol=0.0)


@pytest.mark.parametrize(
    "stored", ["int8", "fp8 by channel", "torchao, halves of bytes", "torchao, int8", "quark, int4"]
)
def test_quantised_weights_are_divided(checkpoint: Checkpoint, tmp_path: Path, stored: str) -> None:
    """Of which some have a scale per output, whatever inputs a rank has."""
    folder = quantise(checkpoint("llama", **LLAMA), tmp_path / "q", *STORED[stored])
    golden, rows, recorder = (
        Golden(folder / "plain"),
        sequences(prompts(4), new=8),
        GreedyRecorder(),
    )
    with kernel_ranks_of(folder, 2, recorder, dtype="float32", activations=16) as (ranks, _):
        ranks.warm_up(WARMUP)
        run(ranks, rows)
        for row in rows:
            assert_greedy(golden, recorder, row, tolerance=5e-3)


@pytest.mark.parametrize("here", [True, False])
def test_sums_and_joined_parts(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    """In pieces and at once, through shared memory and over gloo; the same on every rank."""
    for module in (exchange, portions):
        monkeypatch.setattr(module, "PLACE", 70)
    if not here:  # each is on another machine, where the same path is another file's
        monkeypatch.setattr(exchange, "_this_machine", count(1).__next__)
    draw = np.random.default_rng(3)
    parts = draw.standard_normal((3, 5, 150)).astype(np.float32)
    with groups(3) as (together, members):
        ranks = together(lambda rank: Portions(members[rank]))

        def add_up(parts: NDArray[np.float32], rank: int) -> None:
            ranks[rank].add_up(parts[rank])

        def join(own: list[NDArray[np.float32]], size: int, rank: int) -> NDArray[np.float32]:
            return ranks[rank].gather(own[rank], size)

        assert [each._exchange is not None for each in ranks] == [here] * 3
        for width in (1, 70, 71, 150):
            sums = parts[:, 0, :width].copy()
            together(partial(add_up, sums))
            np.testing.assert_allclose(sums[0], parts[:, 0, :width].sum(axis=0), rtol=1e-5)
            assert (sums == sums[0]).all()
        for vocabulary in (100, 99, 450):
            width = -(-vocabulary // 3)
            whole = draw.standard_normal((5, vocabulary)).astype(np.float32)
            own = [whole[:, rank * width : (rank + 1) * width] for rank in range(3)]
            assert all((found == whole).all() for found in together(partial(join, own, vocabulary)))


@pytest.mark.parametrize(
    ("family", "overrides", "ranks", "reason"),
    [
        ("llama", {}, 2, "heads of 16"),
        ("llama", {"head_dim": 32, "intermediate_size": 96}, 2, "48 numbers of an MLP"),
        ("qwen3_moe", FITTING["qwen3_moe"], 2, "with experts"),
        ("granitemoehybrid", FITTING["granitemoehybrid"], 2, "with a state"),
        ("olmo2", FITTING["olmo2"], 2, "with a norm of all heads together"),
        ("bloom", FITTING["bloom"], 2, "with linear biases"),
    ],
)
def test_what_is_not_divided_is_said(
    checkpoint: Checkpoint, family: str, overrides: dict[str, Any], ranks: int, reason: str
) -> None:
    folder = checkpoint(family, **overrides)
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    assert find_undivided(spec, 1) is None
    assert reason in str(find_undivided(spec, ranks))
    with pytest.raises(UnsupportedError, match=reason):
        with kernel_ranks_of(folder, ranks, GreedyRecorder()):
            pass
    asked = Asked(num_shard=ranks, cpu_backend="kernels")
    with pytest.raises(ConfigurationError, match=reason):
        check_model(read_config(folder), asked)
