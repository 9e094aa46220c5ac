"""What the supervisor decides without a process: when to start again, exits in words, states."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from tgi_trio.ipc.control import Vitals
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.router.shards.group import Group
from tgi_trio.router.shards.group_states import (
    TRANSITIONS,
    IllegalShardEvent,
    ShardEvent,
    ShardState,
    next_state,
)
from tgi_trio.router.shards.local_group import LocalGroup
from tgi_trio.router.shards.shard_instance import describe_exit, real_shard
from tgi_trio.router.shards.supervisor import (
    BACK_OFF,
    SHORTAGE,
    STABLE_AFTER,
    CrashCount,
    Supervisor,
    Watch,
)
from tgi_trio.router.telemetry.metrics import Metrics


def test_only_a_shard_that_hardly_served_is_waited_for() -> None:
    loop = CrashCount()
    assert [loop.note(0.0, False) for _ in range(8)] == [*BACK_OFF, 10.0, 10.0]
    assert loop.in_a_row == 8
    assert loop.note(4.0, False) == 6.0  # of ten
    assert loop.note(12.0, False) == 0.0 and loop.in_a_row == 10
    assert loop.note(STABLE_AFTER + 1, False) == 0.0 and loop.in_a_row == 1
    loop.note(0.0, False)
    assert loop.note(0.0, True) == 0.0 and loop.in_a_row == 1


def test_a_machine_that_refuses_a_process_is_asked_again_for_longer_than_a_shard_may_crash() -> (
    None
):
    """Six refusals came within nine seconds, and the shard was given up for good."""
    loop, limit = CrashCount(), Watch().restart_limit
    loop.note(0.0, False)  # a crash, and no process for the next one
    waited = [loop.note(0.0, False, refused=True) for _ in range(limit - 1)]
    assert loop.in_a_row == limit and sum(waited) > 60
    assert waited == [SHORTAGE * each for each in BACK_OFF[1:limit]]


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == ("exited with code 3", "")
    what, cause = describe_exit(-signal.SIGKILL)
    assert what == "was ended by SIGKILL (Killed)"
    assert "out of memory" in cause
    assert describe_exit(-signal.SIGSEGV)[0] == "was ended by SIGSEGV (Segmentation fault)"


def test_the_table_ends_everywhere_in_gone_and_refuses_the_rest() -> None:
    for state in ShardState:
        if state is not ShardState.GONE:
            assert TRANSITIONS[state, ShardEvent.EXIT] is ShardState.GONE
    with pytest.raises(IllegalShardEvent, match=r"STEP.*GONE"):
        next_state(ShardState.GONE, ShardEvent.STEP)


class Beating:
    """A group of one rank that does nothing but beat, when it is told to."""

    world_size = 1

    def __init__(self) -> None:
        self.beats = 0

    def vitals(self, rank: int) -> Vitals:
        return Vitals(self.beats, Phase.IDLE, 0, 1)

    def describe(self, rank: int) -> str:
        return "rank 0"


@pytest.mark.trio
async def test_a_router_that_stood_still_does_not_take_its_shard_for_stalled(
    mock_clock: trio.testing.MockClock,
) -> None:
    """With the whole machine, as when it is moved: what is not heard is nobody's fault."""
    states: list[ShardState] = []
    supervisor = Supervisor(
        Metrics(),
        LocalGroup.starter(real_shard, ShardSettings(model_path=Path("unused"))),
        WarmupRequest(1, 1, 1, 0),
        watch=Watch(stall_timeout=60.0),
        on_move=states.append,
    )
    supervisor.state = ShardState.READY
    group, scope = Beating(), trio.CancelScope()

    async def jump(seconds: float) -> None:
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(seconds)
        await trio.testing.wait_all_tasks_blocked()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor._watch_stalls, cast(Group, group), scope)
        await jump(6.0)
        await jump(3600.0)
        group.beats += 1
        await jump(6.0)
        assert states == []
        for _ in range(12):
            await jump(6.0)
        assert states == [ShardState.STALLED], "one that stands still alone is noticed"
        await jump(3600.0)
        group.beats += 1
        await jump(6.0)
        assert states == [ShardState.STALLED, ShardState.READY]
        assert not scope.cancel_called
        nursery.cancel_scope.cancel()
