"""Replicas that have stopped while their machines still take connections for them."""

from __future__ import annotations

import pytest
import trio

from tests.cluster.fake_replica import BODY, FakeReplica, fake_replicas
from tests.cluster.served_front import served_front
from tgi_trio.cluster import replica_http
from tgi_trio.cluster.members import MemberEvent
from tgi_trio.cluster.replica_http import Connections, ReplicaLost

pytestmark = pytest.mark.trio


@pytest.mark.parametrize("kept", [True, False])
async def test_a_request_leaves_a_replica_that_does_not_answer(kept: bool) -> None:
    """Whether its connection was made for it or kept, it is not asked once more."""
    async with fake_replicas(2) as replicas, served_front(replicas.addresses) as front:
        if not kept:
            for each in front.fleet.replicas:
                each.hang_up()
        for one in replicas.all:
            one.silent.set()

        async def declare_dead() -> None:
            stopped = await _first_ignored(replicas.all)
            for other in set(replicas.all) - {stopped}:
                other.silent = trio.Event()
            front.fleet.members.tell(stopped.address, MemberEvent.SILENT, trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(declare_dead)
            answer = await front.ask("POST", "/generate", BODY)
        assert answer.status == 200
        assert sorted(replicas.asked) == [0, 1]
        assert front.count("lost") == 1


async def _first_ignored(replicas: list[FakeReplica]) -> FakeReplica:
    while not (found := [each for each in replicas if each.ignored.is_set()]):
        await trio.sleep(0.001)
    return found[0]


async def test_a_connection_that_was_being_made_is_lost_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would close it later: its replica is dead already."""
    connect = replica_http._connect
    connecting, connected = trio.Event(), trio.Event()

    async def connect_slowly(address: str) -> trio.SocketStream:
        connecting.set()
        await connected.wait()
        return await connect(address)

    monkeypatch.setattr(replica_http, "_connect", connect_slowly)
    async with fake_replicas(1) as replicas:
        connections = Connections(replicas.addresses[0])

        async def close() -> None:
            await connecting.wait()
            connections.close()
            connected.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close)
            with pytest.raises(ReplicaLost, match="given up"):
                await connections.take()
        assert not connections.busy
        connections.give_back(await connections.take(), reusable=True)  # as it comes back
        assert len(connections.idle) == 1


async def test_whoever_waits_on_a_closed_connection_is_told_so_each_time() -> None:
    """A poll may be sending as its replica is given up. The second one to do so ended the front."""
    async with fake_replicas(1) as replicas:
        connections = Connections(replicas.addresses[0])
        for _ in range(2):
            connection = await connections.take()
            connections.close()
            with pytest.raises(ReplicaLost, match="closed here"):
                await connection.receive()
