"""Rank 0's runner and a follower's loop over real rings, on a model without weights."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from tests.shard.torch_backend.models_support import plan, sequence
from tgi_trio.ipc.channel import Endpoints, LeaderEnd, ShardEnd
from tgi_trio.ipc.startup import WarmupRequest, WarmupResult
from tgi_trio.shard.contract import (
    Choices,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.ranks import follower
from tgi_trio.shard.ranks.leader import Followers, GroupRunner
from tgi_trio.shard.runner import GroupBroken
from tgi_trio.testing.fake_model import FakeRunner, FakeSettings

REQUEST = WarmupRequest(64, 256, 4, 256)


class Recording(FakeRunner):
    """A follower's model: keeps the plans it was given."""

    def __init__(self) -> None:
        super().__init__(FakeSettings(verify_kv=False))
        self.plans: list[StepPlan] = []
        self.warmed: list[WarmupRequest] = []

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        self.warmed.append(request)
        return super().warm_up(request)

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult(Choices.of([]), 0, 0)


def test_a_follower_computes_what_rank_0_computes_until_it_is_dismissed() -> None:
    theirs, ours = Recording(), FakeRunner(FakeSettings(fail_token=99))
    with Endpoints.create(1, 1, spin_us=0) as endpoints:
        own = replace(endpoints.spec, segment=os.dup(endpoints.spec.segment))
        other = replace(endpoints.spec, segment=os.dup(endpoints.spec.segment))
        end = ShardEnd.attach(other.text())
        thread = threading.Thread(
            target=follower.run, args=(end, lambda: theirs), kwargs={"rank": 1, "world_size": 2}
        )
        thread.start()
        leader = LeaderEnd.attach(own.text())
        followers = Followers([leader])
        followers.greet()
        group = GroupRunner(ours, followers)
        group.warm_up(REQUEST)
        rows = [sequence(1, [5, 6, 7], [1]), sequence(2, [8, 9], [2])]
        step = plan(rows, [3, 2])
        result = group.step(step)
        assert [len(row.token_ids) for row in result.rows] == [1, 1]
        with pytest.raises(GroupBroken, match="token 99 cannot be computed"):
            group.step(plan([sequence(3, [99], [3])], [1]))
        followers.dismiss()
        thread.join(30)
        assert not thread.is_alive()
        assert theirs.warmed == [REQUEST]
        assert [p.token_ids.tolist() for p in theirs.plans] == [[5, 6, 7, 8, 9], [99]]
        assert theirs.plans[0].kv_slots.tolist() == step.kv_slots.tolist()
        assert end.vitals.step == 2
        leader.close()
        end.close()
