"""When objects are looked at for cyclic garbage, and which."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from tgi_trio.router.garbage import ALL, OLDER, YOUNG, collect_in_between, collecting_when_told

MILLION = 1_000_000


class House:
    """Says how many requests there are and how many objects, and remembers the looks."""

    def __init__(self) -> None:
        self.requests, self.large, self.blocks, self.let_in = 1, 0, 0, 0
        self.counts = [0, 0, 0]  # since the last looks, as Python has them
        self.looks: list[int] = []
        self.asked = 0  # how often

    def ask(self) -> int:
        self.asked += 1
        return self.requests

    @property
    def older_looks(self) -> list[int]:
        """Return the looks at others than young objects."""
        return [look for look in self.looks if look != YOUNG]

    def collect(self, generation: int) -> None:
        self.looks.append(generation)
        self.counts[: generation + 1] = [0] * (generation + 1)
        if generation < ALL:
            self.counts[generation + 1] += 1

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[House]:
        house = cls()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                collect_in_between,
                *(house.ask, lambda: house.large, house.collect),
                lambda: (house.counts[0], house.counts[1], house.counts[2]),
                *(lambda: house.blocks, lambda: house.let_in),
            )
            await trio.testing.wait_all_tasks_blocked()
            yield house
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_nobody_who_is_served_waits_for_a_look_at_old_objects(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with House.open() as house:
        house.blocks = 5 * MILLION
        await trio.sleep(700)
        assert house.older_looks == []
        house.requests = 0
        await trio.sleep(4)
        house.requests = 1
        await trio.sleep(100)
        assert house.older_looks == [], "it was quiet for a moment"
        house.requests = 0
        await trio.sleep(6)
        assert house.older_looks == [OLDER]
        await trio.sleep(700)
        assert house.older_looks == [OLDER], "there is nothing new to be found"
        house.blocks += MILLION
        await trio.sleep(301)
        assert house.older_looks == [OLDER, OLDER], "somebody has left something behind meanwhile"


@pytest.mark.trio
async def test_it_is_not_quiet_while_many_come_whose_requests_are_not_there_yet(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Four thousand that come together are let in a few in a turn, and nobody is served yet."""
    async with House.open() as house:
        house.blocks, house.requests = 5 * MILLION, 0
        for _ in range(100):
            house.let_in += 20
            await trio.sleep(0.1)
        assert house.older_looks == []
        for _ in range(3):  # a probe each second or two is no rush
            house.let_in += 1
            await trio.sleep(2)
        assert house.older_looks == [OLDER]


@pytest.mark.trio
async def test_a_server_that_is_never_idle_does_not_grow(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with House.open() as house:
        for _ in range(3):
            house.blocks += 10 * MILLION
            await trio.sleep(301)
        assert house.older_looks == [OLDER] * 3


@pytest.mark.trio
async def test_young_objects_are_looked_at_where_these_are_few(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with House.open() as house:
        await trio.sleep(10)
        assert set(house.looks) == {YOUNG} and len(house.looks) >= 99, "however few there seem"
        house.looks.clear()
        house.counts[YOUNG] = 500_000  # somebody has sent a large body
        await trio.sleep(700)
        assert not house.looks
        house.counts[YOUNG], house.large = 1000, 1  # few objects, which may hold many
        await trio.sleep(700)
        assert not house.looks
        house.large = 0
        await trio.sleep(1)
        assert YOUNG in house.looks


def test_python_counts_what_is_gone_as_if_it_had_been_young() -> None:
    """So a count says nothing of how long a look takes: that a cache is full keeps it small."""
    with collecting_when_told():
        cache: list[list[int]] = [[] for _ in range(20_000)]
        gc.collect(YOUNG)
        for place in range(len(cache)):
            cache[place] = []
        assert gc.get_count()[YOUNG] < 1000
        assert len(gc.get_objects(generation=YOUNG)) >= 20_000


@pytest.mark.trio
async def test_a_server_that_serves_nobody_sleeps(autojump_clock: trio.testing.MockClock) -> None:
    async with House.open() as house:
        await trio.sleep(10)
        assert house.asked >= 99
        house.requests = 0
        await trio.sleep(10)
        before = house.asked
        house.looks.clear()
        await trio.sleep(100)
        assert house.asked - before <= 101, "ten times a second took a hundredth of a core"
        assert not house.looks
        house.counts[YOUNG] = 1000
        await trio.sleep(2)
        assert house.looks == [YOUNG], "somebody came and went"
        house.requests = 1
        await trio.sleep(2)
        assert len(house.looks) > 5 and house.asked - before >= 110


@pytest.mark.trio
async def test_all_objects_are_looked_at_now_and_then(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with House.open() as house:
        house.requests, house.counts[ALL] = 0, 18
        for _ in range(4):
            house.blocks += MILLION
            await trio.sleep(301)
        assert house.looks == [OLDER, OLDER, ALL, OLDER]


def test_python_looks_at_nothing_by_itself_meanwhile() -> None:
    gc.collect()
    with collecting_when_told():
        assert not gc.isenabled()
        before = [each["collections"] for each in gc.get_stats()]
        kept: list[list[list[int]]] = [[[] for _ in range(1000)] for _ in range(500)]
        assert kept and [each["collections"] for each in gc.get_stats()] == before
        assert gc.get_count()[YOUNG] >= 500_000, "what `collect_in_between` goes by"
        kept.clear()
        assert gc.get_count()[YOUNG] < 500_000, "what is gone does not count"
        gc.collect(YOUNG)
        assert gc.get_count()[OLDER] == 1
    assert gc.isenabled()
