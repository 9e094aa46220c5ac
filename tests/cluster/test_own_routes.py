"""A front's health: what it says is whether requests are to be sent to it."""

from __future__ import annotations

import json

import pytest
import trio

from tests.cluster.fake_replica import SECRET, fake_replicas
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


async def test_replicas_that_serve_something_else_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fake_replicas(4) as replicas:
        first, second, third, _ = replicas.all  # the last one says nothing
        for each in (first, second, third):
            each.info = {"model_id": "m", "max_total_tokens": 2048, "settings": {"reasoning": None}}
        first.info = {"model_id": "m", "max_total_tokens": 1024, "settings": {"reasoning": "none"}}
        async with served_front(replicas.addresses) as front:
            with trio.fail_after(30):
                await front.fleet.wait_polled()
            listed = await front.ask("GET", "/cluster/replicas", x_tgi_front=SECRET)
            ready = await front.ask("GET", "/ready")
            page = (await front.ask("GET", "/metrics")).text
            first.die()
            front.fleet.members.tell(first.address, MemberEvent.CLOSED, trio.current_time())
            alike = await front.ask("GET", "/ready")
    what = 'max_total_tokens is 1024, elsewhere 2048, reasoning is "none", elsewhere null'
    for answer in (ready, listed):
        assert json.loads(answer.body)["differing"] == {first.address: what}
    assert "\ntgi_front_differing 1\n" in page and alike.text == '{"ready":true}'
    assert f"replica {first.address} does not serve what most others do: {what}. " in caplog.text


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_may_be_red_before_anything_is_refused(method: str, path: str) -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        assert (await front.ask(method, path)).status == 200
        front.front.retire()
        assert (await front.ask(method, path)).status == 503
        assert (await front.ask("POST", "/generate", b"{}")).status == 200
