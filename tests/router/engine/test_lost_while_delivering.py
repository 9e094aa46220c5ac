"""What the scheduler has counted, clients get, whatever happens while it is delivered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import trio

from tests.router.harness import byte_tokenizer, make_request, scheduling_limits
from tests.support.step_frames import encode_report
from tgi_trio.errors import GenerationError
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.messages import Fault, StepReport, encode_faults
from tgi_trio.router.engine import engine as engines
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.engine.stream import StreamEnd
from tgi_trio.router.request import Outcome, Token
from tgi_trio.router.scheduling.shard_commands import Command, Prefill
from tgi_trio.router.telemetry.metrics import Metrics


class OneStep:
    """A link to a shard that computes one step of all its sequences; the last one ends in it.

    `faulty`: then a step fails on the first one.
    """

    def __init__(self, *, faulty: bool = False) -> None:
        self._faulty = faulty
        self.prompts: dict[int, int] = {}  # lengths by sequence
        self._number = 0

    def send_frame(self, frame: bytes) -> None:
        """No adapters are loaded here."""

    def send(self, command: Command) -> None:
        self._number = command.number
        if isinstance(command, Prefill):
            self.prompts |= {row.sequence: len(row.token_ids) for row in command.rows}

    def flush(self) -> None: ...

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()

    def replies(self) -> Iterator[Frame]:
        prompts, self.prompts = self.prompts, {}
        if not prompts:
            return
        count = len(prompts)
        report = StepReport(
            step=1,
            acknowledged=self._number,
            sequence=list(prompts),
            computed=list(prompts.values()),
            token_count=[1] * count,
            prompt_count=[0] * count,
            finish=[int(Finish.NONE)] * (count - 1) + [int(Finish.LENGTH)],
            token_ids=[100 + n for n in range(count)],
            logprobs=[-0.5] * count,
            top_count=[0] * count,
        )
        frames = list(encode_report(report, 1 << 16))
        if self._faulty:
            frames.append(encode_faults(self._number, [Fault(report.sequence[0], "it is broken")]))
        for frame in frames:
            yield Frame(memoryview(frame))


@pytest.mark.trio
async def test_every_stream_gets_the_tokens_of_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were lost behind the first `FAN_OUT` streams: others missed a token, or never ended."""
    monkeypatch.setattr(engines, "FAN_OUT", 1)
    tokenizer, link = byte_tokenizer(tmp_path), OneStep()
    engine = Engine(AdmissionLimits(8), scheduling_limits(), tokenizer, Metrics())
    incarnation = trio.CancelScope()
    got: list[list[int]] = []

    def kill(tokens: list[Token], end: Outcome | BaseException | None) -> None:
        got.append([token.id for token in tokens])
        incarnation.cancel()

    streams = [engine.submit(make_request(tokenizer, str(n), 1 + (n < 3))) for n in range(4)]
    streams[0].attach(kill)
    with incarnation:
        await engine.serve(cast("ShardLink", link))
    assert incarnation.cancelled_caught and got == [[100]]
    assert [stream.generated for stream in streams] == [1] * 4
    for stream in streams[:3]:
        assert engine.scheduler.emitted(stream.id) and stream.end is None
    assert streams[3].end is StreamEnd.FINISHED
    assert [[token.id for token in some] async for some in streams[3]] == [[103]]
    for stream in streams:
        with stream:
            pass
    engine.scheduler.check()


@pytest.mark.trio
async def test_a_stream_that_fails_gets_what_came_before(tmp_path: Path) -> None:
    """Also where the router reads the step and the fault behind it in one turn."""
    tokenizer, link = byte_tokenizer(tmp_path), OneStep(faulty=True)
    engine = Engine(AdmissionLimits(8), scheduling_limits(), tokenizer, Metrics())
    got: list[int] = []
    async with trio.open_nursery() as nursery:
        with (
            engine.submit(make_request(tokenizer, "a", 2)) as stream,
            engine.submit(make_request(tokenizer, "b", 1)),
        ):
            nursery.start_soon(engine.serve, cast("ShardLink", link))
            with pytest.raises(GenerationError, match="it is broken"):
                async for tokens in stream:
                    got += [token.id for token in tokens]
        nursery.cancel_scope.cancel()
    assert got == [100]
    engine.scheduler.check()
