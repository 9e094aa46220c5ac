"""Steps with prompts as recordings, over a stand-in device: tokens of the CPU, and one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.speculation.eagle_support import eagle
from tests.shard.torch_backend.device_kinds import KINDS, SMALL
from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    REQUEST,
    Foretelling,
    TakingTurns,
    agree,
    drive,
    small_device,
    start,
)
from tgi_trio.shard.runner import Runner  # noqa: E402
from tgi_trio.shard.torch_backend import device_parts  # noqa: E402
from tgi_trio.shard.torch_backend.recordings.recorded_steps import Graph  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402

TEXTS = [[3 + (31 * i + 7 * j) % 500 for j in range(n)] for i, n in enumerate((9, 2, 18))]
BUDGET = 7  # tokens of a step
REQUESTED = replace(REQUEST, max_prefill_tokens=8)
# Launches behind a recorded step with prompts: a choice that waits for masks, log-probabilities.
BEHIND = {"grammar", "watermark", "prompt logprobs"}


@pytest.fixture(scope="module")
def device(checkpoint: Callable[..., Path]) -> Iterator[StandInDevice]:
    with small_device(checkpoint) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def host(checkpoint: Callable[..., Path], device: StandInDevice) -> Runner:
    return start(checkpoint("llama", **SMALL), "cpu", grammars=TakingTurns())


@pytest.fixture(scope="module")
def recorded(checkpoint: Callable[..., Path], device: StandInDevice) -> Runner:
    """A runner for all tests: kinds of requests follow one another on it, as on a server."""
    folder, grammars = checkpoint("llama", **SMALL), TakingTurns()
    return start(folder, "cuda:0", (1, 12), grammars, REQUESTED, speculate=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_prompts_is_one_launch(
    host: Runner, recorded: Runner, device: StandInDevice, kind: str
) -> None:
    """In chunks, alone and beside decodes, of which some end no prompt, and launched ahead."""
    asked = KINDS[kind]
    expected = drive(host, TEXTS, asked, budget=BUDGET)
    ours = drive(recorded, TEXTS, asked, device=device, budget=BUDGET)
    agree(ours, expected)
    assert len(ours.prefills) >= 5
    for counts in ours.prefills:
        assert counts.replays == 1 and (kind in BEHIND or not counts.launches), counts
        assert not counts.launches["attend_tile"]


def test_drafts_beside_prompts(host: Runner, recorded: Runner, device: StandInDevice) -> None:
    asked = KINDS["penalties"]
    expected = drive(host, TEXTS, asked, 6, budget=BUDGET)
    drafter = Foretelling(expected.tokens)
    ours = drive(recorded, TEXTS, asked, 6, device=device, drafter=drafter, budget=BUDGET)
    agree(ours, expected)
    assert ours.drafts > 5
    assert all(counts.replays == 1 and not counts.launches for counts in ours.prefills)


def test_biases_that_no_recording_has_room_for(
    host: Runner, recorded: Runner, device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tgi_trio.shard.torch_backend.sampling import device_sampler

    monkeypatch.setattr(device_sampler, "_KNOWN_ENTRIES", 1)
    asked = [{"logit_bias": ((5, 3.0), (9, 2.5)), "repetition_penalty": 1.3}] * 3
    expected = drive(host, TEXTS, asked, budget=BUDGET)
    ours = drive(recorded, TEXTS, asked, device=device, budget=BUDGET)
    agree(ours, expected)
    behind = [counts for counts in ours.prefills if counts.launches]
    assert behind and all(counts.launches["choose_tokens"] == 1 for counts in behind)
    assert all(counts.replays == 1 for counts in ours.prefills)


def test_larger_steps_are_launched(host: Runner, recorded: Runner, device: StandInDevice) -> None:
    expected = drive(host, TEXTS, KINDS["plain"], budget=9)
    ours = drive(recorded, TEXTS, KINDS["plain"], device=device, budget=9)
    agree(ours, expected)
    assert {counts.replays for counts in ours.prefills} == {0, 1}


def test_what_takes_longer_than_its_launches_is_not_recorded(
    checkpoint: Callable[..., Path], device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first of so many tokens is measured."""
    measured: list[Graph] = []

    class Slow:
        def __init__(self, where: torch.device) -> None: ...

        def __call__(self, graph: Graph) -> float:
            measured.append(graph)
            return 1e9 if len(measured) == 1 else 0.0

    monkeypatch.setattr(device_parts, "ReplayTime", Slow)
    request = replace(REQUEST, max_prefill_tokens=65)
    runner = start(checkpoint("llama", **SMALL), "cuda:0", (1, 4), request=request)
    assert len(measured) == 2
    for lengths, replays in (((60, 5), 0), ((30, 30), 1)):
        texts = [[5] * n for n in lengths]
        ours = drive(runner, texts, [{}, {}], 1, device=device, late=0)
        assert [counts.replays for counts in ours.prefills] == [replays]


def test_what_nobody_launches_is_not_recorded(
    checkpoint: Callable[..., Path], device: StandInDevice, tmp_path: Path
) -> None:
    """Where a smaller model reads hidden states between two steps, the host waits for each."""
    folder = checkpoint("llama", num_hidden_layers=2)
    smaller = {"draft_model": eagle(tmp_path, folder, 512), "speculate": 2}
    cases: list[tuple[dict[str, Any], bool]] = [({}, True), (smaller, False)]
    for settings, listed in cases:
        device.counts = Counts()
        start(folder, "cuda:0", (1,), request=REQUESTED, **settings)
        assert device.counts.recordings and bool(device.counts.launches["list_tiles"]) == listed
