"""What many tasks of a loop do at a time is spread over its turns."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import trio

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import ENDLESS, STREAM, Client, read_until, served, until
from tests.router.http.wire.http2_client import Http2
from tests.support.turns import Turns, counted_turns
from tgi_trio.router.http.wire.pace import LoopPace

pytestmark = pytest.mark.trio


class Time:
    """Goes on by what is computed alone, and by so many seconds whenever it is asked for."""

    def __init__(self, each: float = 0.0) -> None:
        self.now, self.each = 0.0, each

    def __call__(self) -> float:
        self.now += self.each
        return self.now


async def begin_many(
    pace: LoopPace, clock: Time, turns: Turns, tasks: int, seconds: float
) -> list[int]:
    """Have tasks that are ready together compute for so long; returns how many did in each turn."""
    begun = Counter[int]()

    async def one() -> None:
        await pace.breathe()
        clock.now += seconds
        begun[turns.count] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(tasks):
            nursery.start_soon(one)
    return sorted(begun.values())


@contextmanager
def watched() -> Iterator[tuple[LoopPace, Time, Turns]]:
    clock = Time()
    pace = LoopPace(clock)
    with counted_turns() as turns, pace.watching():
        yield pace, clock, turns


async def hog(clock: Time) -> None:
    while True:
        clock.now += 1.0
        await trio.lowlevel.checkpoint()


async def test_what_is_long_begins_in_a_young_turn() -> None:
    with watched() as (pace, clock, turns):
        assert await begin_many(pace, clock, turns, 6, 0.7e-3) == [2, 2, 2]
        assert await begin_many(pace, clock, turns, 3, 9e-3) == [1, 1, 1]
        assert await begin_many(pace, clock, turns, 50, 1e-5) == [50]
    with counted_turns() as turns:
        assert await begin_many(pace, clock, turns, 6, 1.5e-3) == [6], "nobody looks at the turns"


async def test_one_task_begins_in_each_turn_that_others_make_long() -> None:
    with watched() as (pace, clock, turns):
        async with trio.open_nursery() as hogging:
            hogging.start_soon(hog, clock)
            await trio.lowlevel.checkpoint()
            begun = await begin_many(pace, clock, turns, 800, 0.2e-3)
            hogging.cancel_scope.cancel()
    # The hog runs first or last in a turn: in an old turn one task begins, in a young one five.
    assert sum(begun) == 800
    assert max(begun) <= 6


async def test_tasks_that_wait_are_not_woken_in_every_turn() -> None:
    with watched() as (pace, clock, turns):
        before = turns.count, turns.steps
        begun = await begin_many(pace, clock, turns, 400, 0.6e-3)
        took, steps = turns.count - before[0], turns.steps - before[1]
    assert begun == [2] * 200
    assert steps < 14 * took


async def test_a_task_that_is_cancelled_leaves_its_place_to_others() -> None:
    with watched() as (pace, clock, turns):
        clock.now += 1.0
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(pace.breathe)
            nursery.cancel_scope.cancel()
        clock.now += 1.0
        assert sum(await begin_many(pace, clock, turns, 30, 0.2e-3)) == 30


@pytest.mark.parametrize("by_a_step", [False, True])
async def test_clients_that_leave_together_are_noticed_one_after_the_other(
    by_a_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As are those that ask together: time goes on whenever somebody looks how late it is.

    `by_a_step`: their next tokens cannot be written, before anybody reads that they have left.
    """
    engine, count = FakeEngine(lambda prompt: ENDLESS), 40
    request = Client.request("POST", "/generate_stream", STREAM, {})
    pace = LoopPace(Time(0.3e-3))
    async with served(engine, running=False, pace=pace) as server:
        server.app.pace = pace
        streams = [await server.raw() for _ in range(count)]
        await trio.testing.wait_all_tasks_blocked()
        with counted_requests(engine, monkeypatch) as (asked, left):
            for stream in streams:  # without a look at the sockets in between
                os.write(stream.socket.fileno(), request)
            await until(lambda: len(engine.live) == count)
            for stream in streams:
                await read_until(stream, b"\r\n\r\n")
            for stream in streams:
                stream.socket.close()
            for _ in range(2 if by_a_step else 0):  # the first is sent to nobody
                engine.step()
            await until(lambda: not engine.live)
    assert sum(asked.values()) == sum(left.values()) == count
    assert max(asked.values()) <= 4 and max(left.values()) <= 4


@pytest.mark.parametrize("how", ["streams", "connection"])
async def test_streams_of_http2_that_leave_together_are_noticed_one_after_the_other(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether each is given up, or all of them with their connections; as are those that ask."""
    engine, each = FakeEngine(lambda prompt: ENDLESS), 8
    async with served(engine, running=False, pace=LoopPace(Time(0.3e-3))) as server:
        clients = [Http2(await server.raw()) for _ in range(10)]
        flushes = [client.flush for client in clients]
        for client in clients:  # what is to be sent is sent later, for all of them together
            client.flush = trio.lowlevel.checkpoint  # type: ignore[method-assign]
            for _ in range(each):
                await client.post("/generate_stream", STREAM)
        with counted_requests(engine, monkeypatch) as (asked, left):
            for flush in flushes:
                await flush()
            await until(lambda: len(engine.live) == each * len(clients))
            for client in clients:
                await client.pump(partial(are_answered, client, each))
                for id in client.statuses if how == "streams" else ():
                    client.connection.reset_stream(id)
            for client, flush in zip(clients, flushes, strict=True):
                if how == "streams":
                    await flush()
                else:
                    client.stream.socket.close()  # type: ignore[attr-defined]
            await until(lambda: not engine.live)
    assert sum(asked.values()) == sum(left.values()) == each * len(clients)
    assert max(asked.values()) <= 4 and max(left.values()) <= 4


def are_answered(client: Http2, count: int) -> bool:
    return len(client.statuses) == count


@contextmanager
def counted_requests(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Counter[int], Counter[int]]]:
    """Count how many requests are submitted, and how many leave, in each turn of the loop."""
    asked, left = Counter[int](), Counter[int]()
    submit, leave = engine.submit, engine.leave
    with counted_turns() as turns:

        def submit_counted(*given, **named):
            asked[turns.count] += 1
            return submit(*given, **named)

        def leave_counted(stream):
            left[turns.count] += 1
            leave(stream)

        monkeypatch.setattr(engine, "submit", submit_counted)
        monkeypatch.setattr(engine, "leave", leave_counted)
        yield asked, left


@pytest.mark.parametrize("stream", [False, True])
async def test_generations_of_one_request_are_begun_a_few_in_a_turn(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, pace = FakeEngine(lambda prompt: "Hi"), LoopPace(Time(0.3e-3))
    async with served(engine, pace=pace) as server:
        server.app.pace = pace
        client = await server.connect()
        with counted_requests(engine, monkeypatch) as (asked, _):
            body = {"prompt": "x", "n": 40, "stream": stream}
            answer = await client.post("/v1/completions", body)
    assert answer.status == 200 and answer.text.count('"text":"i') == (40 if stream else 0)
    assert answer.text.count('"Hi"') == (0 if stream else 40)
    assert sum(asked.values()) == 40 and max(asked.values()) <= 4
