"""A front's health: what it says is whether requests are to be sent to it."""

from __future__ import annotations

import pytest
import trio

from tests.cluster.fake_replica import fake_replicas
from tests.cluster.served_front import served_front
from tgi_trio.cluster.members import MemberEvent

pytestmark = pytest.mark.trio


@pytest.mark.parametrize("event", [MemberEvent.LATE, MemberEvent.CUT])
async def test_health_is_green_while_the_only_replica_may_be_busy(event: MemberEvent) -> None:
    """Requests wait for it, and would not come where health is red."""
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        (address,) = replicas.addresses
        front.fleet.members.tell(address, event, trio.current_time())
        for path in ("/health", "/ready"):
            assert (await front.ask("GET", path)).status == 200


async def test_health_is_red_once_the_only_replica_says_that_it_does_not_serve() -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        (address,) = replicas.addresses
        for event in (MemberEvent.UNWELL, MemberEvent.LATE):  # and what is late then stays so
            front.fleet.members.tell(address, event, trio.current_time())
            for path in ("/health", "/ready"):
                assert (await front.ask("GET", path)).status == 503


async def test_health_may_be_red_before_anything_is_refused() -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        assert (await front.ask("GET", "/ready")).status == 200
        front.front.retire()
        assert (await front.ask("GET", "/ready")).status == 503
        assert (await front.ask("POST", "/generate", b"{}")).status == 200
