"""A step that raises is computed in halves: who fails, who goes on, what is not tried again."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.loop.batch_support import BUDGET, new_batch
from tests.shard.loop.scripted_router import BLOCK, row
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.contract import StepPlan, StepResult
from tgi_trio.shard.loop.retries import compute, try_launch, try_proceed
from tgi_trio.shard.loop.soundness import RunnerBroken
from tgi_trio.shard.runner import GroupBroken, Pending
from tgi_trio.testing.fake_model import FakeRunner, FakeSettings

BAD = 66


def runner_of(**settings: int) -> FakeRunner:
    runner = FakeRunner(FakeSettings(vocab_size=100, block_size=BLOCK, **settings))  # type: ignore[arg-type]
    runner.warm_up(WarmupRequest(256, 256, 16, 63 * BLOCK))
    return runner


def plan_of(count: int, culprits: Collection[int] = ()) -> StepPlan:
    """Return the step that computes `count` prompts of 2 or 3 tokens, bad ones among them."""
    batch = new_batch()
    asked = SamplingParameters(prompt_logprobs=True)
    for i in range(count):
        ids = [10 + i, BAD if i in culprits else 5, *([7] * (i % 2))]
        batch.add(replace(row(1 + i, ids, 4, blocks=[1 + i]), sampling=asked))
    plan = batch.plan(BUDGET)
    assert plan is not None
    return plan


def run(runner: FakeRunner, plan: StepPlan, *, followed: bool = False) -> tuple[StepResult, int]:
    """Return what came of the step, and how often progress was reported."""
    reported = list[int]()
    result = compute(runner, plan, None, lambda: reported.append(1), followed=followed)
    return result, len(reported)


@settings(max_examples=40)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_those_who_raise_alone_fail_and_the_others_get_what_they_would_have(
    case: tuple[int, set[int]],
) -> None:
    count, bad = case
    plan, runner = plan_of(count, bad), runner_of(fail_token=BAD)
    culprits = {i for i, sequence in enumerate(plan.rows) if sequence.id - 1 in bad}
    expected = runner_of().step(plan).rows
    result, reported = run(runner, plan)
    assert result.raised == bool(culprits)
    assert set(result.choices.faults) == culprits
    for i, found in enumerate(result.rows):
        if i in culprits:
            assert "model failed on this sequence: RuntimeError: token 66" in (found.fault or "")
            assert not found.token_ids and i not in result.prompts
        else:
            assert found.token_ids == expected[i].token_ids and found.fault is None
            np.testing.assert_equal(found.prompt_logprobs, expected[i].prompt_logprobs)
    # Two steps for every level of halves above a culprit, and those levels are reported.
    most = len(culprits) * math.ceil(math.log2(count))
    assert runner._steps <= 1 + 2 * most and bool(reported) == (most > 0) and reported <= most


def test_a_step_that_can_be_computed_in_parts_fails_nobody() -> None:
    plan = plan_of(5)
    result, reported = run(runner_of(fail_above=2), plan)
    assert result.raised and not result.choices.faults and reported == 2
    assert [each.token_ids for each in result.rows] == [
        each.token_ids for each in runner_of().step(plan).rows
    ]


def test_a_result_for_other_rows_than_were_asked_for_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeRunner, "step", lambda self, plan: StepResult.of([], 0, 0))
    result, _ = run(runner_of(), plan_of(1))
    assert result.choices.faults[0].endswith("RuntimeError: 0 results for 1 rows")


@pytest.mark.parametrize("rows", [1, 4])
def test_a_runner_that_cannot_prove_itself_is_not_asked_again(rows: int) -> None:
    runner = runner_of(break_at_step=1)
    with pytest.raises(RunnerBroken, match=r"single token any more: .*the device is broken"):
        run(runner, plan_of(rows))
    assert runner._steps == 1


def test_a_step_whose_states_the_next_has_written_over_is_not_computed_again() -> None:
    plan, runner = plan_of(4), runner_of(fail_above=2)
    plan.state_reads = plan.state_writes = np.arange(4)
    with pytest.raises(RunnerBroken, match=r"written over the states .*: 4 rows do not fit"):
        run(runner, plan, followed=True)
    assert runner._steps == 1
    result, _ = run(runner, plan)
    assert not result.choices.faults


def test_a_group_that_breaks_ends_whatever_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise GroupBroken("rank 1", "is gone")

    class Breaking:
        proceed = result = broken

    pending: Pending = Breaking()  # type: ignore[assignment]
    with pytest.raises(GroupBroken):
        try_proceed(pending)
    with pytest.raises(GroupBroken):
        compute(runner_of(), plan_of(2), pending, lambda: None, followed=False)
    monkeypatch.setattr(FakeRunner, "launch", broken)
    with pytest.raises(GroupBroken):
        try_launch(runner_of(), plan_of(2))


def test_what_raises_early_is_left_to_the_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*args: object) -> None:
        raise ValueError("not now")

    class Raising:
        proceed = result = raising

    pending: Pending = Raising()  # type: ignore[assignment]
    assert not try_proceed(pending)
    plan, runner = plan_of(3), runner_of()
    launched = try_launch(runner, plan)
    assert launched is not None and try_proceed(launched)
    monkeypatch.setattr(FakeRunner, "launch", raising)
    assert try_launch(runner, plan) is None


def test_what_a_failed_step_held_is_gone_when_its_halves_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory may be just what was lacking."""

    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []
    step = FakeRunner.step

    def see_all_gone(*_: FakeRunner) -> None:
        assert all(each() is None for each in held)

    def lacking(self: FakeRunner, plan: StepPlan) -> StepResult:
        see_all_gone()
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        if len(plan.rows) > 1:
            raise MemoryError
        del tensor
        return step(self, plan)

    monkeypatch.setattr(FakeRunner, "step", lacking)
    monkeypatch.setattr(FakeRunner, "prove_sound", see_all_gone)
    result, _ = run(runner_of(), plan_of(4))
    assert len(held) == 7 and not result.choices.faults
