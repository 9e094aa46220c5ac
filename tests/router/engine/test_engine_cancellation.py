"""Clients that leave at any point of their request, through the engine and real rings."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest
import trio

from tests.router.harness import Bench, engine_on_fake_shard, make_request
from tgi_trio.router.scheduling.lifecycle import SequenceState
from tgi_trio.testing.fake_model import FakeSettings

# TGI_TRIO_CANCELLATIONS=10000 for the whole of it; a minute and a half.
REQUESTS = int(os.environ.get("TGI_TRIO_CANCELLATIONS", "600"))
CLIENTS = 48
BLOCKS = 60  # of 16 tokens: too few for everybody, so that some are preempted


def where(bench: Bench, sequence_id: int) -> str:
    """Return what the sequence of a client that leaves is doing."""
    sequence = bench.engine.scheduler.find(sequence_id)
    if sequence is None:
        return "ended"
    if sequence.state is SequenceState.WAITING and sequence.order:
        return "preempted"
    return sequence.state.value


async def client(bench: Bench, rng: random.Random, left: Counter[str]) -> None:
    """Ask for something and leave at a random point; what came must be right until then."""
    prompt, count = "x" * rng.randint(1, 100) + str(rng.random()), rng.randint(1, 300)
    with trio.CancelScope() as scope:
        kind = rng.choice(
            ["parsing", "at once", "prefill", "time", "time", "token", "token", "last"]
        )
        if kind == "parsing":
            with bench.engine.permit():
                scope.cancel()
                left["parsing"] += 1
                await trio.lowlevel.checkpoint()
        if kind == "time":
            scope.deadline = trio.current_time() + rng.random() * 0.2
        leave_at = {"at once": 0, "prefill": 0, "token": rng.randint(1, count), "last": count}.get(
            kind, 1 << 30
        )
        with bench.engine.permit():
            stream = bench.engine.submit(make_request(bench.tokenizer, prompt, count))
            try:
                with stream:
                    got = 0
                    while kind == "prefill" and where(bench, stream.id) == "waiting":
                        # Not a bare checkpoint: a task that spins keeps the GIL, and the shard is
                        # a thread of this process. On a slow machine it got nearly none of it.
                        await trio.sleep(0.0005)
                    if leave_at > 0:
                        async for tokens in stream:
                            got += len(tokens)
                            if got >= leave_at:
                                break
                    left[where(bench, stream.id)] += 1
            except trio.Cancelled:
                left["cancelled"] += 1
                raise


@pytest.mark.trio
async def test_clients_that_leave_anywhere_leave_nothing_behind(tmp_path: Path) -> None:
    rng = random.Random(4)
    left: Counter[str] = Counter()
    fake = FakeSettings(vocab_size=259, blocks=BLOCKS, token_us=4)
    async with engine_on_fake_shard(tmp_path, fake, growing=True) as bench:
        scheduler = bench.engine.scheduler
        todo = iter(range(REQUESTS))

        async def clients() -> None:
            for _ in todo:
                await client(bench, rng, left)

        async with trio.open_nursery() as nursery:
            for _ in range(CLIENTS):
                nursery.start_soon(clients)
        await bench.settle()
        assert scheduler.free_blocks == scheduler.total_blocks
        with trio.fail_after(120):
            while bench.end.try_receive() is not None:  # the last acknowledgements
                bench.end.release()
        accepted, ended = bench.balance()
        assert accepted == ended == REQUESTS - left["parsing"]
        assert bench.metrics.value("tgi_request_failed") == 0
        assert scheduler.counters["preempted"] > 0
        for counter in ("aborted_waiting", "aborted_prefilling", "aborted_running"):
            assert scheduler.counters[counter] > 0
        assert left["parsing"] and left["cancelled"] and left["ended"]
        with bench.engine.submit(make_request(bench.tokenizer, "after all", 3)) as stream:
            assert sum([len(tokens) async for tokens in stream]) == 3
