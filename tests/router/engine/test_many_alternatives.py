"""Alternatives of tokens count in a turn of the loop: 1500 of one token take as long as a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import trio

from tests.router.engine.one_step import OneStep
from tests.router.harness import byte_tokenizer, make_request, scheduling_limits
from tests.support.step_frames import encode_report
from tests.support.turns import counted_turns
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.engine.engine import (
    FAN_OUT,
    TOPS_PER_DELIVERY,
    TOPS_PER_TURN,
    AdmissionLimits,
    Engine,
)
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.request import Outcome, Token
from tgi_trio.router.telemetry.metrics import Metrics

MANY = TOPS_PER_TURN
STEPS = 6  # that are there at once, fewer than a turn may have

pytestmark = pytest.mark.trio


class AllSteps(OneStep):
    """A link to a shard that has all steps of its sequences ready, each token with `tops`."""

    def __init__(self, tops: int) -> None:
        super().__init__()
        self._tops = tops
        self._frames: Iterator[bytes] = iter(())

    def replies(self) -> Iterator[Frame]:
        prompts, self.prompts = self.prompts, {}
        if prompts:
            self._frames = (frame for step in range(STEPS) for frame in self._report(step, prompts))
        yield from (Frame(memoryview(frame)) for frame in self._frames)

    def _report(self, step: int, prompts: dict[int, int]) -> Iterator[bytes]:
        rows, end = len(prompts), step == STEPS - 1
        report = StepReport(
            step=1 + step,
            acknowledged=self._number,
            sequence=list(prompts),
            computed=[length + step for length in prompts.values()],
            token_count=[1] * rows,
            prompt_count=[0] * rows,
            finish=[int(Finish.LENGTH if end else Finish.NONE)] * rows,
            token_ids=[100 + step] * rows,
            logprobs=[-0.5] * rows,
            top_count=[self._tops] * rows,
            top_ids=[100 + step] * (rows * self._tops),
            top_logprobs=[-0.25] * (rows * self._tops),
        )
        yield from encode_report(report, 1 << 24)


async def deliveries(path: Path, requests: int, tops: int) -> list[list[int]]:
    """Return, for each turn that had some, how many tokens each delivery brought."""
    engine = Engine(
        AdmissionLimits(requests), scheduling_limits(), byte_tokenizer(path), Metrics(64, 64)
    )
    request = make_request(byte_tokenizer(path), "hello", STEPS)
    found: dict[int, list[int]] = {}
    ended = 0

    def sink(tokens: list[Token], end: Outcome | BaseException | None) -> None:
        nonlocal ended
        found.setdefault(turns.count, []).append(len(tokens))
        assert all([other.logprob for other in each.top] == [-0.25] * tops for each in tokens)
        assert not isinstance(end, BaseException)
        ended += end is not None

    with counted_turns() as turns:
        async with trio.open_nursery() as nursery:
            for _ in range(requests):
                engine.submit(request).attach(sink)
            nursery.start_soon(engine.serve, cast("ShardLink", AllSteps(tops)))
            while ended < requests:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert sum(map(sum, found.values())) == requests * STEPS
    return list(found.values())


async def test_steps_with_many_alternatives_are_handled_one_in_a_turn(tmp_path: Path) -> None:
    assert await deliveries(tmp_path, 1, MANY) == [[1]] * STEPS


async def test_steps_with_few_of_them_are_handled_together(tmp_path: Path) -> None:
    assert await deliveries(tmp_path, 1, 5) == [[STEPS]]
    assert await deliveries(tmp_path, 1, MANY // 2) == [[2]] * (STEPS // 2)


async def test_streams_with_alternatives_get_them_in_several_turns(tmp_path: Path) -> None:
    """Twenty each, as a chat may ask for: a step of 64 rows has as many as one token of 1280."""
    tops, requests = 20, 64
    one = 1 + tops // TOPS_PER_DELIVERY
    found = await deliveries(tmp_path, requests, tops)
    assert max(map(len, found)) == -(-FAN_OUT // one)
