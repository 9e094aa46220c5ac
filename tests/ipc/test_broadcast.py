"""Rank 0 and its followers, over rings of the same kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.ipc.conftest import ROOT, attach_here
from tgi_trio.errors import RingFull
from tgi_trio.ipc.broadcast import Broadcast, PlanEnd
from tgi_trio.ipc.channel import LeaderEnd
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.spawn import ShardProcess

MakeEndpoints = Callable[..., Endpoints]
SpawnChild = Callable[..., ShardProcess]


def lead(endpoints: Endpoints, **changes: Any) -> LeaderEnd:
    """Attach the leader's end in this process, on a descriptor of its own."""
    spec = replace(endpoints.spec, segment=os.dup(endpoints.spec.segment), **changes)
    return LeaderEnd.attach(spec.text())


def receive(end: PlanEnd) -> bytes:
    """Return a follower's next frame, which is waited for."""
    while (frame := end.try_receive()) is None:
        end.wait(30.0)
    payload = bytes(frame)
    end.release()
    return payload


@pytest.mark.parametrize("followers", [2, 4, 8])
def test_every_follower_gets_every_command_in_order(
    followers: int, make_endpoints: MakeEndpoints, spawn_child: SpawnChild
) -> None:
    # One extra channel each: the test process plays rank 0 and needs the death pipe's read end
    # that spawn_child closes, so it attaches first.
    ends = []
    for rank in range(1, followers + 1):
        endpoints = make_endpoints(rank=rank)
        ends.append(lead(endpoints, death=-1))
        spawn_child("echo", endpoints)
    group = Broadcast(ends)
    for number in range(100):
        command = bytes([number]) * (number * 13 % 1500)
        group.send(command)
        assert [receive(end) for end in group.ends] == [command] * followers
    for end in ends:
        end.check()


def test_a_plan_that_is_longer_than_the_rings_reaches_every_follower(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild
) -> None:
    ends = []
    for rank in (1, 2):
        endpoints = make_endpoints(rank=rank)
        ends.append(lead(endpoints, death=-1))
        spawn_child("echo", endpoints)
    group = Broadcast(ends)
    for plan in (os.urandom(3 * ends[0].writer.capacity), b"small", os.urandom(1 << 20)):
        group.send(plan)
        assert [receive(end) for end in group.ends] == [plan, plan]


def test_commands_queue_up_for_a_follower_that_is_behind(make_endpoints: MakeEndpoints) -> None:
    channels = [make_endpoints(rank=rank) for rank in (1, 2)]
    group = Broadcast([lead(endpoints) for endpoints in channels])
    followers = [attach_here(endpoints) for endpoints in channels]
    for number in range(5):
        group.send(bytes([number]))
    for follower in followers:
        for number in range(5):
            assert follower.try_receive() == bytes([number])
            follower.release()


def test_a_follower_that_never_reads_fills_only_its_own_ring(
    make_endpoints: MakeEndpoints,
) -> None:
    channels = [make_endpoints(rank=rank) for rank in (1, 2)]
    ends = [lead(endpoints, full_timeout_ms=20) for endpoints in channels]
    reading, _stuck = (attach_here(endpoints) for endpoints in channels)
    group = Broadcast(ends)
    with pytest.raises(RingFull, match="rank 2"):
        while True:
            group.send(bytes(1000))
            while reading.try_receive() is not None:
                reading.release()


def test_rank_0_gets_its_followers_by_descriptor(
    make_endpoints: MakeEndpoints, spawn_child: SpawnChild
) -> None:
    """As the router does it: rank 0 is a child too, and inherits its followers' channels."""
    channels = [make_endpoints(rank=rank) for rank in (1, 2)]
    code = (
        "import sys\n"
        "from tgi_trio.ipc.broadcast import Broadcast\n"
        "from tgi_trio.ipc.channel import LeaderEnd\n"
        "group = Broadcast([LeaderEnd.attach(text) for text in sys.argv[1:]])\n"
        "group.send(b'step')\n"
        "for end in group.ends:\n"
        "    while (frame := end.try_receive()) is None:\n"
        "        end.wait(30.0)\n"
        "    print(bytes(frame))\n"
        "    del frame\n"
        "    end.release()\n"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", code, *(endpoints.spec.text() for endpoints in channels)],
        pass_fds=[fd for endpoints in channels for fd in endpoints.spec.fds],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    for endpoints in channels:
        spawn_child("echo", endpoints)
    assert leader.communicate(timeout=240)[0] == "b'step'\n" * 2
