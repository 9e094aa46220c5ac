"""What the scheduler has counted, clients get, whatever happens while it is delivered."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import trio

from tests.router.engine.one_step import OneStep
from tests.router.harness import byte_tokenizer, make_request, scheduling_limits
from tgi_trio.errors import GenerationError
from tgi_trio.router.engine import engine as engines
from tgi_trio.router.engine.engine import AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.engine.stream import StreamEnd
from tgi_trio.router.request import Outcome, Token
from tgi_trio.router.telemetry.metrics import Metrics


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
