"""Long computations of one loop are spread over its turns."""

from __future__ import annotations

from collections import Counter

import pytest
import trio

from tgi_trio.router.http.wire.pace import LoopPace

pytestmark = pytest.mark.trio


class Looks(trio.abc.Instrument):
    """Counts looks at the sockets."""

    def __init__(self) -> None:
        self.count = 0

    def after_io_wait(self, timeout: float) -> None:
        self.count += 1


class Time:
    """Goes on by what is computed alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def compute(pace: LoopPace, clock: Time, tasks: int, seconds: float) -> list[int]:
    """Have tasks that are ready together compute for so long; returns how many did in each turn."""
    looks, turns = Looks(), Counter[int]()
    trio.lowlevel.add_instrument(looks)

    async def one() -> None:
        await pace.breathe()
        clock.now += seconds
        turns[looks.count] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(tasks):
            nursery.start_soon(one)
    trio.lowlevel.remove_instrument(looks)
    return sorted(turns.values())


async def test_what_is_long_begins_in_a_young_turn() -> None:
    clock = Time()
    pace = LoopPace(clock)
    with pace.watching():
        assert await compute(pace, clock, 6, 0.7e-3) == [2, 2, 2]
        assert await compute(pace, clock, 3, 9e-3) == [1, 1, 1]
        assert await compute(pace, clock, 50, 1e-5) == [50]
    assert await compute(pace, clock, 6, 1.5e-3) == [6], "nobody looks at the turns"


async def test_nobody_waits_for_ever() -> None:
    """Where others make every turn long."""
    clock = Time()
    pace = LoopPace(clock)

    async def hog() -> None:
        while True:
            clock.now += 1.0
            await trio.lowlevel.checkpoint()

    with pace.watching():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hog)
            await trio.lowlevel.checkpoint()
            await pace.breathe()
            nursery.cancel_scope.cancel()
    assert clock.now < 100
