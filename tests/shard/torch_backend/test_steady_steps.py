"""What recordings are told of steps that are like the one before, against steps made anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.torch_backend.interpreter import need_triton
from tests.support.threads import one_torch_thread
from tgi_trio.ipc import frame_codec
from tgi_trio.ipc.frame_codec import Frame, FrameTemplate, encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import (
    ExtendRow,
    PrefillRow,
    SamplingParameters,
    StepReport,
    decode_step,
    encode_extend,
    encode_filter,
    encode_prefill,
)
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest, encode_warmup
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.loop.steady import SteadyDecode
from tgi_trio.shard.loop.worker import Worker
from tgi_trio.shard.loop_channel import Writer
from tgi_trio.shard.speculation.payoff import Payoff
from tgi_trio.shard.torch_backend import staging
from tgi_trio.shard.torch_backend.staging import Array, Sheet, Staging

need_triton()

from bench.worker.free_device import FreeRunner, free_device  # noqa: E402  # imports Triton
from tgi_trio.shard.torch_backend.sampling import device_sampler, edits  # noqa: E402
from tgi_trio.shard.torch_backend.sampling.choice_settings import ChoiceSettings  # noqa: E402
from tgi_trio.shard.torch_backend.sampling.drawn_numbers import Drawn  # noqa: E402
from tgi_trio.shard.torch_backend.steps.like_before import LikeBefore  # noqa: E402

KINDS = (
    SamplingParameters(),
    SamplingParameters(seed=3, sample=True, top_p=0.9),
    SamplingParameters(repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingParameters(presence_penalty=0.5, absolute_penalties=True),
    SamplingParameters(top_n=3),
    SamplingParameters(logit_bias=((5, 1.0), (9, -2.0))),
    SamplingParameters(grammar="anything"),
)
ROWS, TOTAL, TICKS = 5, 96, 45

# How many steps later, what, of which of the rows, and a number that says more.
Events = list[tuple[int, str, int, int]]


class Script:
    """A channel whose commands come when the loop has asked for them so and so often."""

    def __init__(self, events: Events) -> None:
        self.writer: Writer = self
        self.max_payload = 1 << 20
        self.reports: list[StepReport] = []
        self._frames: deque[bytes] = deque()
        self._due: list[tuple[int, bytes]] = []
        self._tick = 0
        request = WarmupRequest(TOTAL, TOTAL, ROWS + 3, 4000 * BLOCK_SIZE)
        self._frames.append(encode_warmup(1, request))
        at, ids, block = 0, [0], 1
        for number, (later, what, which, more) in enumerate(events, start=2):
            at += later
            if what == "join":
                ids.append(ids[-1] + 1)
                prompt = np.arange(1 + more, dtype=np.int32) % 40
                blocks = range(block, block + 1 + (1 + more) // BLOCK_SIZE)
                kind = KINDS[which % len(KINDS)]
                row = PrefillRow(ids[-1], prompt, 1 + more, 0, blocks, 50, which % 4, kind)
                frame, block = encode_prefill(number, [row]), blocks.stop
            elif what == "extend":
                own = range(block, block + 1 + more % 3)
                frame = encode_extend(number, [ExtendRow(ids[-1 - which % len(ids)], own)])
                block = own.stop
            else:
                frame = encode_filter(number, [ids[-1 - which % len(ids)]])
            self._due.append((at, frame))
        self._due.append((at + TICKS, encode(FrameKind.SHUTDOWN, {"command": len(events) + 2}, {})))

    def try_receive(self) -> memoryview | None:
        if not self._frames:
            self._tick += 1
            while self._due and self._due[0][0] < self._tick:
                self._frames.append(self._due.pop(0)[1])
            if self._tick % 2:  # none is there between two steps, most of the time
                return None
        return memoryview(self._frames[0]) if self._frames else None

    def release(self) -> None:
        self._frames.popleft()

    def wait(self, timeout: float | None) -> bool:
        return True

    def send(self, payload: bytes | memoryview) -> None:
        frame = Frame(memoryview(payload))
        if frame.kind is FrameKind.STEP:
            self.reports.append(decode_step(frame))
            self.reports[-1].gap_ns = self.reports[-1].forward_ns = 0

    def beat(self, step: int, phase: int) -> None: ...


def anew() -> Iterator[tuple[Any, str, Any]]:
    """Yield what is to be replaced where nothing of a step before is to be used again."""
    yield SteadyDecode, "is_current", lambda *_: False
    yield LikeBefore, "fits", lambda *_: False
    for module in (staging, edits, device_sampler, frame_codec):
        yield module, "fixed_array", lambda array: None
    yield Drawn, "find", lambda *_: None
    yield edits, "_follow", lambda *_: None
    yield FrameTemplate, "encode", lambda *_: None
    kept = device_sampler.DeviceSampler
    yield kept, "settings", lambda self, rows: ChoiceSettings.of(rows, self.vocab_size)


@contextmanager
def noting(told: list[bytes]) -> Iterator[None]:
    """Take note of what the device's memory says each time that it has been told."""
    fill = Staging.fill_from

    def noted(self: Staging, sheet: Sheet, arrays: list[Array], places: Any = None) -> None:
        fill(self, sheet, arrays, places)
        told.append(sheet.target.of(sheet.used).numpy().tobytes())

    refill = device_sampler.DeviceSampler.refill_entries

    def entries_noted(self: Any, reserved: Any, asked: Any) -> None:
        refill(self, reserved, asked)
        count = asked.entries.size
        there = reserved.entries.memory.view(torch.int32)[:count]
        assert there.tolist() == asked.entries.reshape(-1).tolist()

    with (
        mock.patch.object(Staging, "fill_from", noted),
        mock.patch.object(device_sampler.DeviceSampler, "refill_entries", entries_noted),
    ):
        yield


def run(events: Events, speculate: int) -> tuple[list[bytes], list[StepReport]]:
    """Return what recordings were told, in turn, and what the router was."""
    script, told = Script(events), list[bytes]()

    def rests(self: Payoff, rows: int) -> bool:
        return len(script.reports) % 16 >= 6

    with (
        mock.patch.object(Payoff, "allows", lambda self, rows: not rests(self, rows)),
        mock.patch.object(Payoff, "is_resting", rests),
        noting(told),
        torch.inference_mode(),
    ):
        runner = FreeRunner((1, 4, 12))
        Worker(script, runner, ShardOptions(speculate=speculate or None)).serve()
    return told, script.reports


@settings(max_examples=12, deadline=None)
@given(
    first=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    then=st.lists(
        st.tuples(
            st.integers(0, 25),
            st.sampled_from(["join", "leave", "extend", "extend"]),
            st.integers(0, 27),
            st.integers(0, 40),
        ),
        max_size=6,
    ),
    speculate=st.sampled_from([0, 0, 2]),
)
def test_steps_like_those_before_are_told_as_if_each_were_made_anew(
    first: list[int], then: Events, speculate: int
) -> None:
    """Rows of all kinds join, leave, wait for blocks and go on, with drafts now and then."""
    events: Events = [(0, "join", kind, 7 * i) for i, kind in enumerate(first)]
    events += [(2, "extend", i, 2) for i in range(len(first))] + then
    with one_torch_thread(), free_device():
        found = run(events, speculate)
        with ExitStack() as stack:
            for owner, name, value in anew():
                stack.enter_context(mock.patch.object(owner, name, value))
            wanted = run(events, speculate)
    assert found[1] == wanted[1]
    assert found[0] == wanted[0]
    assert found[0]


def test_steps_like_the_last_are_told_what_moves_alone() -> None:
    """Of greedy rows and of those with a grammar, while no row needs another block."""
    events: Events = [(0, "join", kind, 7) for kind in (0, 6)] + [
        (2, "extend", i, 2) for i in (0, 1)
    ]
    places: list[Any] = []
    fill = Staging.fill_from

    def noted(self: Staging, sheet: Sheet, arrays: list[Array], some: Any = None) -> None:
        places.append(some)
        fill(self, sheet, arrays, some)

    with one_torch_thread(), free_device(), mock.patch.object(Staging, "fill_from", noted):
        _, reports = run(events, 0)
    moved = sum(some is not None for some in places)
    assert moved > sum(report.decode_rows > 0 for report in reports) / 2
