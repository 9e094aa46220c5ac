"""Two ranks over stand-in devices: tokens of the CPU, nothing that either host waits for."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.device_kinds import KINDS, REPLAYS, SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import prompts

need_triton()

from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402  (Triton's)
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    REQUEST,
    Foretelling,
    LayerOutput,
    TakingTurns,
    agree,
    drive,
    small_device,
    start,
)
from tgi_trio.shard.runner import GroupBroken  # noqa: E402
from tgi_trio.shard.torch_backend import device_parts  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402

TEXTS = prompts(3, longest=20)
GREEDY: list[dict[str, Any]] = [{}, {}, {}]
# Convolutions, Mamba-2 with a group for each rank and one for both, Mamba, gates.
KEEPING: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {}),
    "bamba": ("bamba", {}),
    "a shared group": ("bamba", {"mamba_n_groups": 1}),
    "jamba": ("jamba", {}),
    "recurrent_gemma": ("recurrent_gemma", {}),
}
SMALL_STEPS = replace(REQUEST, max_prefill_tokens=12)


@pytest.fixture
def device(checkpoint: Callable[..., Path]) -> Iterator[StandInDevice]:
    for family, changes in (("olmo2", {}), *KEEPING.values()):
        checkpoint(family, **changes)  # transformers makes them without one
    with small_device(checkpoint) as stand_in:
        yield stand_in


def check_follower(steps: list[Counts], ours: LayerOutput, kind: str = "plain") -> None:
    """Nothing was waited for there but events, and the steps that rank 0 replayed were replays."""
    assert not any(counts.waits for counts in steps), steps
    assert sum(counts.event_waits for counts in steps) <= len(steps)
    recorded = [counts for counts in steps if counts.replays]
    assert len(recorded) == sum(bool(each.replays) for each in (*ours.decodes, *ours.prefills))
    for counts in recorded:
        assert counts.replays == 1, counts
        assert not counts.launches or kind == "prompt logprobs", counts


# Rank 0 chooses, as a device alone does for every kind (test_device_requests.py): here what is
# chosen within a step, what waits for masks, and what wants the scores of a whole prompt.
@pytest.mark.parametrize("kind", ["plain", "grammar", "prompt logprobs"])
def test_nothing_waits_and_the_tokens_are_the_cpu_s(
    checkpoint: Callable[..., Path], device: StandInDevice, kind: str
) -> None:
    folder, asked = checkpoint("llama", **SMALL), KINDS[kind]
    expected = drive(start(folder, "cpu", grammars=TakingTurns()), TEXTS, asked, budget=11)
    with two_ranks(folder, device, (4,), TakingTurns(), SMALL_STEPS) as (runner, steps):
        ours = drive(runner, TEXTS, asked, device=device, budget=11)
    agree(ours, expected)
    for counts in ours.decodes:
        assert counts.replays == REPLAYS[kind] and not counts.launches, counts
    assert len(ours.prefills) > 1
    for counts in ours.prefills:
        assert counts.replays == 1 and (kind != "plain" or not counts.launches), counts
    check_follower(steps, ours, kind)


@pytest.mark.parametrize("slow", [("cuda:0",), ("cuda:0", "cuda:1")], ids=["one", "both"])
def test_ranks_agree_on_what_is_recorded(
    checkpoint: Callable[..., Path],
    device: StandInDevice,
    monkeypatch: pytest.MonkeyPatch,
    slow: tuple[str, ...],
) -> None:
    """Steps with prompts, unless a replay takes longer than all hosts take to launch it."""
    monkeypatch.setattr(
        device_parts, "ReplayTime", lambda where: lambda _: float(str(where) in slow) * 1e9
    )
    folder, text = checkpoint("llama", **SMALL), [[3, 4, 5, 6, 7]]
    expected = drive(start(folder, "cpu"), text, [{}], 2, late=0)
    with two_ranks(folder, device, (1,), request=SMALL_STEPS) as (runner, steps):
        ours = drive(runner, text, [{}], 2, device=device, late=0)
    agree(ours, expected)
    assert [counts.replays for counts in ours.prefills] == [2 - len(slow)]
    check_follower(steps, ours)


def test_steps_that_are_not_recorded_know_the_tokens_as_well(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    """Of a model whose norms are over the heads of all ranks."""
    folder, asked = checkpoint("olmo2"), GREEDY
    expected = drive(start(folder, "cpu"), TEXTS, asked, budget=11)
    with two_ranks(folder, device) as (runner, steps):
        ours = drive(runner, TEXTS, asked, device=device, budget=11)
    agree(ours, expected)
    check_follower(steps, ours)
    assert not any(counts.replays for counts in steps)
    # Prefills know all tokens, decodes that are launched ahead get them from rank 0's device.
    assert {counts.launches["broadcast"] for counts in steps} == {0, 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "changes"), KEEPING.values(), ids=KEEPING)
def test_states_are_read_and_written_by_recordings_of_all_ranks(
    checkpoint: Callable[..., Path], device: StandInDevice, family: str, changes: dict[str, Any]
) -> None:
    folder, asked = checkpoint(family, **changes), GREEDY
    expected = drive(start(folder, "cpu"), TEXTS[1:], asked)
    with two_ranks(folder, device, (2,)) as (runner, steps):
        ours = drive(runner, TEXTS[1:], asked, device=device)
    agree(ours, expected)
    assert all(counts.replays for counts in ours.decodes)
    check_follower(steps, ours)


def test_drafts_are_decodes_of_a_recording(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    folder, asked = checkpoint("llama", **SMALL), KINDS["penalties"]
    expected = drive(start(folder, "cpu"), TEXTS, asked, 6)
    with two_ranks(folder, device, (4, 12), speculate=2) as (runner, steps):
        drafter = Foretelling(expected.tokens)
        ours = drive(runner, TEXTS, asked, 6, device=device, drafter=drafter)
    agree(ours, expected)
    assert ours.drafts > 5 and ours.steps < expected.steps
    assert all(counts.replays for counts in (*ours.decodes, *ours.prefills))
    check_follower(steps, ours)


def open_files() -> Counter[str]:
    """Return what this process has open, by name; sockets and the like with their numbers."""
    found = Counter[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # what the folder was listed with
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return found


def test_what_two_ranks_had_open_is_closed_with_them(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    """At once: recordings hold one another, and garbage may be collected much later."""

    def serve() -> None:
        with two_ranks(checkpoint("llama", **SMALL), device, (1,)) as (runner, _):
            drive(runner, TEXTS[:1], GREEDY[:1], 2, device=device)

    gc.collect()
    gc.disable()
    try:
        before = open_files()
        serve()
        assert not open_files() - before
    finally:
        gc.enable()


def test_a_runner_proves_itself_on_all_ranks(
    checkpoint: Callable[..., Path], device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(checkpoint("llama", **SMALL), device, (1,)) as (runner, steps):
        runner.prove_sound()
        assert len(steps) == 1
        own: Any = runner._runner

        def broken(plan: object) -> None:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(own, "launch", broken)
        monkeypatch.setattr(runner._followers, "compute", lambda plan: None)
        with pytest.raises(GroupBroken, match="a step failed: RuntimeError: the device is lost"):
            runner.prove_sound()
