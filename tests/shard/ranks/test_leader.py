"""Rank 0's runner and a follower's loop over real rings, on a model without weights."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.shard.torch_backend.models_support import plan, sequence
from tgi_trio.ipc.channel import LeaderEnd, ShardEnd
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.prefixes import KeepOrder, RestoreOrder
from tgi_trio.ipc.startup import WarmupRequest, WarmupResult
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.shard.contract import (
    Choices,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.prefixes.kept_prefixes import Prefixes, RankPrefixes, find_file
from tgi_trio.shard.ranks import follower
from tgi_trio.shard.ranks.leader import Followers, GroupRunner
from tgi_trio.shard.runner import GroupBroken, Runner
from tgi_trio.testing.fake_model import FakeRunner, FakeSettings

REQUEST = WarmupRequest(64, 256, 4, 256)
KEY = bytes(range(16))


class Recording(FakeRunner):
    """A follower's model: keeps the plans it was given, and what it has been warmed up for."""

    def __init__(self) -> None:
        super().__init__(FakeSettings(verify_kv=False))
        self.plans: list[StepPlan] = []
        self.warmed: list[WarmupRequest] = []

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        result = super().warm_up(request)
        self.warmed.append(request)  # last: whoever waits for it may use the cache
        return result

    def step(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return StepResult(Choices.of([]), 0, 0)


@contextmanager
def led(theirs: Runner, ours: Runner) -> Iterator[tuple[GroupRunner, ShardEnd]]:
    """Have a thread follow with a runner; yields the group with rank 0's, and the thread's end."""
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
        try:
            yield GroupRunner(ours, followers), end
        finally:  # a thread that went on would read descriptors that are another test's by then
            followers.dismiss()
            thread.join(30)
            assert not thread.is_alive()
            leader.close()
            end.close()


def test_a_follower_computes_what_rank_0_computes_until_it_is_dismissed() -> None:
    theirs, ours = Recording(), FakeRunner(FakeSettings(fail_token=99))
    with led(theirs, ours) as (group, end):
        group.warm_up(REQUEST)
        rows = [sequence(1, [5, 6, 7], [1]), sequence(2, [8, 9], [2])]
        step = plan(rows, [3, 2])
        result = group.step(step)
        assert [len(row.token_ids) for row in result.rows] == [1, 1]
        with pytest.raises(GroupBroken, match="token 99 cannot be computed"):
            group.step(plan([sequence(3, [99], [3])], [1]))
        while end.vitals.step < 2:
            time.sleep(0.001)
    assert theirs.warmed == [REQUEST]
    assert [p.token_ids.tolist() for p in theirs.plans] == [[5, 6, 7, 8, 9], [99]]
    assert theirs.plans[0].kv_slots.tolist() == step.kv_slots.tolist()


class Agreeing(FakeRunner):
    """A rank whose prefixes both ranks have to have."""

    def __init__(self, meeting: threading.Barrier, said: list[int]) -> None:
        super().__init__(FakeSettings(verify_kv=False))  # a follower knows no earlier tokens
        self._meeting, self._said = meeting, said

    def block(self, number: int) -> list[int]:
        """Return the bytes of a block."""
        return self._find_parts().blocks[0].take(np.array([number]))[0].tolist()

    @property
    def prefixes(self) -> Prefixes:
        def agree(own: int) -> int:
            self._said.append(own)
            self._meeting.wait(30)
            least = min(self._said[-2:])
            self._meeting.wait(30)
            return least

        return RankPrefixes(self._find_parts, agree)


def test_ranks_keep_prefixes_together_or_not_at_all(tmp_path: Path) -> None:
    meeting, said = threading.Barrier(2), list[int]()
    theirs, ours = Agreeing(meeting, said), Agreeing(meeting, said)
    keep, restore = KeepOrder(tmp_path, KEY, (3,)), RestoreOrder(tmp_path, KEY, 1, 0)
    with led(theirs, ours) as (group, _):
        group.warm_up(REQUEST)
        group.step(plan([sequence(1, [5, 6, 7], [3])], [3]))
        assert not group.prefixes.keep(keep).error
        written = ours.block(3)
        group.warm_up(REQUEST)  # a new cache
        assert not group.prefixes.restore(restore).error
        assert any(written) and theirs.block(1) == ours.block(1) == written
        find_file(keep, 1).unlink()
        assert "another rank" in group.prefixes.restore(restore).error
        assert not any(ours.block(1))


class Copying(Recording):
    """A rank whose copies are made as late as they may be."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = replace(self.settings, host_blocks=8)

    def block(self, number: int) -> list[int]:
        return self._find_parts().blocks[0].take(np.array([number]))[0].tolist()

    def fill(self, number: int, value: int) -> None:
        part = self._find_parts().blocks[0]
        part.put(number, np.full((1, part.item_bytes), value, np.uint8))


def test_followers_copy_what_rank_0_copies_and_plans_say_what_has_to_be_over() -> None:
    theirs, ours = Copying(), Copying()
    with led(theirs, ours) as (group, end):
        assert group.host_copies is None
        group.warm_up(REQUEST)
        ours.fill(3, 5)
        copies = group.host_copies
        assert copies is not None
        while not theirs.warmed:
            time.sleep(0.001)
        theirs.fill(3, 6)
        copies.launch([Transfer(3, 1, back=False)])
        copies.launch([Transfer(4, 1, back=True)])
        copies.finish()
        assert copies.done == 2 and set(ours.block(4)) == {5}
        step = plan([sequence(1, [5, 6, 7], [1])], [3])
        step.transfers = copies.done
        group.step(step)
        while end.vitals.step < 1:
            time.sleep(0.001)
        assert theirs.host_copies is not None
        theirs.host_copies.finish()
    assert set(theirs.block(4)) == {6}
    assert [each.transfers for each in theirs.plans] == [2]


def test_followers_have_made_their_copies_before_these_are_kept(tmp_path: Path) -> None:
    theirs, ours = Copying(), Copying()
    order = KeepOrder(tmp_path, KEY, (-1,))
    with led(theirs, ours) as (group, _):
        group.warm_up(REQUEST)
        copies = group.host_copies
        assert copies is not None
        while not theirs.warmed:
            time.sleep(0.001)
        ours.fill(3, 5)
        theirs.fill(3, 6)
        copies.launch([Transfer(3, 1, back=False)])
        copies.finish()
        assert not group.prefixes.keep(order).error
    for rank, value in ((0, 5), (1, 6)):
        assert set(find_file(order, rank).read_bytes()[-8:]) == {value}
