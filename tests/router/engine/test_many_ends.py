"""Requests that end at one time are answered few in a turn of the loop: others wait meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing

from tests.router.engine.one_step import OneStep
from tests.router.harness import byte_tokenizer, make_request, scheduling_limits
from tests.support.turns import Turns, counted_turns
from tgi_trio.errors import GenerationError
from tgi_trio.router.engine.engine import ENDS_PER_TURN, AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.request import Outcome, Token
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.telemetry.metrics import Metrics

COUNT = 5 * ENDS_PER_TURN

pytestmark = pytest.mark.trio


class Ends:
    """What many requests of one engine end with, in order, and in which turns."""

    def __init__(self, engine: Engine, turns: Turns) -> None:
        self.engine = engine
        self.found: list[tuple[int, Outcome | BaseException]] = []  # the request's number
        self.in_turns = Counter[int]()
        self._turns = turns

    def sink(self, number: int, tokens: list[Token], end: Outcome | BaseException | None) -> None:
        if end is not None:
            self.found.append((number, end))
            self.in_turns[self._turns.count] += 1

    async def all(self) -> None:
        while len(self.found) < COUNT:
            await trio.lowlevel.checkpoint()


class Looked(Scheduler):
    """Counts how often somebody looks whether deadlines have passed."""

    def __init__(self, limits: SchedulingLimits) -> None:
        super().__init__(limits)
        self.looks = 0

    def expire(self, now: float, most: int | None = None) -> list[int]:
        self.looks += 1
        return super().expire(now, most)


def make_engine(
    path: Path, scheduler: Callable[[SchedulingLimits], Scheduler] = Scheduler
) -> Engine:
    limits = replace(scheduling_limits(), max_batch_size=COUNT, max_batch_prefill_tokens=512)
    tokenizer, metrics = byte_tokenizer(path), Metrics(64, 64)
    return Engine(AdmissionLimits(COUNT), limits, tokenizer, metrics, scheduler=scheduler)


def submit(engine: Engine, path: Path, ends: Ends, deadline: float | None = None) -> None:
    """Submit as many as there are; the later ones have earlier deadlines."""
    request = make_request(byte_tokenizer(path), "hello", 1)
    for n in range(COUNT):
        until = None if deadline is None else deadline - n * 1e-4
        engine.submit(replace(request, deadline=until)).attach(partial(ends.sink, n))


async def test_deadlines_that_pass_together(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    with counted_turns() as turns:
        ends = Ends(engine, turns)
        submit(engine, tmp_path, ends, deadline := trio.current_time() + 2)
        await trio.sleep_until(deadline + 0.01)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.watch_deadlines)
            await ends.all()
            nursery.cancel_scope.cancel()
    assert [number for number, _ in ends.found] == list(reversed(range(COUNT)))
    for _, end in ends.found:
        assert isinstance(end, GenerationError)
        assert str(end) == "the request's deadline has passed"
    assert max(ends.in_turns.values()) == ENDS_PER_TURN
    assert engine.active == engine.scheduler.queue_size == 0


async def test_answers_that_end_in_one_step(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    with counted_turns() as turns:
        ends = Ends(engine, turns)
        async with trio.open_nursery() as nursery:
            submit(engine, tmp_path, ends)
            nursery.start_soon(engine.serve, cast("ShardLink", OneStep(ends=COUNT)))
            await ends.all()
            nursery.cancel_scope.cancel()
    assert [number for number, _ in ends.found] == list(range(COUNT))
    assert max(ends.in_turns.values()) == ENDS_PER_TURN
    assert engine.active == 0


@pytest.mark.parametrize("first", ["deadlines", "steps"])
async def test_deadlines_that_pass_while_a_step_ends_others(tmp_path: Path, first: str) -> None:
    """Four answers and a step in one turn took 7 ms."""
    engine = make_engine(tmp_path)
    with counted_turns() as turns:
        ends = Ends(engine, turns)
        submit(engine, tmp_path, ends)
        submit(engine, tmp_path, ends, deadline := trio.current_time() + 2)  # they are queued
        await trio.sleep_until(deadline + 0.01)
        step = partial(engine.serve, cast("ShardLink", OneStep(ends=COUNT)))
        tasks: list[Callable[[], Awaitable[None]]] = [engine.watch_deadlines, step]
        async with trio.open_nursery() as nursery:
            for task in tasks if first == "deadlines" else tasks[::-1]:
                nursery.start_soon(task)
            while len(ends.found) < 2 * COUNT:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    failed = sum(isinstance(end, GenerationError) for _, end in ends.found)
    assert COUNT // 2 < failed <= COUNT  # one is sent to the shard as others end, and may end well
    assert max(ends.in_turns.values()) <= ENDS_PER_TURN + 1
    assert engine.active == 0


async def test_a_deadline_is_looked_at_only_if_it_is_the_earliest(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, Looked)
    scheduler, request = (
        cast("Looked", engine.scheduler),
        make_request(byte_tokenizer(tmp_path), "hello", 1),
    )
    now = trio.current_time()
    # Of each, in which order requests come: its deadline, and the looks there have been since.
    cases = [(None, 0), (50.0, 1), (60.0, 1), (None, 1), (50.0, 1), (40.0, 2), (45.0, 2)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.watch_deadlines)
        await trio.testing.wait_all_tasks_blocked()
        for after, looks in cases:
            engine.submit(replace(request, deadline=None if after is None else now + after))
            await trio.testing.wait_all_tasks_blocked()
            assert scheduler.looks == looks
        nursery.cancel_scope.cancel()
