"""A router that does what a test says: the upper end of a real channel, without an event loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from tgi_trio.ipc.adapters import (
    AdapterOrder,
    AdapterReport,
    decode_adapter_reply,
    encode_adapter,
    encode_drop,
)
from tgi_trio.ipc.channel import LeaderEnd
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import (
    ExtendRow,
    Fault,
    PrefillRow,
    SamplingParameters,
    StateGrant,
    StepReport,
    decode_faults,
    decode_step,
    encode_extend,
    encode_filter,
    encode_prefill,
)
from tgi_trio.ipc.prefixes import PrefixReport, decode_prefix_reply
from tgi_trio.ipc.startup import Hello, encode_hello
from tgi_trio.shard.loop.image_queue import ImageSource
from tgi_trio.testing.fake_model import FakeSettings, continuation
from tgi_trio.testing.fake_shard import FakeShard

_PATIENCE_S = 120.0
BLOCK = 4  # tokens per KV block in these tests
PROMPT = [5, 6, 7]


class ScriptedRouter:
    """Sends commands, keeps every report, and checks what holds of any run."""

    def __init__(self, end: LeaderEnd) -> None:
        self.end = end
        self.command = 0
        self.reports: list[StepReport] = []
        self.faults: list[Fault] = []
        self.adapters: dict[int, AdapterReport] = {}
        self.kept: list[PrefixReport] = []

    # --- commands: each returns its number ---

    def send(self, kind: FrameKind, **words: int) -> int:
        self.command += 1
        self.end.send(encode(kind, {"command": self.command, **words}, {}))
        return self.command

    def limits(self, token_budget: int) -> int:
        return self.send(FrameKind.LIMITS, token_budget=token_budget)

    def prefill(self, *rows: PrefillRow) -> int:
        self.command += 1
        self.end.send(encode_prefill(self.command, rows))
        return self.command

    def extend(self, sequence: int, *blocks: int) -> int:
        self.command += 1
        self.end.send(encode_extend(self.command, [ExtendRow(sequence, blocks)]))
        return self.command

    def filter(self, *sequences: int) -> int:
        self.command += 1
        self.end.send(encode_filter(self.command, sequences))
        return self.command

    def adapter(self, order: AdapterOrder) -> int:
        self.command += 1
        self.end.send(encode_adapter(self.command, order))
        return self.command

    def drop_adapter(self, number: int) -> int:
        self.command += 1
        self.end.send(encode_drop(self.command, number))
        return self.command

    def hello(self) -> None:
        self.end.send(encode_hello(Hello.of_this_process(0, 1, 1)))

    def start(self, *, max_prefill_tokens: int = 1000, blocks: int = 256) -> None:
        """Say HELLO and warm up."""
        self.greet()
        self.warm_up(max_prefill_tokens=max_prefill_tokens, blocks=blocks)
        frame = self.receive()
        assert frame.kind is FrameKind.WARMUP_REPLY and frame.word("blocks") == blocks
        self.end.release()

    def greet(self) -> None:
        """Exchange HELLO."""
        self.hello()
        assert self.receive().kind is FrameKind.HELLO
        self.end.release()

    def warm_up(self, *, max_prefill_tokens: int = 1000, blocks: int = 256) -> None:
        """Ask for a warm-up; its reply is not waited for."""
        self.send(
            FrameKind.WARMUP,
            max_prefill_tokens=max_prefill_tokens,
            max_total_tokens=0,
            max_batch_size=64,
            max_batch_total_tokens=(blocks - 1) * BLOCK,
            adapters_to_come=0,
            max_images=0,
            tower_bytes=0,
            blocks=0,
            state_slots=0,
        )

    # --- replies ---

    def receive(self) -> Frame:
        """Return the next frame; the caller releases it."""
        deadline = time.monotonic() + _PATIENCE_S
        while (view := self.end.try_receive()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("no frame from the shard")
            self.end.wait(left)  # ends early after a ring that a frame before has answered
        return Frame(view)

    def step(self) -> StepReport:
        """Return the next STEP, taking in the faults before it."""
        while True:
            frame = self.receive()
            step = self._keep(frame)
            del frame
            self.end.release()
            if step:
                return self.reports[-1]

    def keep_rest(self) -> None:
        """Take in what a shard that has ended left behind."""
        while (view := self.end.try_receive()) is not None:
            self._keep(Frame(view))
            del view
            self.end.release()

    def _keep(self, frame: Frame) -> bool:
        """Take in a STEP (True), the faults before it, or what has come of another order."""
        match frame.kind:
            case FrameKind.STEP:
                self.reports.append(decode_step(frame))
            case FrameKind.FAULT:
                self.faults += decode_faults(frame)
            case FrameKind.ADAPTER_REPLY:
                report = decode_adapter_reply(frame)
                self.adapters[report.number] = report
            case FrameKind.PREFIX_REPLY:
                self.kept.append(decode_prefix_reply(frame))
            case other:
                raise AssertionError(f"a shard does not send {other.name}")
        return frame.kind is FrameKind.STEP

    def until(self, done: Callable[[StepReport], bool]) -> StepReport:
        """Take in steps until one is `done`; return it."""
        while not done(report := self.step()):
            continue
        return report

    def loaded(self, number: int) -> AdapterReport:
        """Take in whatever comes until an adapter has been loaded; return what came of it."""
        while number not in self.adapters:
            self._keep(self.receive())
            self.end.release()
        return self.adapters[number]

    def acknowledged(self, command: int) -> StepReport:
        """Take in steps until one acknowledges `command`; return it."""
        return self.until(lambda report: report.acknowledged >= command)

    def finished(self, *sequences: int) -> None:
        """Take in steps until all these sequences have ended."""
        while not all(self.finish(s) or self.fault(s) for s in sequences):
            self.step()

    # --- what the reports say ---

    def tokens(self, sequence: int) -> list[int]:
        return [token for row in self.rows(sequence) for token in row.token_ids]

    def finish(self, sequence: int) -> int:
        return max((row.finish for row in self.rows(sequence)), default=0)

    def fault(self, sequence: int) -> str | None:
        return next((f.message for f in self.faults if f.sequence == sequence), None)

    def rows(self, sequence: int | None = None) -> list[Row]:
        return [
            row
            for report in self.reports
            for row in rows_of(report)
            if sequence in (None, row.sequence)
        ]


class Row:
    """One row of a STEP."""

    def __init__(self, step: int, sequence: int, computed: int, finish: int) -> None:
        self.step = step
        self.sequence = sequence
        self.computed = computed
        self.finish = finish
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.prompt_tops: list[list[tuple[int, float]]] = []
        self.tops: list[list[tuple[int, float]]] = []


def rows_of(report: StepReport) -> list[Row]:
    """Cut a report's columns into rows, using up every item."""
    rows = []
    tokens = iter(zip(report.token_ids, report.logprobs, report.top_count, strict=True))
    tops = iter(zip(report.top_ids, report.top_logprobs, strict=True))
    prompts = iter(zip(report.prompt_logprobs, report.prompt_top_count, strict=True))
    prompt_tops = iter(zip(report.prompt_top_ids, report.prompt_top_logprobs, strict=True))
    for i, sequence in enumerate(report.sequence):
        row = Row(report.step, sequence, report.computed[i], report.finish[i])
        for _ in range(report.token_count[i]):
            token, logprob, count = next(tokens)
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.tops.append([next(tops) for _ in range(count)])
        for _ in range(report.prompt_count[i]):
            logprob, count = next(prompts)
            row.prompt_logprobs.append(logprob)
            row.prompt_tops.append([next(prompt_tops) for _ in range(count)])
        rows.append(row)
    assert not any(map(list, (tokens, tops, prompts, prompt_tops)))
    return rows


def row(
    sequence: int,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    blocks: Sequence[int] | None = None,
    cached: int = 0,
    prompt_length: int | None = None,
    min_new_tokens: int = 0,
    states: StateGrant | None = None,
    **sampling: object,
) -> PrefillRow:
    """Make a PREFILL row; without `blocks` it gets enough of its own, 16 per sequence."""
    if blocks is None:
        needed = -(-(len(prompt) + max_new_tokens) // BLOCK)
        assert needed <= 16
        blocks = range(1 + 16 * sequence, 1 + 16 * sequence + needed)
    return PrefillRow(
        sequence=sequence,
        token_ids=np.array(prompt, np.int32),
        prompt_length=len(prompt) if prompt_length is None else prompt_length,
        cached_length=cached,
        block_ids=list(blocks),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        states=states,
        sampling=SamplingParameters(**sampling),  # type: ignore[arg-type]
    )


@contextmanager
def channel(
    reply_bytes: int = 2**16, incarnation: int = 1
) -> Iterator[tuple[Endpoints, ScriptedRouter]]:
    """A channel that does not spin and the scripted router at its upper end."""
    with Endpoints.create(
        0, incarnation, request_bytes=2**16, reply_bytes=reply_bytes, spin_us=0
    ) as endpoints:
        own = replace(endpoints.spec, segment=os.dup(endpoints.spec.segment))
        end = LeaderEnd.attach(own.text())
        yield endpoints, ScriptedRouter(end)
        end.close()


@contextmanager
def fake_shard(
    *,
    reply_bytes: int = 2**16,
    max_prefill_tokens: int = 1000,
    blocks: int = 256,
    images: ImageSource | None = None,
    **settings: object,
) -> Iterator[tuple[ScriptedRouter, FakeShard]]:
    """A warmed-up fake shard in a thread; leaving checks that its loop did not fail."""
    fake = FakeSettings(block_size=BLOCK, **settings)  # type: ignore[arg-type]
    with (
        channel(reply_bytes) as (endpoints, router),
        FakeShard(endpoints.spec, fake, images) as shard,
    ):
        router.start(max_prefill_tokens=max_prefill_tokens, blocks=blocks)
        yield router, shard
        assert shard.error is None


def answer(prompt: list[int], count: int, **options: object) -> list[int]:
    """Return the first `count` tokens that the fake model says to a prompt."""
    settings = FakeSettings(block_size=BLOCK, **options)  # type: ignore[arg-type]
    return continuation(settings, prompt, count)
