"""Fronts hear of each other's requests, and of nothing that is not signed."""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.cluster.feed import Address, Feed
from tgi_trio.cluster.fleet import Fleet
from tgi_trio.cluster.front_metrics import FRONT_METRICS
from tgi_trio.cluster.gossip import DATAGRAM_BYTES, MOST_ITEMS, Outbox, RoutedRequest, read
from tgi_trio.cluster.members import MemberEvent
from tgi_trio.cluster.peers import follow_peers
from tgi_trio.cluster.prefix_chain import HASH_BYTES, LONGEST, Chain
from tgi_trio.cluster.routing import Routing
from tgi_trio.router.telemetry.metrics import Metrics

SECRET = b"sixteen letters and more, as a file may have them, even a hundred of them" * 2
NAMES = st.text(min_size=1, max_size=40)
CHAINS = st.integers(0, LONGEST).map(
    lambda length: tuple(bytes([head]) * HASH_BYTES for head in range(length))
)
ITEMS = st.builds(RoutedRequest, NAMES, CHAINS)
ME = b"a front."


@settings(max_examples=25, deadline=None)
@given(st.lists(ITEMS, max_size=12))
def test_what_is_put_is_read(items: list[RoutedRequest]) -> None:
    outbox = Outbox(SECRET, ME)
    for item in items:
        outbox.put(item)
    datagrams = list(outbox.datagrams())
    assert not outbox and all(len(datagram) <= DATAGRAM_BYTES for datagram in datagrams)
    heard = [read(datagram, SECRET) for datagram in datagrams]
    assert [item for each in heard for item in each.items] == items
    assert all(each.sender == ME for each in heard)


@settings(max_examples=25, deadline=None)
@given(ITEMS, st.integers(0, 10_000), st.binary(min_size=1, max_size=30))
def test_what_is_not_ours_is_refused(item: RoutedRequest, at: int, junk: bytes) -> None:
    outbox = Outbox(SECRET, ME)
    outbox.put(item)
    (datagram,) = outbox.datagrams()
    changed = bytearray(datagram)
    changed[at % len(datagram)] ^= 1
    for other in (bytes(changed), datagram[:-1], datagram + junk, junk, b""):
        with pytest.raises(ValueError, match="not signed"):
            read(other, SECRET)
    with pytest.raises(ValueError, match="not signed"):
        read(datagram, b"another secret of a cluster")


def test_a_signed_datagram_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tgi_trio.cluster.gossip.VERSION", 3)
    outbox = Outbox(SECRET, ME)
    monkeypatch.undo()
    outbox.put(RoutedRequest("a", ()))
    (newer,) = outbox.datagrams()
    with pytest.raises(ValueError, match="version 2"):
        read(newer, SECRET)


def test_an_outbox_is_bounded() -> None:
    outbox = Outbox(SECRET, ME)
    for number in range(MOST_ITEMS + 5):
        outbox.put(RoutedRequest(str(number), ()))
    assert len(outbox) == MOST_ITEMS
    assert read(next(outbox.datagrams()), SECRET).items[0] == RoutedRequest("5", ())
    with pytest.raises(ValueError, match="255"):
        outbox.put(RoutedRequest("a" * 256, ()))


async def bound() -> tuple[trio.socket.SocketType, Address]:
    one = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
    await one.bind(("127.0.0.1", 0))
    return one, one.getsockname()


def test_what_a_front_begins_is_told() -> None:
    async def main() -> list[tuple[str, Chain]]:
        told: list[tuple[str, Chain]] = []
        fleet = Fleet(Routing(random.Random(1)), 60.0, lambda *news: told.append(news))
        fleet.name("127.0.0.1:1")
        (replica,) = fleet.replicas
        fleet.members.tell(replica.name, MemberEvent.WELL, trio.current_time())
        fleet.begin(replica, (b"12345678",))()
        fleet.check()
        return told

    assert trio.run(main) == [("127.0.0.1:1", (b"12345678",))]


def test_a_front_learns_what_another_sent_where() -> None:
    chain = (b"12345678", b"abcdefgh")

    async def main() -> None:
        (a, at_a), (b, at_b) = await bound(), await bound()
        stranger, _ = await bound()
        routings = [Routing(random.Random(1)) for _ in range(2)]
        for routing in routings:
            for name in ("one", "two"):
                routing.add(name)
                routing.report(name, requests=0, slots=8)
        counts = [Metrics(table=FRONT_METRICS) for _ in range(2)]
        feeds = [
            Feed(routing, socket, SECRET, metrics)
            for routing, socket, metrics in zip(routings, (a, b), counts, strict=True)
        ]
        feeds[0].peers = (("127.0.0.1", 1), at_a, at_b)  # nobody, itself, the other
        with a, b, stranger, trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for feed in feeds:
                    nursery.start_soon(feed.run, 0.001)
                await stranger.sendto(b"nonsense", at_b)
                feeds[0].tell("two", chain)
                feeds[0].tell("gone", chain)  # which the other has never heard of
                while not counts[1].value("tgi_front_news_heard"):
                    await trio.sleep(0.001)
                assert {routings[1].order(chain)[0] for _ in range(20)} == {"two"}
                assert len({routings[0].order(chain)[0] for _ in range(50)}) == 2  # not its own
                for _ in range(4):  # more than a prefix is worth, until the replica has its say
                    feeds[0].tell("two", ())
                while counts[1].value("tgi_front_news_heard") < 2:
                    await trio.sleep(0.001)
                assert {routings[1].order(chain)[0] for _ in range(20)} == {"one"}
                routings[1].report("two", requests=0, slots=8)
                assert {routings[1].order(chain)[0] for _ in range(20)} == {"two"}
                while not counts[1].value("tgi_front_news_refused"):
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
        assert not counts[0].value("tgi_front_news_heard")

    trio.run(main)


def test_what_is_told_before_names_are_looked_up_is_kept_until_then() -> None:
    async def main() -> None:
        (a, _), (b, at_b) = await bound(), await bound()
        routing = Routing(random.Random(1))
        feed = Feed(routing, a, SECRET, Metrics(table=FRONT_METRICS))
        with a, b, trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(feed.run, 0.001)
                feed.tell("one", (b"12345678",))
                await trio.sleep(0.02)  # many a turn of the feed
                feed.peers = (at_b,)
                datagram, _ = await b.recvfrom(65_535)
                assert read(datagram, SECRET).items == [RoutedRequest("one", (b"12345678",))]
                feed.peers = ()  # looked up, and nobody is there
                feed.tell("one", (b"abcdefgh",))
                feed.peers = (at_b,)
                feed.tell("two", ())
                datagram, _ = await b.recvfrom(65_535)
                assert read(datagram, SECRET).items == [RoutedRequest("two", ())]
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_names_of_fronts_are_looked_up_again() -> None:
    found: list[tuple[Address, ...]] = []

    async def main() -> None:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                names = [("localhost", 1), ("nowhere.invalid", 2), ("a..b", 3), ("127.0.0.1", 1)]
                follow = partial(follow_peers, seconds=0.001)
                nursery.start_soon(follow, names, trio.socket.AF_INET, found.append)
                while len(found) < 2:
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert found[:2] == [(("127.0.0.1", 1),)] * 2
