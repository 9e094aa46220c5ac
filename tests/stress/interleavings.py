"""Interleavings: an engine and its shards, with the smallest rings, until a run stands still.

    python -m tests.stress.interleavings --seeds 500

A seed decides the shard (its memory, copies, states, drafts), the way to it (rings of the smallest
size, or a connection whose buffers are small), what clients ask, when they leave and when shards
end. Prompts are longer than the rings. It also decides in which order trio runs its tasks; threads
remain as they come. What is looked for is a wait that nobody ends: a run that stands still while
somebody waits for something. Answers are compared, and at the end everything has to be free.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import trio
from tqdm import tqdm
from trio._core import _run as trio_run

from tests.router.harness import byte_tokenizer, make_request, scheduling_limits
from tests.stress.thread_shards import ThreadShard, UnsureHost, thread_shard
from tgi_trio.errors import GenerationError, Overloaded, Unavailable, ValidationError
from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.prefixes import KeepOrder
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.request import FinishReason, Request
from tgi_trio.router.shards import handshake
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.testing.fake_model import FakeSettings, continuation

PATIENCE_S: Final = 10.0  # without any progress, after which a run stands still
_LOOK_S: Final = 0.05
_WARMUP: Final = WarmupRequest(512, 4096, 64, 0)
_ADAPTERS: Final = 4
_RINGS: Final = ((4096, 4096), (4096, 1 << 21), (1 << 21, 4096), None)


class StoodStill(Exception):
    """A run in which somebody waits and nothing happens; the text says what there is."""


@dataclass
class Run:
    """One run."""

    seed: int
    tokenizer: Tokenizer
    folder: Path  # for prefixes that are kept
    patience: float = PATIENCE_S
    refused: Counter[str] = field(default_factory=Counter)  # requests, by kind of error
    answered: int = 0
    served: int = 0  # incarnations
    _progress: int = 0  # of clients
    _ended: bool = False

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        has_states, drafts = rng.random() < 0.3, rng.choice([0, 0, 3])
        host_blocks = rng.choice([0, 0, 50])
        self.fake = FakeSettings(
            vocab_size=259,
            step_ms=rng.choice([0, 0, 0, 0.3, 2]),
            blocks=rng.choice([40, 200, 1024]),
            runs_ahead=not drafts and rng.random() < 0.4,
            eos_after=rng.choice([0, 0, 7]),
            state_slots=rng.choice([9, 17]) if has_states else 0,
            host_blocks=host_blocks,
            host_slots=6 if host_blocks and has_states else 0,
            speculate=drafts,
        )
        self.rings = rng.choice(_RINGS)
        names = {f"a{n}": "nowhere" for n in range(_ADAPTERS)}
        self.registry = AdapterRegistry(names, rng.choice([1, 2]))
        self.host = UnsureHost(self.seed)
        self.shard: ThreadShard | None = None
        self.link: ShardLink | None = None
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine, once the first shard is ready."""
        if self._engine is None:
            raise RuntimeError("no shard has been ready yet")
        return self._engine

    async def play(self) -> None:
        """Play it to its end. Raises StoodStill, and AssertionError for whatever else is wrong."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._serve)
            nursery.start_soon(self.engine.watch_deadlines)
            nursery.start_soon(self._watch)
            async with trio.open_nursery() as clients:
                clients.start_soon(self._end_shards)
                clients.start_soon(self._keep)
                calm = self.rng.random() < 0.3
                for _ in range(self.rng.choice([5, 20, 40])):
                    if calm:  # one after the other: what wakes one does not wake another
                        await self._ask()
                        continue
                    clients.start_soon(self._ask)
                    if self.rng.random() < 0.3:
                        await trio.sleep(0.01 * self.rng.random())
            while self.engine.scheduler.held_blocks:
                await trio.sleep(0.001)
            self.engine.drain()
            await self.engine.wait_drained()
            self._check()
            self._ended = True
            nursery.cancel_scope.cancel()

    def _check(self) -> None:
        """Raise AssertionError unless nothing is held by anybody."""
        scheduler = self.engine.scheduler
        scheduler.check()
        self.registry.check()
        assert (self.engine.active, scheduler.queue_size, scheduler.batch_size) == (0, 0, 0)
        for adapter in map(self.registry.find, self.registry.names):
            assert (adapter.users, adapter.waiting) == (0, 0)

    # ---- shards ----------------------------------------------------------------------------------

    async def _serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve with one shard after the other, as a supervisor does."""
        while not self._ended:
            number = self.served + 1
            made = thread_shard(
                self.fake, self.host, number, self.rings, self.rng.choice([0, 0, 50])
            )
            with made as (shard, end):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_until_ended, shard, nursery.cancel_scope)
                    info, memory = await self._greet(end, number)
                    if self._engine is None:
                        self._engine = self._make_engine(info, memory)
                    self.shard, self.link, self.served = shard, ShardLink(end), number
                    task_status.started()
                    task_status = trio.TASK_STATUS_IGNORED
                    nursery.start_soon(self.link.send_waiting)
                    await self.engine.serve(self.link)
                self.link = None
            if shard.error is not None and not self._ended:
                raise AssertionError("a shard has failed") from shard.error

    async def _greet(self, end: CommandChannel, number: int) -> tuple[ShardInfo, WarmupResult]:
        await handshake.hello(end, number)
        info = await handshake.info(end)
        for order in self.registry.orders():
            self.registry.settle(await handshake.load_adapter(end, order))
        return info, await handshake.warm_up(end, _WARMUP)

    def _make_engine(self, info: ShardInfo, memory: WarmupResult) -> Engine:
        rng = self.rng
        limits = replace(
            scheduling_limits(memory.blocks, info.block_size),
            reserve=False,
            prefix_caching=rng.random() < 0.7,
            max_batch_size=rng.choice([4, 16, 64]),
            max_batch_prefill_tokens=rng.choice([64, 512, 4096]),
            max_queued_requests=500,
            token_budget=rng.choice([32, 512]),
            state_slots=max(0, memory.state_slots - 1),
            host_blocks=max(0, memory.host_blocks - 1),
            host_slots=max(0, memory.host_slots - 1),
            speculate=self.fake.speculate,
        )
        metrics = Metrics(max_input_tokens=4096, max_total_tokens=4096)
        admission = AdmissionLimits(1000)
        return Engine(admission, limits, self.tokenizer, metrics, adapters=self.registry)

    async def _end_shards(self) -> None:
        for _ in range(self.rng.choice([0, 0, 1, 3])):
            await trio.sleep(0.2 * self.rng.random())
            if self.shard is not None:
                self.shard.dying.set()

    async def _keep(self) -> None:
        """Have a shard write blocks while it serves; one that ends never answers."""
        for n in range(self.rng.choice([0, 3])):
            await trio.sleep(0.05 * self.rng.random())
            with trio.move_on_after(0.05):
                if self.link is not None:
                    order = KeepOrder(self.folder, b"%16d" % n, (1, 2))
                    assert not (await self.link.keep_prefixes(order)).error

    # ---- clients ---------------------------------------------------------------------------------

    def _make_request(self) -> Request:
        rng, room = self.rng, (self.fake.blocks - 1) * self.fake.block_size
        start = rng.choice(["", "what many have in common. " * rng.randrange(1, 9)])
        length = rng.choice([1, 5, 50, 300, 3000, 3000])
        prompt = (start + "".join(rng.choices("abcdef ", k=length)))[: room - 40]
        deadline = trio.current_time() + 0.05 * rng.random() if rng.random() < 0.15 else None
        stop = ("ab",) if rng.random() < 0.1 else ()
        count = rng.choice([1, 2, 8, 30])
        return make_request(self.tokenizer, prompt, count, stop, deadline=deadline)

    async def _ask(self) -> None:
        """Ask for one answer; perhaps with an adapter, perhaps not waiting for the end."""
        rng, request = self.rng, self._make_request()
        name = f"a{rng.randrange(_ADAPTERS)}" if rng.random() < 0.3 else None
        patience = rng.choice([0, 0.001, 0.01, 0.05, *[float("inf")] * 6])
        try:
            with trio.move_on_after(patience), self.engine.permit():
                await (self._take(request) if name is None else self._take_with(name, request))
        except (GenerationError, Overloaded, Unavailable, ValidationError) as error:
            self.refused[type(error).__name__] += 1
        self._progress += 1

    async def _take_with(self, name: str, request: Request) -> None:
        adapter = self.registry.find(name)
        await self.registry.acquire(adapter)
        try:
            sampling = replace(request.sampling, adapter=adapter.number)
            await self._take(replace(request, sampling=sampling))
        finally:
            self.registry.release(adapter)

    async def _take(self, request: Request) -> None:
        with self.engine.submit(request) as stream:
            found: list[int] = []
            async for tokens in stream:
                self._progress += 1
                found += [token.id for token in tokens]
            if stream.outcome.reason is not FinishReason.STOP_SEQUENCE:
                most = request.stopping.max_new_tokens
                assert found == continuation(self.fake, request.prompt_ids.tolist(), most)
            self.answered += 1

    # ---- whether it goes on ----------------------------------------------------------------------

    async def _watch(self) -> None:
        """Raise StoodStill where nothing happens for too long."""
        seen: object = None
        since = trio.current_time()
        while True:
            await trio.sleep(_LOOK_S)
            found = self._progress, self.served, self.engine.last_step_at
            if found != seen:
                seen, since = found, trio.current_time()
            elif trio.current_time() - since > self.patience:
                raise StoodStill(self._describe())

    def _describe(self) -> str:
        """Return what there is of everything that may be waited for."""
        scheduler = self.engine.scheduler
        adapters = [self.registry.find(name) for name in self.registry.names]
        waited = [(each.name, each.state.value, each.users, each.waiting) for each in adapters]
        return (
            f"seed {self.seed}, rings {self.rings}, {self.fake}: {self.engine.active} streams, "
            f"{scheduler.queue_size} queued, {scheduler.batch_size} in the batch, "
            f"{scheduler.held_blocks} blocks held; adapters (name, state, users, waiting): {waited}"
        )


async def _until_ended(shard: ThreadShard, scope: trio.CancelScope) -> None:
    """Cancel `scope` when a shard has ended."""
    while shard.alive:
        await trio.sleep(0.001)
    scope.cancel()


def play(seed: int, tokenizer: Tokenizer, folder: Path, patience: float = PATIENCE_S) -> Run:
    """Play the run of a seed and return it. Raises what `Run.play` does, in groups."""
    run = Run(seed, tokenizer, folder, patience)
    with _ordered_by(seed):
        trio.run(run.play)
    return run


@contextmanager
def _ordered_by(seed: int) -> Iterator[None]:
    """Have the order in which trio runs tasks follow from a seed within the block."""
    usual = trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio_run._r.seed(seed)
    try:
        yield
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = usual  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=200, help="runs")
    parser.add_argument("--first", type=int, default=0, help="the first run's seed")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds")
    options = parser.parse_args()
    refused, answered, served = Counter[str](), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = byte_tokenizer(folder)
        for seed in tqdm(range(options.first, options.first + options.seeds), disable=None):
            run = play(seed, tokenizer, folder, options.patience)
            refused += run.refused
            answered, served = answered + run.answered, served + run.served
    print(
        f"{options.seeds} runs with {served} shards: none stood still. "
        f"{answered} answers, all as they should be; refused: {dict(refused)}"
    )


if __name__ == "__main__":
    main()
