"""Generations of one call that end at different times."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import trio

from tests.router.http.fake_engine import FakeEngine
from tgi_trio.errors import GenerationError
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.generation import collect_results
from tgi_trio.router.http.wire.pace import LoopPace
from tgi_trio.router.request import Request, StoppingCriteria

pytestmark = pytest.mark.trio


async def test_a_generation_that_ends_behind_the_failure_of_another_is_counted() -> None:
    """The engine delivers to it until the reply is sent, and nothing may be raised there."""
    engine = FakeEngine()
    one = Request(
        np.array([40], np.int32), SamplingParameters(), StoppingCriteria(max_new_tokens=2)
    )
    told: list[object] = []
    with ExitStack() as resources:
        given = SimpleNamespace(
            front=None, received=0.0, generations=[], resources=resources, engine=engine
        )
        call = cast(Call, SimpleNamespace(**vars(given), all_stats=told, pace=LoopPace()))
        async with trio.open_nursery() as nursery:

            async def fail() -> None:
                with pytest.raises(GenerationError, match="the first"):
                    await collect_results(call, [one, one], keep_tokens=False)

            nursery.start_soon(fail)
            while len(engine.live) < 2:
                await trio.sleep(0)
            engine.live.pop(1).deliver([], GenerationError("the first"))
        while engine.live:
            engine.step()
    assert len(told) == 1
    assert engine.metrics.value("tgi_request_success") == 1
