"""What the supervisor decides without a process: when to start again, exits in words, states."""

from __future__ import annotations

import signal

import pytest

from tgi_trio.router.shards.group_states import (
    TRANSITIONS,
    IllegalShardTransition,
    ShardEvent,
    ShardState,
    next_state,
)
from tgi_trio.router.shards.shard_instance import describe_exit
from tgi_trio.router.shards.supervisor import BACK_OFF, STABLE_AFTER, CrashCount


def test_only_a_shard_that_hardly_served_is_waited_for() -> None:
    loop = CrashCount()
    assert [loop.note(0.0, False) for _ in range(8)] == [*BACK_OFF, 10.0, 10.0]
    assert loop.in_a_row == 8
    assert loop.note(4.0, False) == 6.0  # of ten
    assert loop.note(12.0, False) == 0.0 and loop.in_a_row == 10
    assert loop.note(STABLE_AFTER + 1, False) == 0.0 and loop.in_a_row == 1
    loop.note(0.0, False)
    assert loop.note(0.0, True) == 0.0 and loop.in_a_row == 1


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
    with pytest.raises(IllegalShardTransition, match=r"STEP.*GONE"):
        next_state(ShardState.GONE, ShardEvent.STEP)
