"""Room for a long prompt is made bit by bit: others get their tokens in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import trio
import trio.testing

from tests.router.engine.one_step import OneStep
from tests.router.harness import byte_tokenizer, make_request, scheduling_limits
from tests.support.turns import counted_turns
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.scheduling.admission import MOST_EVICTED
from tgi_trio.router.scheduling.kept_prefixes import KeptPrefixes, KeptRun
from tgi_trio.router.scheduling.shard_commands import Command, Prefill
from tgi_trio.router.telemetry.metrics import Metrics

BLOCKS, SIZE = 5 * MOST_EVICTED, 2  # of memory, all of them cached; tokens of a block
RUN = 8  # blocks of a cached prompt

pytestmark = pytest.mark.trio


class Patient(OneStep):
    """Has its reader wait until there is something to be read, as a real link does."""

    def __init__(self) -> None:
        super().__init__()
        self._news = trio.Event()

    def send(self, command: Command) -> None:
        super().send(command)
        self._news.set()

    async def wait(self) -> None:
        await self._news.wait()
        self._news = trio.Event()


def make_engine(path: Path, run: int = RUN) -> Engine:
    """Return an engine whose memory is full of cached prompts of `run` blocks, newest first."""
    tokens = BLOCKS * SIZE
    limits = replace(
        scheduling_limits(BLOCKS + 1, SIZE),
        max_total_tokens=tokens,
        max_batch_prefill_tokens=tokens,
        prefix_caching=True,
    )
    engine = Engine(AdmissionLimits(8), limits, byte_tokenizer(path), Metrics(64, 64))
    ids = np.arange(tokens, dtype=np.int32).reshape(-1, run * SIZE)
    runs = tuple(KeptRun("", -1, each.tobytes()) for each in ids)
    engine.scheduler.restore_prefixes(KeptPrefixes(SIZE, runs), len(runs))
    assert engine.scheduler.cached_blocks == BLOCKS
    return engine


@pytest.mark.parametrize("known", [0, RUN])
async def test_a_prompt_in_the_place_of_many(
    tmp_path: Path, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`known`: blocks of the prompt that are cached, which stay although they are the oldest."""
    engine = make_engine(tmp_path)
    scheduler = engine.scheduler
    tokens = np.arange(BLOCKS * SIZE, dtype=np.int32)
    prompt = tokens[tokens.size - known * SIZE :]
    new = 3 * MOST_EVICTED * SIZE
    request = replace(
        make_request(byte_tokenizer(tmp_path), "hello", 1),
        prompt_ids=np.concatenate([prompt, np.full(new, 7, np.int32)]),
    )
    link = Patient()
    evict = scheduler.schedule
    freed = Counter[int]()  # blocks in each turn of the loop
    with counted_turns() as turns:

        def evict_and_count(now: float) -> list[Command]:
            before = scheduler.free_blocks
            commands = list(evict(now))
            freed[turns.count] += scheduler.free_blocks - before if not commands else 0
            return commands

        monkeypatch.setattr(scheduler, "schedule", evict_and_count)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.serve, cast("ShardLink", link))
            nursery.start_soon(engine.watch_deadlines)
            await trio.testing.wait_all_tasks_blocked()
            stream = engine.submit(request)
            while not stream.generated:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert max(freed.values()) == MOST_EVICTED
    assert sum(freed.values()) == 2 * MOST_EVICTED, "the rest goes as the prompt is admitted"
    assert scheduler.counters["prefix_hit_tokens"] == known * SIZE


async def test_the_rest_of_a_run_that_is_used_goes_at_once(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, run=BLOCKS)
    prompt = np.arange(BLOCKS * SIZE, dtype=np.int32)
    prompt[RUN * SIZE :] = 7
    request = make_request(byte_tokenizer(tmp_path), "hello", 1)
    with engine.submit(replace(request, prompt_ids=prompt[: 3 * MOST_EVICTED * SIZE])):
        assert any(isinstance(each, Prefill) for each in engine.scheduler.schedule(0.0))
        assert not engine.scheduler.makes_room
        assert engine.scheduler.counters["prefix_hit_tokens"] == RUN * SIZE


async def test_who_leaves_while_room_is_made_leaves_nothing_to_be_done(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    request = replace(
        make_request(byte_tokenizer(tmp_path), "hello", 1),
        prompt_ids=np.full(4 * MOST_EVICTED * SIZE, 7, np.int32),
    )
    with engine.submit(request):
        for bits in (1, 2):
            assert not any(isinstance(each, Prefill) for each in engine.scheduler.schedule(0.0))
            assert engine.scheduler.makes_room
            assert engine.scheduler.free_blocks == bits * MOST_EVICTED
    assert not engine.scheduler.makes_room
    assert engine.scheduler.held_blocks == 0
