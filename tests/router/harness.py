"""An engine on a real channel with a FakeShard thread behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers
import trio

from tgi_trio.ipc.endpoints import DEFAULT_RING_BYTES, Endpoints
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.router_end import ReplyBell, RouterEnd
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.engine.stream import TokenStream
from tgi_trio.router.request import Request, StoppingCriteria, Token
from tgi_trio.router.scheduling import SchedulingLimits
from tgi_trio.router.shards import handshake
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.regexes import compile_regex
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.testing.fake_model import FakeSettings, continuation
from tgi_trio.testing.fake_shard import FakeShard

SPECIALS = ["<s>", "<pad>", "</s>"]  # ids 0, 1, 2: what FakeSettings expects below `first_id`


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer with one token per byte: id = 3 + index in the byte alphabet."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Tokenizer.from_folder(folder)


def make_request(
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 8,
    stop: tuple[str, ...] = (),
    keep_stop: bool = True,
    stop_regex: tuple[str, ...] = (),
    stop_ids: frozenset[int] = frozenset(),
    deadline: float | None = None,
    emitted: tuple[int, ...] = (),
) -> Request:
    """Return a greedy request."""
    return Request(
        prompt_ids=np.asarray(tokenizer.encode_ids(prompt, False), dtype=np.int32),
        sampling=SamplingParameters(),
        stopping=StoppingCriteria(
            max_new_tokens,
            stop=stop,
            stop_regex=tuple(map(compile_regex, stop_regex)),
            stop_ids=stop_ids,
            keep_stop=keep_stop,
        ),
        deadline=deadline,
        emitted=emitted,
    )


def scheduling_limits(blocks: int = 1024, block_size: int = 16) -> SchedulingLimits:
    """Return limits that are wide enough not to matter."""
    return SchedulingLimits(
        blocks=blocks,
        block_size=block_size,
        max_batch_size=64,
        max_batch_prefill_tokens=4096,
        max_batch_total_tokens=0,
        max_total_tokens=4096,
        waiting_served_ratio=0.3,
        max_waiting_tokens=20,
        max_queued_requests=128,
        max_queued_tokens=100_000,
        token_budget=512,
        reserve=True,
        prefix_caching=False,
    )


@dataclass
class Bench:
    """What a test holds on to."""

    engine: Engine
    tokenizer: Tokenizer
    metrics: Metrics
    shard: FakeShard
    end: RouterEnd
    info: ShardInfo

    def settled(self) -> bool:
        """Return whether nothing is left anywhere."""
        scheduler = self.engine.scheduler
        return (
            scheduler.free_blocks == scheduler.total_blocks
            and self.engine.active == 0
            and scheduler.queue_size == 0
        )

    async def settle(self) -> None:
        """Wait until every block is free again."""
        with trio.fail_after(120):
            while not self.settled():
                await trio.sleep(0.001)
        self.engine.scheduler.check()

    def balance(self) -> tuple[float, float]:
        """Return (accepted, finished + cancelled + failed)."""
        value = self.metrics.value
        ended = value("tgi_request_finished") + value("tgi_request_failed")
        for phase in ("queue", "prefill", "decode"):
            ended += value("tgi_request_cancelled", phase=phase)
        return value("tgi_request_accepted"), ended


@asynccontextmanager
async def engine_on_fake_shard(
    folder: Path,
    fake: FakeSettings | None = None,
    permits: int = 128,
    growing: bool = False,
    request_bytes: int = DEFAULT_RING_BYTES,
) -> AsyncIterator[Bench]:
    """Run an engine with a FakeShard thread until the block is left.

    `growing`: blocks are granted as sequences grow, instead of reserved. `request_bytes`: of the
    ring of commands.
    """
    tokenizer = byte_tokenizer(folder)
    fake = fake or FakeSettings(vocab_size=259)
    metrics = Metrics(max_input_tokens=4096, max_total_tokens=4096)
    with (
        ReplyBell() as bell,
        Endpoints.create(0, 1, reply_bell=bell.fd, request_bytes=request_bytes) as endpoints,
    ):
        with FakeShard(endpoints.spec, fake) as shard, RouterEnd(endpoints, bell) as end:
            await handshake.hello(end, 1)
            info = await handshake.info(end)
            memory = await handshake.warm_up(end, WarmupRequest(512, 4096, 64, 0))
            limits = scheduling_limits(memory.blocks, info.block_size)
            limits = replace(limits, reserve=not growing)
            engine = Engine(AdmissionLimits(permits), limits, tokenizer, metrics)
            async with trio.open_nursery() as nursery:
                link = ShardLink(end)
                nursery.start_soon(link.send_waiting)
                nursery.start_soon(engine.serve, link)
                nursery.start_soon(engine.watch_deadlines)
                yield Bench(engine, tokenizer, metrics, shard, end, info)
                nursery.cancel_scope.cancel()


async def collect(stream: TokenStream) -> list[Token]:
    """Return all tokens of a stream."""
    return [token async for tokens in stream for token in tokens]


def expected(bench: Bench, fake: FakeSettings, prompt: str, count: int) -> list[int]:
    """Return the ids that a fake shard answers a prompt with."""
    ids = bench.tokenizer.encode_ids(prompt, False).tolist()
    return list(continuation(fake, ids, count))
