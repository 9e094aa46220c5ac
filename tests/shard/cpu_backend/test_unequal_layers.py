"""Layers that differ in the CPU kernels: what test_exact.py does not ask of every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.cpu_backend.kernel_support import UNEQUAL, VARIANT, cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    generated,
    load,
    plan,
    prompts,
    run,
    sequence,
    sequences,
)
from tests.shard.torch_backend.states.test_hybrid_models import (
    NEW,
    Remembered,
    TextDrafter,
    check,
    row,
    serve,
)
from tests.shard.torch_backend.states.test_hybrid_models import run as run_batch
from tgi_trio.shard.cpu_backend import kernel_groups, verified
from tgi_trio.shard.cpu_backend.self_tests import streams as stream_self_test
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.cpu_backend.weight_layout import CacheNumbers
from tgi_trio.shard.media.placed_features import PlacedFeatures
from tgi_trio.testing.tiny_families import GEMMA3N_SPARSE, GEMMA4_E, GEMMA4_MOE

pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoint = Callable[..., Path]
SPARSE = {**UNEQUAL["gemma4_text"], **GEMMA4_MOE, "num_experts": 40, "top_k_experts": 3}
STREAMS = {"head_dim": 32, "hidden_size_per_layer_input": 32, "laurel_rank": 32}
OWN = {**UNEQUAL["gemma4_text"], **GEMMA4_E, "hidden_size_per_layer_input": 32}


def test_embeddings_of_their_own_and_keys_and_values_of_others(checkpoint: Checkpoint) -> None:
    folder = checkpoint("gemma4_text", **OWN)
    golden, batch = Golden(folder), sequences(prompts(8), 3, new=12)
    with cpu_runner(folder, cores=(0, 1)) as (runner, recorder):
        # Of four layers, the last two keep nothing: K and V of two heads of 32, and of 64.
        assert runner.info.layers == 2 and runner.info.kv_bytes_per_token == 4 * 2 * 2 * (32 + 64)
        run(runner, batch, chunk=7, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, 1e-4)
    assert len({tuple(generated(row)) for row in batch}) == len(batch)


def test_experts_beside_an_mlp(checkpoint: Checkpoint) -> None:
    """The router reads a norm of its own, and experts have scales; both kinds have norms behind."""
    folder = checkpoint("gemma4_text", **SPARSE)
    golden, batch = Golden(folder), sequences(prompts(8), 3, new=12)
    with cpu_runner(folder, cores=(0, 1)) as (runner, recorder):
        run(runner, batch, chunk=7, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, 3e-4)
    assert len({tuple(generated(row)) for row in batch}) == len(batch)


@pytest.mark.parametrize(
    "own",
    [{}, {**GEMMA3N_SPARSE, "altup_active_idx": 2, "altup_correct_scale": False}],
    ids=["first", "third, gates above a bound"],
)
def test_several_hidden_states(checkpoint: Checkpoint, own: dict[str, Any]) -> None:
    """Any of them is computed; layers that cut gates have MLPs of widths of their own."""
    folder = checkpoint("gemma3n_text", **STREAMS, **own)
    golden, batch = Golden(folder), sequences(prompts(6), 3, new=8)
    with cpu_runner(folder, cores=(0, 1)) as (runner, recorder):
        assert runner.info.layers == 2  # of four, the last two keep nothing
        run(runner, batch, chunk=7, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, 1e-4)
    assert len({tuple(generated(row)) for row in batch}) == len(batch)


def test_several_hidden_states_of_drafts_and_of_steps_computed_twice(
    checkpoint: Checkpoint,
) -> None:
    folder = checkpoint("gemma3n_text", **STREAMS)
    golden = Remembered(folder)
    whole = {id: [*prompt, *golden.greedy(prompt, NEW)[0]] for id, prompt in enumerate(prompts(4))}
    with cpu_runner(folder, cores=(0, 1)) as (runner, recorder):
        batch = serve(runner, TextDrafter(whole))
        for id, prompt in enumerate(prompts(4)):
            batch.add(row(id, prompt, None))
        texts = run_batch(batch, runner, seed=5)
        for id, prompt in enumerate(prompts(4)):
            assert [*prompt, *texts[id]] == whole[id]
            check(golden, recorder, id, prompt)


def test_streams_that_are_computed_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = stream_self_test._as_large
    monkeypatch.setattr(stream_self_test, "_as_large", lambda *given: 1.1 * right(*given))
    with pytest.raises(UnsupportedError, match="kernels of hidden states failed: SPLIT is"):
        verified.open_kernel_group(kernel_groups.STREAMS, VARIANT)


def test_scales_of_eight_bits_are_those_of_the_layer_that_keeps(checkpoint: Checkpoint) -> None:
    """In one step or in several, K and V are what the cache holds: rounded by one layer's scales,
    read by another.
    """
    folder, found = checkpoint("gemma4_text", **OWN), []
    prompt = prompts(18)[-1]
    for scales in ((0.125, 0.25), (1.0, 1.0)):
        kept = CacheNumbers("fp8_e5m2", [(0.125, 0.25), (0.125, 0.25), scales, scales])
        rows = sequences([prompt], new=3)
        with cpu_runner(folder, kv=kept) as (runner, recorder):
            run(runner, rows, chunk=5)
            found.append(recorder.logits(0))
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def test_images_see_ahead_and_say_nothing_in_their_own_embeddings(checkpoint: Checkpoint) -> None:
    """As torch has it: in layers with a window alone, and whatever token holds their place."""
    folder = checkpoint("gemma4_text", **{**OWN, "num_kv_shared_layers": 0})
    prompt, places, visible = list(range(3, 23)), np.arange(4, 8), np.arange(20)
    visible[places] = 7
    rows = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    torch_runner, torch_recorder = load(folder, 32)
    with cpu_runner(folder) as (runner, recorder):
        for each in (torch_runner, runner):
            step = plan([sequence(0, prompt, [3, 1], new=1)], [20])
            each.step(replace(step, features=PlacedFeatures(places, rows), visible=visible))
        found = [kept.logits(0) for kept in (torch_recorder, recorder)]
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=0)
