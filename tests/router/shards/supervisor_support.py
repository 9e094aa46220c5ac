"""A supervisor with real processes of fake shards, and clients whose answers are known."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import trio

from tests.router.harness import byte_tokenizer, make_request, scheduling_limits
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.engine.stream import TokenStream
from tgi_trio.router.shards.group_states import ShardState
from tgi_trio.router.shards.local_group import LocalGroup
from tgi_trio.router.shards.supervisor import Supervisor, Watch
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.testing.fake_model import FakeSettings, continuation


@dataclass
class FakeArgv:
    """Command lines of fake shards; `plan[n]` overrides the settings of incarnation n (from 0)."""

    base: FakeSettings = field(default_factory=lambda: FakeSettings(vocab_size=259, step_ms=2))
    plan: list[dict[str, object]] = field(default_factory=list)
    spawned: int = 0

    def __call__(self, spec: str, settings: str) -> list[str]:
        override = self.plan[self.spawned] if self.spawned < len(self.plan) else {}
        self.spawned += 1
        text = json.dumps(asdict(self.base) | override)
        return [sys.executable, "-m", "tgi_trio.testing.fake_shard", spec, text]


def make_supervisor(
    argv: FakeArgv, stall: float = 60.0, limit: int = 5, stop: float = 5.0
) -> Supervisor:
    metrics = Metrics(max_input_tokens=4096, max_total_tokens=4096)
    return Supervisor(
        metrics,
        LocalGroup.starter(argv, ShardSettings(model_path=Path("unused"))),
        WarmupRequest(512, 4096, 64, 0),
        watch=Watch(stall, limit, stop),
    )


@asynccontextmanager
async def supervised(
    folder: Path, argv: FakeArgv, stall: float = 60.0, limit: int = 5
) -> AsyncIterator[tuple[Engine, Supervisor]]:
    """Run a supervisor and an engine; leaving the block stops both."""
    supervisor = make_supervisor(argv, stall, limit)
    async with trio.open_nursery() as nursery:
        started = await nursery.start(supervisor.run)
        limits = scheduling_limits(started.memory.blocks, started.memory.block_size)
        metrics = Metrics(max_input_tokens=4096, max_total_tokens=4096)
        engine = Engine(AdmissionLimits(128), limits, byte_tokenizer(folder), metrics)
        supervisor.attach(engine)
        yield engine, supervisor
        supervisor.stop()
        await supervisor.ended.wait()
        assert supervisor.state is ShardState.GONE
        with pytest.raises(ProcessLookupError):
            os.kill(supervisor.pids[0], 0)


async def wait_for_spawned(argv: FakeArgv, count: int) -> None:
    """Return when so many have been started: a stream may end before the death is noticed."""
    while argv.spawned < count:
        await trio.sleep(0.01)


async def ids_of(stream: TokenStream) -> list[int]:
    return [token.id async for tokens in stream for token in tokens]


class Clients:
    """Clients of an engine, and what they got, by prompt."""

    def __init__(self, engine: Engine, folder: Path, tokens: int) -> None:
        self.engine = engine
        self.tokenizer = byte_tokenizer(folder)
        self.tokens = tokens
        self.results: dict[str, list[int]] = {}

    async def run(self, prompt: str) -> None:
        with self.engine.submit(make_request(self.tokenizer, prompt, self.tokens)) as stream:
            self.results[prompt] = await ids_of(stream)

    def expect(self, settings: FakeSettings, prompts: Iterable[str]) -> dict[str, list[int]]:
        """Return what a shard that never dies answers."""
        ids = {prompt: self.tokenizer.encode_ids(prompt, False).tolist() for prompt in prompts}
        return {prompt: continuation(settings, ids[prompt], self.tokens) for prompt in ids}

    def check_that_all_is_free(self) -> None:
        scheduler = self.engine.scheduler
        scheduler.check()
        assert scheduler.free_blocks == scheduler.total_blocks
