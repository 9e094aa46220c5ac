"""Steps with prompts as recordings where layers keep states: tokens of the CPU, and one launch."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    REQUEST,
    agree,
    drive,
    start,
)
from tgi_trio.shard.machine.garbage import pause_collection  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.shard.torch_backend.recordings import mixed_plans  # noqa: E402
from tgi_trio.shard.torch_backend.states import (  # noqa: E402
    delta_rule,
    mamba2,
    recurrent_gate,
    recurrent_gate_layer,
)
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

BUDGET = 12  # tokens of a step
# The second one ends in the middle of a chunk, beside the last one's first tokens.
TEXTS = [[3 + (31 * i + 7 * j) % 500 for j in range(n)] for i, n in enumerate((9, 2, 17, 5))]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have some of them in a step."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)
    for module in (delta_rule, mamba2, recurrent_gate):
        monkeypatch.setattr(module, "_CHUNK", 4)


# Convolutions alone, delta rules, Mamba-2 with norms and multipliers of all kinds, Mamba with
# and without norms, gates; scans of all kinds are states/test_scans.py's.
FAMILIES = (
    *(
        "lfm2",
        "qwen3_5_text",
        "kimi_linear",
        "olmo_hybrid",
        "bamba",
        "nemotron_h",
        "falcon_h1",
        "zamba2",
        "granitemoehybrid",
    ),
    *("mamba2", "mamba", "falcon_mamba", "jamba", "recurrent_gemma"),
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_with_prompts_is_one_launch(checkpoint: Callable[..., Path], family: str) -> None:
    folder, request = checkpoint(family), replace(REQUEST, max_prefill_tokens=BUDGET)
    expected = drive(start(folder, "cpu"), TEXTS, [{}] * 4, budget=BUDGET)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (1, 4), request=request)
        ours = drive(runner, TEXTS, [{}] * 4, device=device, budget=BUDGET)
    agree(ours, expected)
    assert len(ours.prefills) > 3
    for counts in (*ours.prefills, *ours.decodes):
        assert counts.replays == 1 and not counts.launches, counts


def test_more_rows_in_chunks_than_there_is_room_for_are_launched(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch's operations scan."""
    monkeypatch.setattr(mixed_plans, "_MOST_ROWS_IN_CHUNKS", 1)
    monkeypatch.setattr(recurrent_gate_layer, "runs_kernels", lambda _: False)
    folder, request = checkpoint("recurrent_gemma"), replace(REQUEST, max_prefill_tokens=BUDGET)
    expected = drive(start(folder, "cpu"), TEXTS, [{}] * 4, budget=BUDGET)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (4,), request=request)
        ours = drive(runner, TEXTS, [{}] * 4, device=device, budget=BUDGET)
    agree(ours, expected)
    assert {counts.replays for counts in ours.prefills} == {0, 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "bamba", "jamba", "recurrent_gemma"])
def test_kernels_have_room_for_any_rows(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(mixed_plans, "_MOST_ROWS_IN_CHUNKS", 1)
    monkeypatch.setattr(mixed_plans, "_MOST_TOKENS_IN_TURNS", BUDGET - 1)
    folder, request = checkpoint(family), replace(REQUEST, max_prefill_tokens=BUDGET)
    expected = drive(start(folder, "cpu"), TEXTS, [{}] * 4, budget=BUDGET)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (4,), request=request)
        ours = drive(runner, TEXTS, [{}] * 4, device=device, budget=BUDGET)
    agree(ours, expected)
    assert {counts.replays for counts in ours.prefills} == {1}


def test_a_second_warm_up_keeps_no_states_of_the_first(checkpoint: Callable[..., Path]) -> None:
    folder, request = checkpoint("lfm2"), replace(REQUEST, max_prefill_tokens=BUDGET)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (1,), request=request)
        assert isinstance(runner, TorchRunner) and runner._pool is not None
        old = [weakref.ref(state) for state in runner._pool.layers[0].values()]
        with pause_collection(), device.idle():
            runner.warm_up(request)
            assert old and all(state() is None for state in old)


def test_pinned_memory_stays_when_recordings_are_forgotten(
    checkpoint: Callable[..., Path],
) -> None:
    """Giving it back would end the process where the device has been lost meanwhile."""
    folder, request = checkpoint("lfm2"), replace(REQUEST, max_prefill_tokens=BUDGET)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (1,), request=request)
        with device.idle():
            runner.warm_up(request)
        assert not device.counts.unpinned
