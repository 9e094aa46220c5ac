"""Fronts hear of each other's requests, and of nothing that is not signed."""

from __future__ import annotations

import random

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.cluster.feed import Address, Feed
from tgi_trio.cluster.fleet import Fleet
from tgi_trio.cluster.members import MemberEvent
from tgi_trio.cluster.news import DATAGRAM_BYTES, MOST_ITEMS, Item, Load, Outbox, Sent, read
from tgi_trio.cluster.prefix_chain import HASH_BYTES, LONGEST, Chain
from tgi_trio.cluster.routing import Routing

SECRET = b"sixteen letters and more, as a file may have them, even a hundred of them" * 2
NAMES = st.text(min_size=1, max_size=40)
CHAINS = st.integers(0, LONGEST).map(
    lambda length: tuple(bytes([head]) * HASH_BYTES for head in range(length))
)
NUMBERS = st.integers(0, 2**32 - 1)
ITEMS: st.SearchStrategy[Item] = st.one_of(
    st.builds(Sent, NAMES, CHAINS),
    st.builds(Load, NAMES, NUMBERS, NUMBERS, NUMBERS),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ITEMS, max_size=12))
def test_what_is_put_is_read(items: list[Item]) -> None:
    outbox = Outbox(SECRET)
    for item in items:
        outbox.put(item)
    datagrams = list(outbox.datagrams())
    assert not outbox and all(len(datagram) <= DATAGRAM_BYTES for datagram in datagrams)
    assert [item for datagram in datagrams for item in read(datagram, SECRET)] == items


@settings(max_examples=25, deadline=None)
@given(ITEMS, st.integers(0, 10_000), st.binary(min_size=1, max_size=30))
def test_what_is_not_ours_is_refused(item: Item, at: int, junk: bytes) -> None:
    outbox = Outbox(SECRET)
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
    outbox = Outbox(SECRET)
    outbox.put(Load("a", 1, 2, 3))
    monkeypatch.setattr("tgi_trio.cluster.news.VERSION", 2)
    (newer,) = outbox.datagrams()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 1"):
        read(newer, SECRET)


def test_an_outbox_is_bounded() -> None:
    outbox = Outbox(SECRET)
    for number in range(MOST_ITEMS + 5):
        outbox.put(Load("a", number, 0, 1))
    assert len(outbox) == MOST_ITEMS
    first = read(next(outbox.datagrams()), SECRET)[0]
    assert first == Load("a", 5, 0, 1)
    with pytest.raises(ValueError, match="255"):
        outbox.put(Load("a" * 256, 0, 0, 1))


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
                routing.report(name, running=0, waiting=0, slots=8)
        nobody = ("127.0.0.1", 1)
        feeds = [Feed(routings[0], a, [nobody, at_b], SECRET), Feed(routings[1], b, [at_a], SECRET)]
        with a, b, stranger, trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for feed in feeds:
                    nursery.start_soon(feed.run, 0.001)
                await stranger.sendto(b"nonsense", at_b)
                feeds[0].tell("two", chain)
                feeds[0].tell("gone", chain)  # which the other has never heard of
                while not feeds[1].counts.datagrams_heard:
                    await trio.sleep(0.001)
                assert {routings[1].order(chain)[0] for _ in range(20)} == {"two"}
                feeds[1].tell_load("two", running=8, waiting=8, slots=8)
                while not feeds[0].counts.datagrams_heard:
                    await trio.sleep(0.001)
                assert {routings[0].order(())[0] for _ in range(20)} == {"one"}
                while not feeds[1].counts.datagrams_refused:
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()

    trio.run(main)
