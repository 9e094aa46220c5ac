"""When all objects are looked at for cyclic garbage."""

from __future__ import annotations

import gc

import pytest
import trio
import trio.testing

from tgi_trio.router.garbage import collect_when_idle, collecting_young


class House:
    """Says how many requests there are and how many objects, and counts the looks."""

    def __init__(self) -> None:
        self.requests, self.young, self.looks = 1, 0, 0

    def collect(self) -> None:
        self.looks += 1
        self.young = 0

    async def run(self) -> None:
        await collect_when_idle(lambda: self.requests, self.collect, lambda: (0, self.young, 0))


@pytest.mark.trio
async def test_nobody_who_is_served_waits_for_a_look(
    autojump_clock: trio.testing.MockClock,
) -> None:
    house = House()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(house.run)
        house.young = 2500
        await trio.sleep(1000)
        assert house.looks == 0
        house.requests = 0
        await trio.sleep(2)
        assert house.looks == 1
        await trio.sleep(1000)
        assert house.looks == 1, "there is nothing new to be found"
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_server_that_is_never_idle_does_not_grow(
    autojump_clock: trio.testing.MockClock,
) -> None:
    house = House()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(house.run)
        for _ in range(3):
            house.young = 3000
            await trio.sleep(2)
        assert house.looks == 3
        nursery.cancel_scope.cancel()


def test_python_looks_at_young_objects_alone_meanwhile() -> None:
    before = gc.get_threshold()
    with collecting_young():
        assert gc.isenabled()
        young, *older = [each["collections"] for each in gc.get_stats()]
        size = gc.get_threshold()[0]
        kept: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(500)]
        assert kept and [each["collections"] for each in gc.get_stats()[1:]] == older
        assert gc.get_stats()[0]["collections"] > young
        assert gc.get_count()[1] >= 300, "what `collect_when_idle` goes by"
    assert gc.get_threshold() == before
