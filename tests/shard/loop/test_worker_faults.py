"""The loop when something fails: a row, a command, a step, the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.shard.loop.scripted_router import (
    BLOCK,
    PROMPT,
    ScriptedRouter,
    answer,
    channel,
    fake_shard,
    row,
)
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import StateGrant
from tgi_trio.shard.contract import (
    RowResult,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.soundness import IN_A_ROW, RunnerBroken
from tgi_trio.testing.fake_model import FakeRunner, FakeSettings
from tgi_trio.testing.fake_shard import FakeShard


def test_a_row_that_cannot_be_run_faults_and_the_others_of_its_command_run() -> None:
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 5), row(2, [1000], 5), row(3, [8, 9], 5, blocks=[999]))
        router.finished(1)
    assert router.tokens(1) == answer(PROMPT, 5)
    assert "from 1000 to 1000; the model has 0 to 999" in (router.fault(2) or "")
    assert "KV blocks [999]" in (router.fault(3) or "")
    assert router.faults[0].sequence == 2


def test_an_extension_by_blocks_that_do_not_exist_faults_the_sequence() -> None:
    with fake_shard() as (router, _):
        router.prefill(row(1, PROMPT, 10, blocks=[1]))
        router.until(lambda report: report.stalled_rows == 1)
        report = router.acknowledged(router.extend(1, 0))
    assert "KV blocks [0]" in (router.fault(1) or "")
    assert report.held == 0


def test_prefill_before_warm_up_faults() -> None:
    with channel() as (endpoints, router), FakeShard(endpoints.spec):
        router.hello()
        router.receive()
        router.end.release()
        router.acknowledged(router.prefill(row(1, PROMPT, 5)))
    assert "before WARMUP" in (router.fault(1) or "")


@pytest.mark.parametrize("culprits", [{1}, {7}, {3, 4}, {1, 2, 3, 5, 6, 7}])
def test_rows_that_fail_alone_fault_and_the_others_go_on(culprits: set[int]) -> None:
    prompts = {i: [i + 10, 666] if i in culprits else [i + 10, 5] for i in range(1, 8)}
    with fake_shard(fail_token=666) as (router, _):
        router.prefill(*(row(i, prompt, 6) for i, prompt in prompts.items()))
        router.finished(*prompts)
        router.acknowledged(router.prefill(row(8, PROMPT, 6)))
        router.finished(8)
    for i, prompt in prompts.items():
        if i in culprits:
            assert "RuntimeError: token 666 cannot be computed" in (router.fault(i) or "")
            assert router.tokens(i) == []
        else:
            assert router.tokens(i) == answer(prompt, 6)
            assert [r.step for r in router.rows(i)] == list(range(1, 7))
    assert router.tokens(8) == answer(PROMPT, 6)
    assert not any(report.recovered for report in router.reports)


def test_a_step_that_raises_and_can_be_computed_in_parts_fails_nobody_and_says_so() -> None:
    prompts = {i: [i + 10, 5] for i in range(1, 6)}
    with fake_shard(fail_above=2) as (router, _):
        router.prefill(row(9, PROMPT, 3))
        router.finished(9)
        router.prefill(*(row(i, prompt, 6) for i, prompt in prompts.items()))
        router.finished(*prompts)
    for i, prompt in prompts.items():
        assert router.tokens(i) == answer(prompt, 6)
        assert router.fault(i) is None
    steps = [report.recovered for report in router.reports if report.sequence]
    assert steps == [0] * 3 + [1] * 6


# --- a runner that is broken ---------------------------------------------------------------------


@contextmanager
def ending_shard(**settings: object) -> Iterator[tuple[ScriptedRouter, FakeShard]]:
    """A warmed-up fake shard; leaving waits until its loop has ended by itself."""
    fake = FakeSettings(block_size=BLOCK, **settings)  # type: ignore[arg-type]
    with channel() as (endpoints, router), FakeShard(endpoints.spec, fake) as shard:
        router.start()
        yield router, shard
        shard.wait()
        while (view := router.end.try_receive()) is not None:
            assert Frame(view).kind is not FrameKind.FAULT  # nobody's: all are to be replayed
            del view
            router.end.release()


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_shard_whose_device_breaks_ends_and_faults_nobody(count: int) -> None:
    with ending_shard(break_at_step=4) as (router, shard):
        router.prefill(*(row(i, [i + 10, 5], 20) for i in range(1, count + 1)))
        router.until(lambda report: report.step == 3)
    assert isinstance(shard.error, RunnerBroken)
    assert "single token any more: RuntimeError: the device is broken" in str(shard.error)
    assert not router.faults
    for i in range(1, count + 1):
        assert router.tokens(i) == answer([i + 10, 5], 20)[:3]


def test_a_device_that_breaks_before_anyone_has_come_is_found_by_the_first_request() -> None:
    with ending_shard(break_at_step=1) as (router, shard):
        router.prefill(row(1, PROMPT, 5))
    assert isinstance(shard.error, RunnerBroken)


def test_several_rows_that_all_fail_alone_are_not_to_blame() -> None:
    """Even when the runner computes a token of its own: it may lack memory for more."""
    with ending_shard(fail_token=666) as (router, shard):
        router.prefill(*(row(i, [i + 10, 666], 6) for i in range(1, 5)))
    assert isinstance(shard.error, RunnerBroken) and not router.faults
    assert "each of 4 rows of a step failed alone" in str(shard.error)
    assert "token 666 cannot be computed" in str(shard.error)


def test_a_row_in_every_step_that_fails_is_blamed_a_few_times_only() -> None:
    with ending_shard(fail_token=666) as (router, shard):
        for i in range(1, IN_A_ROW):
            router.prefill(row(i, [666], 6))
            router.finished(i)
        router.prefill(row(IN_A_ROW, PROMPT, 6))  # a step that succeeds: they were to blame
        router.finished(IN_A_ROW)
        for i in range(IN_A_ROW + 1, 2 * IN_A_ROW):
            router.prefill(row(i % 15, [666], 6))
            router.finished(i % 15)
        assert len(router.faults) == 2 * (IN_A_ROW - 1)
        router.prefill(row(1, [666], 6))
    assert isinstance(shard.error, RunnerBroken)
    assert f"{IN_A_ROW} steps in a row failed" in str(shard.error)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_shard_whose_device_computes_nan_alone_ends_and_faults_nobody(count: int) -> None:
    with ending_shard(nan_at_step=4) as (router, shard):
        router.prefill(*(row(i, [i + 10, 5], 20) for i in range(1, count + 1)))
        router.until(lambda report: report.step == 3)
    assert isinstance(shard.error, RunnerBroken)
    assert "single token any more: RuntimeError: the model's logits contain NaN" in str(shard.error)
    assert not router.faults
    for i in range(1, count + 1):
        assert router.tokens(i) == answer([i + 10, 5], 20)[:3]


def test_nan_beside_a_prompt_that_gets_no_token_yet_is_looked_into_as_well() -> None:
    with ending_shard(nan_at_step=3) as (router, shard):
        router.limits(4)
        router.prefill(row(1, [5, 6], 20), row(2, list(range(10, 40)), 5))
        router.until(lambda report: report.step == 2)
    assert isinstance(shard.error, RunnerBroken) and not router.faults


def test_nan_of_one_row_ends_that_row_alone() -> None:
    with fake_shard(nan_token=666) as (router, _):
        router.prefill(row(1, PROMPT, 6), row(2, [9, 666], 6), row(3, [8, 7], 6))
        router.finished(1, 3)
        router.prefill(row(4, [666], 6))  # alone: the device proves itself
        router.acknowledged(router.command)
        router.prefill(row(5, PROMPT, 6))
        router.finished(5)
        assert "contain NaN" in str(router.fault(2)) and "contain NaN" in str(router.fault(4))
        assert router.tokens(1) == router.tokens(5) == answer(PROMPT, 6)
        assert len(router.faults) == 2


@pytest.mark.parametrize("sound", [True, False])
def test_rows_that_fault_without_raising_have_the_runner_prove_itself(
    monkeypatch: pytest.MonkeyPatch, sound: bool
) -> None:
    def step(self: FakeRunner, plan: StepPlan) -> StepResult:
        return StepResult.of([RowResult(fault="NaN") for _ in plan.rows], 0, 0)

    monkeypatch.setattr(FakeRunner, "step", step)
    if sound:
        with fake_shard() as (router, _):
            for turn in range(2 * IN_A_ROW):
                router.prefill(*(row(1 + i, PROMPT, 5) for i in range(turn % 2 + 1)))
                router.acknowledged(router.command)
            assert len(router.faults) == 3 * IN_A_ROW
    else:
        with ending_shard(break_at_step=0) as (router, shard):
            assert shard.runner is not None
            monkeypatch.setattr(shard.runner, "prove_sound", lambda: 1 / 0)
            router.prefill(row(1, PROMPT, 5), row(2, PROMPT, 5))
        assert isinstance(shard.error, RunnerBroken) and "ZeroDivisionError" in str(shard.error)


@pytest.mark.parametrize("fault", ["broken_while", "nan_while"])
@pytest.mark.parametrize(("incarnation", "said"), [(1, "token: "), (2, "token any more: ")])
def test_a_shard_proves_itself_before_it_is_ready(
    tmp_path: Path, incarnation: int, said: str, fault: str
) -> None:
    """The first one has a checkpoint that may be at fault, those that follow a device."""
    (tmp_path / "broken").touch()
    fake = FakeSettings(block_size=BLOCK, **{fault: str(tmp_path / "broken")})  # type: ignore[arg-type]
    with (
        channel(incarnation=incarnation) as (endpoints, router),
        FakeShard(endpoints.spec, fake) as shard,
    ):
        router.greet()
        router.warm_up()
        shard.wait()
        assert isinstance(shard.error, RunnerBroken)
        assert f"cannot compute a single {said}RuntimeError" in str(shard.error)
        assert ("--dtype" in str(shard.error)) == (incarnation == 1)
        assert router.end.try_receive() is None


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_whose_states_are_written_over_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """The next one writes where it read; without one it is computed again, and nobody notices."""
    failed, steps = [False], FakeRunner.step

    def fail_once(self: FakeRunner, plan: StepPlan) -> StepResult:
        if not failed[0] and plan.context_lengths[0] == len(PROMPT) + 3:
            failed[0] = True
            raise RuntimeError("an unlucky moment")
        return steps(self, plan)

    monkeypatch.setattr(FakeRunner, "step", fail_once)
    rows = [row(i, PROMPT, 9, states=StateGrant((2 * i, 2 * i + 1))) for i in (1, 2)]
    if not ahead:
        with fake_shard(state_slots=8) as (router, _):
            router.prefill(*rows)
            router.finished(1, 2)
        assert failed[0] and router.tokens(1) == router.tokens(2) == answer(PROMPT, 9)
        return
    with ending_shard(state_slots=8, runs_ahead=True) as (router, shard):
        router.prefill(*rows)
    assert failed[0] and isinstance(shard.error, RunnerBroken)
    assert "written over the states" in str(shard.error) and "unlucky" in str(shard.error)
