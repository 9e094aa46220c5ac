"""Replicas of a front that join, leave, drain, and are not well."""

from __future__ import annotations

import json

import pytest
import trio

from tests.cluster.fake_replica import BODY, WHOLE, fake_replicas
from tests.cluster.served_front import WITH_SECRET, served_front
from tgi_trio.cluster import relay
from tgi_trio.cluster.members import MemberEvent, MemberState
from tgi_trio.cluster.replica_http import ReplicaLost

pytestmark = pytest.mark.trio


async def test_replicas_join_and_leave_by_api() -> None:
    async with fake_replicas(2) as replicas:
        first, second = replicas.addresses
        async with served_front([first]) as front:
            change = json.dumps({"add": [second], "remove": [first]}).encode()
            secret = WITH_SECRET.secret.decode()
            refused = await front.ask("POST", "/cluster/replicas", change, x_tgi_front="wrong")
            assert refused.status == 403
            nonsense = await front.ask(
                "POST", "/cluster/replicas", b'{"add":["x"]}', x_tgi_front=secret
            )
            assert nonsense.status == 422
            assert "expected host:port" in nonsense.text
            await front.ask("POST", "/cluster/replicas", change, x_tgi_front=secret)
            await front.until(first, None)
            await front.until(second, MemberState.UP)
            answer = await front.ask("GET", "/cluster/replicas", x_tgi_front=secret)
            assert json.loads(answer.body) == {"replicas": {second: "up"}}
            assert (await front.ask("POST", "/generate_stream", BODY)).body == WHOLE
            assert replicas.asked == [0, 1]


async def test_a_replica_whose_address_can_be_no_name_does_not_end_the_front() -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        front.fleet.name("a..b:3000")  # as `--replica` may have it
        with trio.fail_after(30):
            await front.fleet.wait_polled()
        assert (await front.ask("POST", "/generate_stream", BODY)).body == WHOLE


async def test_who_leaves_ends_what_it_has() -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        (replica,) = replicas.all
        replica.pause = 0.02
        async with trio.open_nursery() as nursery:

            async def dismiss() -> None:
                await replica.began.wait()
                front.fleet.dismiss(replica.address)
                await front.until(replica.address, MemberState.LEAVING)

            nursery.start_soon(dismiss)
            answer = await front.ask("POST", "/generate_stream", BODY)
        assert answer.body == WHOLE
        await front.until(replica.address, None)


async def test_a_replica_that_is_not_well_gets_nothing_new() -> None:
    async with fake_replicas(2) as replicas, served_front(replicas.addresses, timeout=1) as front:
        replicas.all[0].health = 503
        await front.until(replicas.all[0].address, MemberState.SUSPECT)
        for _ in range(5):
            await front.ask("POST", "/generate_stream", BODY)
        assert replicas.asked[0] == 0
        replicas.all[0].health = 200
        await front.until(replicas.all[0].address, MemberState.UP)


async def test_a_drain_ends_what_runs_and_takes_nothing_new() -> None:
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        (replica,) = replicas.all
        replica.pause = 0.02
        async with trio.open_nursery() as nursery:

            async def drain() -> None:
                await replica.began.wait()
                await front.front.drain()
                assert front.front.running == 0

            nursery.start_soon(drain)
            answer = await front.ask("POST", "/generate_stream", BODY)
        assert answer.body == WHOLE
        refused = await front.ask("POST", "/generate_stream", BODY)
        assert (refused.status, "shuts down" in refused.text) == (503, True)
        assert (await front.ask("GET", "/health")).status == 503


async def test_a_replica_says_how_busy_others_have_it() -> None:
    async with fake_replicas(2) as replicas:
        busy, idle = replicas.all
        busy.load, idle.load = "100/8", "0/8"
        async with served_front(replicas.addresses) as front:
            for _ in range(12):
                assert (await front.ask("POST", "/generate", BODY)).status == 200
        assert (len(busy.seen), len(idle.seen)) == (0, 12)


async def test_a_replica_that_does_not_know_the_front_gets_nothing_and_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fake_replicas(1) as replicas:
        replicas.all[0].health = 403
        async with served_front(replicas.addresses, timeout=0.5, up=False) as front:
            await front.until(replicas.addresses[0], MemberState.SUSPECT)
            assert (await front.ask("POST", "/generate", BODY)).status == 503
    assert caplog.text.count("the same --cluster-secret-file") == 1


async def test_who_waits_is_told_once_no_replica_will_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although the replica is as it was: SUSPECT."""
    monkeypatch.setattr(relay, "WAIT_SECONDS", 3600)
    async with fake_replicas(1) as replicas, served_front(replicas.addresses) as front:
        (replica,), (asked,) = replicas.all, front.fleet.replicas
        front.fleet.members.tell(replica.address, MemberEvent.LATE, trio.current_time())

        async def refuse() -> None:
            while not front.front.running:
                await trio.sleep(0.001)
            replica.health = 403
            asked.poll_now.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)
            answer = await front.ask("POST", "/generate", BODY)
        assert answer.status == 503


async def test_a_replica_that_loses_a_request_while_it_says_how_it_is_is_asked_again() -> None:
    async with fake_replicas(1) as replicas:
        (replica,) = replicas.all
        replica.delay = 0.05
        async with served_front(replicas.addresses, up=False) as front:
            (asked,) = front.fleet.replicas
            while not replica.taken:
                await trio.sleep(0.001)
            front.fleet.lose(asked, ReplicaLost("it was cut"), under_way=True)
            while replica.polls < 2:
                await trio.sleep(0.001)
