"""Rank 0's runner over stages: told to the others at once, computed in that order when asked."""

from __future__ import annotations

import pytest

from tests.shard.torch_backend.models_support import plan, sequence
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.contract import (
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.ranks.leader import Followers
from tgi_trio.shard.ranks.pipeline import PipelineRunner
from tgi_trio.shard.runner import GroupBroken
from tgi_trio.testing.fake_model import FakeRunner, FakeSettings


class Told(Followers):
    """The other stages: what they have been told."""

    def __init__(self) -> None:
        super().__init__([])
        self.plans: list[StepPlan] = []

    def compute(self, plan: StepPlan) -> None:
        self.plans.append(plan)


class LastStage(FakeRunner):
    """Rank 0's layers: what they have computed, and whom they have forgotten."""

    def __init__(self) -> None:
        super().__init__(FakeSettings(verify_kv=False, fail_token=99))
        self.warm_up(WarmupRequest(64, 256, 4, 256))
        self.plans: list[StepPlan] = []
        self.forgotten: list[ShardSequence] = []

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().step(plan)

    def drop(self, sequence: ShardSequence) -> None:
        self.forgotten.append(sequence)
        super().drop(sequence)


def test_steps_are_told_at_once_and_computed_in_their_order() -> None:
    last, told = LastStage(), Told()
    pipeline = PipelineRunner(last, told)
    plans = [plan([sequence(n, [5, 6, n], [n])], [3]) for n in (1, 2, 3)]
    steps = [pipeline.launch(each) for each in plans]
    assert told.plans == plans and last.plans == []
    second = steps[1].result()
    assert last.plans == plans[:2]
    assert [len(row.token_ids) for row in second.rows] == [1]
    steps[0].result()
    assert last.plans == plans[:2]  # once each
    pipeline.prove_sound()  # a step of its own, behind what is under way
    assert last.plans[:3] == plans and len(last.plans) == len(told.plans) == 4


def test_who_leaves_is_forgotten_behind_the_last_step_that_chooses_for_it() -> None:
    last = LastStage()
    pipeline = PipelineRunner(last, Told())
    rows = [sequence(n, [5, 6, n], [n]) for n in (1, 2, 3)]
    steps = [pipeline.launch(plan([row], [3])) for row in rows[:2]]
    pipeline.drop(rows[2])
    assert last.forgotten == [rows[2]]
    pipeline.drop(rows[1])
    steps[0].result()
    assert last.forgotten == [rows[2]]
    steps[1].result()
    assert last.forgotten == [rows[2], rows[1]]


def test_what_a_stage_raises_ends_the_group() -> None:
    pipeline = PipelineRunner(LastStage(), Told())
    step = pipeline.launch(plan([sequence(3, [99], [3])], [1]))
    with pytest.raises(GroupBroken, match="token 99 cannot be computed"):
        step.result()
