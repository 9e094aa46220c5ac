"""The engine on a real channel: streams, cancellation, faults, replay."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from tests.router.harness import (
    byte_tokenizer,
    collect,
    engine_on_fake_shard,
    expected,
    make_request,
    scheduling_limits,
)
from tgi_trio.errors import Draining, GenerationError, LibraryPanic, Overloaded, Unavailable
from tgi_trio.ipc.frame_codec import Frame, encode
from tgi_trio.ipc.frames import SPECS, FrameKind
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.engine.engine import FRAMES_PER_TURN, AdmissionLimits, Engine
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.engine.stream import StreamEnd, TokenStream
from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.prompt_image import PromptImage
from tgi_trio.router.request import FinishReason, Token
from tgi_trio.router.scheduling import Scheduler
from tgi_trio.router.scheduling.shard_commands import Progress
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.answer_text import output_text
from tgi_trio.router.text.output import OutputText
from tgi_trio.testing.fake_model import FakeSettings


@pytest.mark.trio
async def test_tokens_are_the_models_and_the_end_comes_once(tmp_path: Path) -> None:
    fake = FakeSettings(vocab_size=259)
    async with engine_on_fake_shard(tmp_path, fake) as bench:
        with bench.engine.submit(make_request(bench.tokenizer, "hello", 12)) as stream:
            tokens = await collect(stream)
            outcome = stream.outcome
        assert [t.id for t in tokens] == expected(bench, fake, "hello", 12)
        assert outcome.reason is FinishReason.LENGTH
        assert outcome.generated_tokens == 12
        assert outcome.prompt_tokens == 5
        assert "".join(t.text for t in tokens if not t.special) + outcome.tail == outcome.text
        assert stream.end is StreamEnd.FINISHED
        timings = stream.timings
        assert timings.started is not None and timings.first_token is not None
        assert timings.received <= timings.started <= timings.first_token
        await bench.settle()
        assert bench.balance() == (1, 1)
        for name in ("tgi_request_max_new_tokens", "tgi_batch_next_size"):
            assert bench.metrics.value(name) == 1
        assert bench.metrics.value("tgi_batch_inference_duration", method="prefill") == 1
        assert bench.metrics.value("tgi_batch_inference_duration", method="decode") == 11
        assert bench.metrics.value("tgi_batch_concat") == 0


@pytest.mark.trio
async def test_a_stream_goes_on_with_what_another_engine_gave(tmp_path: Path) -> None:
    fake = FakeSettings(vocab_size=259)
    async with engine_on_fake_shard(tmp_path, fake) as bench:
        whole = expected(bench, fake, "hello", 12)
        request = make_request(bench.tokenizer, "hello", 12)
        with bench.engine.submit(request) as stream:
            tokens = await collect(stream)
            text = stream.outcome.text
        emitted = tuple(whole[:5])
        request = make_request(bench.tokenizer, "hello", 12, emitted=emitted)
        output = output_text(bench.tokenizer, request)
        replayed = [output.push(id, math.nan) for id in emitted]
        with bench.engine.submit(request, output=output) as stream:
            again = await collect(stream)
            outcome = stream.outcome
        assert [(t.id, t.text) for t in [*replayed, *again]] == [(t.id, t.text) for t in tokens]
        assert outcome.text == text
        assert outcome.generated_tokens == 12 and outcome.prompt_tokens == 5
        assert stream.timings.started is not None and stream.timings.first_token is not None
        await bench.settle()
        assert bench.balance() == (2, 2)


@pytest.mark.trio
async def test_many_streams_join_and_leave(tmp_path: Path) -> None:
    fake = FakeSettings(vocab_size=259, token_us=5)
    rng = random.Random(0)
    async with engine_on_fake_shard(tmp_path, fake) as bench:

        async def client(n: int) -> None:
            await trio.sleep(rng.random() * 0.05)
            prompt, count = "x" * rng.randint(1, 70) + str(n), rng.randint(1, 40)
            leave_after = rng.choice([None, None, 0, 1, 5])
            got: list[int] = []
            with bench.engine.submit(make_request(bench.tokenizer, prompt, count)) as stream:
                async for tokens in stream:
                    got += [t.id for t in tokens]
                    if leave_after is not None and len(got) >= leave_after:
                        break
            want = expected(bench, fake, prompt, count)
            assert got == (want if leave_after is None else want[: len(got)])

        async with trio.open_nursery() as nursery:
            for n in range(64):
                nursery.start_soon(client, n)
        await bench.settle()
        accepted, ended = bench.balance()
        assert accepted == ended == 64
        assert bench.metrics.value("tgi_request_failed") == 0


@pytest.mark.trio
async def test_leaving_in_the_queue_or_before_the_first_token_frees_everything(
    tmp_path: Path,
) -> None:
    async with engine_on_fake_shard(tmp_path, FakeSettings(vocab_size=259, step_ms=5)) as bench:
        for _ in range(20):
            with bench.engine.submit(make_request(bench.tokenizer, "gone at once", 50)):
                pass
        with bench.engine.submit(make_request(bench.tokenizer, "stays", 3)) as stream:
            assert len(await collect(stream)) == 3
        await bench.settle()
        assert bench.balance() == (21, 21)


@pytest.mark.trio
async def test_a_cancelled_task_leaves_without_awaiting(tmp_path: Path) -> None:
    async with engine_on_fake_shard(tmp_path, FakeSettings(vocab_size=259, step_ms=1)) as bench:
        with trio.move_on_after(0.02) as scope:
            with bench.engine.submit(make_request(bench.tokenizer, "long", 4000)) as stream:
                await collect(stream)
        assert scope.cancelled_caught
        assert bench.engine.active == 0  # already, without another turn of the loop
        await bench.settle()


@pytest.mark.trio
@pytest.mark.parametrize("keep", [True, False])
async def test_stop_strings_end_a_stream(tmp_path: Path, keep: bool) -> None:
    async with engine_on_fake_shard(tmp_path) as probe:
        alphabet = probe.tokenizer.encode_ids("one two three", False).tolist()
    fake = FakeSettings(vocab_size=259, replies=(tuple(alphabet),))
    async with engine_on_fake_shard(tmp_path, fake) as bench:
        request = make_request(bench.tokenizer, "?", 40, stop=("two",), keep_stop=keep)
        with bench.engine.submit(request) as stream:
            tokens = await collect(stream)
        assert stream.outcome.reason is FinishReason.STOP_SEQUENCE
        assert stream.outcome.text == ("one two" if keep else "one ")
        assert "".join(t.text for t in tokens) + stream.outcome.tail == stream.outcome.text
        await bench.settle()


@pytest.mark.trio
async def test_eos_ends_a_stream_and_is_counted(tmp_path: Path) -> None:
    fake = FakeSettings(vocab_size=259, eos_after=4)
    async with engine_on_fake_shard(tmp_path, fake) as bench:
        with bench.engine.submit(make_request(bench.tokenizer, "hi", 40)) as stream:
            tokens = await collect(stream)
        assert stream.outcome.reason is FinishReason.EOS_TOKEN
        assert tokens[-1].special and tokens[-1].text == "</s>"
        assert stream.outcome.generated_tokens == len(tokens)
        assert "</s>" not in stream.outcome.text


@pytest.mark.trio
async def test_one_failing_sequence_costs_nobody_else_anything(tmp_path: Path) -> None:
    fake = FakeSettings(vocab_size=259, fail_token=3 + 255)
    async with engine_on_fake_shard(tmp_path, fake) as bench:
        bad_id = fake.fail_token
        request = make_request(bench.tokenizer, "bad", 30)
        request.prompt_ids[1] = bad_id
        with bench.engine.submit(make_request(bench.tokenizer, "good", 3)) as good:
            with bench.engine.submit(request) as bad:
                with pytest.raises(GenerationError):
                    await collect(bad)
            assert len(await collect(good)) == 3
        assert bad.end is StreamEnd.FAILED and good.end is StreamEnd.FINISHED
        assert bench.metrics.value("tgi_request_failure", err="generation") == 1
        assert bench.metrics.value("tgi_batch_inference_failure", method="prefill") == 1
        await bench.settle()
        assert bench.balance() == (2, 2)


@pytest.mark.trio
@pytest.mark.parametrize("token", [0, 1, 29], ids=["first", "second", "last"])
async def test_a_defect_in_one_text_costs_nobody_else_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: int
) -> None:
    async with engine_on_fake_shard(tmp_path, FakeSettings(vocab_size=259)) as bench:
        with bench.engine.submit(make_request(bench.tokenizer, "good", 40)) as good:
            with bench.engine.submit(make_request(bench.tokenizer, "bad", 30)) as bad:
                push, count = OutputText.push, itertools.count()

                def push_some(output: OutputText, *arguments: Any) -> Token:
                    if output is bad.output and next(count) == token:
                        raise LibraryPanic("index out of bounds")
                    return push(output, *arguments)

                monkeypatch.setattr(OutputText, "push", push_some)
                with pytest.raises(LibraryPanic):
                    await collect(bad)
            assert len(await collect(good)) == 40
        assert bad.end is StreamEnd.FAILED and good.end is StreamEnd.FINISHED
        await bench.settle()


@pytest.mark.trio
async def test_a_step_that_raised_and_went_well_in_parts_is_a_failure_all_the_same(
    tmp_path: Path,
) -> None:
    fake = FakeSettings(vocab_size=259, fail_above=1, step_ms=1)
    async with engine_on_fake_shard(tmp_path, fake) as bench, trio.open_nursery() as nursery:
        streams = [bench.engine.submit(make_request(bench.tokenizer, "hi", 30)) for _ in "ab"]
        for stream in streams:
            nursery.start_soon(collect, stream)
    failed = bench.metrics.value("tgi_batch_inference_failure")
    assert 25 < failed <= bench.metrics.value("tgi_batch_inference_success")
    assert all(stream.end is StreamEnd.FINISHED for stream in streams)


@pytest.mark.trio
async def test_a_sink_gets_what_an_iterator_would(tmp_path: Path) -> None:
    async with engine_on_fake_shard(tmp_path) as bench:
        seen: list[int] = []
        ended = trio.Event()

        def sink(tokens: list[Token], end: object) -> None:
            seen.extend(t.id for t in tokens)
            if end is not None:
                ended.set()

        with bench.engine.submit(make_request(bench.tokenizer, "sink", 9)) as stream:
            stream.attach(sink)
            await ended.wait()
        assert seen == expected(bench, FakeSettings(vocab_size=259), "sink", 9)


@pytest.mark.trio
async def test_permits_are_bounded_and_given_back(tmp_path: Path) -> None:
    async with engine_on_fake_shard(tmp_path, permits=2) as bench:
        engine = bench.engine
        with engine.permit(), engine.permit():
            with pytest.raises(Overloaded), engine.permit():
                pass
        with engine.permit(2):
            pass
        engine.drain()
        with pytest.raises(Draining), engine.permit():
            pass
        await engine.wait_drained()


@pytest.mark.trio
async def test_deadlines_end_a_request(tmp_path: Path) -> None:
    async with engine_on_fake_shard(tmp_path, FakeSettings(vocab_size=259, step_ms=5)) as bench:
        deadline = trio.current_time() + 0.05
        request = make_request(bench.tokenizer, "late", 4000, deadline=deadline)
        with bench.engine.submit(request) as stream:
            with pytest.raises(GenerationError, match="deadline"):
                await collect(stream)
        await bench.settle()
        assert bench.metrics.value("tgi_request_failure", err="generation") == 1
        assert bench.balance() == (1, 1)


@pytest.mark.trio
async def test_a_closed_engine_fails_what_runs_and_refuses_what_comes(tmp_path: Path) -> None:
    async with engine_on_fake_shard(tmp_path, FakeSettings(vocab_size=259, step_ms=5)) as bench:
        with bench.engine.submit(make_request(bench.tokenizer, "running", 4000)) as stream:
            bench.engine.close("no shard any more")
            with pytest.raises(GenerationError, match="no shard any more"):
                await collect(stream)
        assert bench.metrics.value("tgi_request_failure", err="generation") == 1
        with pytest.raises(Unavailable, match="no shard any more"), bench.engine.permit():
            pass
        await bench.settle()


@pytest.mark.trio
async def test_blocks_of_a_client_that_left_are_free_before_the_step_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step k is its last: step k+1 runs without it, and its blocks are free before k+2."""
    steps: list[tuple[StepReport, int]] = []  # with the blocks that are held afterwards
    commit = Scheduler.commit

    def committed(scheduler: Scheduler, step: StepReport, now: float) -> list[Progress]:
        progress = commit(scheduler, step, now)
        steps.append((step, scheduler.held_blocks))
        return progress

    monkeypatch.setattr(Scheduler, "commit", committed)
    async with engine_on_fake_shard(tmp_path, FakeSettings(vocab_size=259, step_ms=30)) as bench:
        scheduler = bench.engine.scheduler
        with bench.engine.submit(make_request(bench.tokenizer, "stays on", 4000)) as _:
            with bench.engine.submit(make_request(bench.tokenizer, "leaves", 1000)) as stream:
                async for _tokens in stream:
                    break
                await trio.sleep(0.01)  # in the middle of a step
                held, seen = scheduler.held_blocks, len(steps)
            with trio.fail_after(120):
                while scheduler.held_blocks == held:
                    await trio.sleep(0.001)
            last = max(step.step for step, _ in steps if stream.id in step.sequence)
            freed = next(step.step for step, left in steps[seen:] if left < held)
            assert freed <= last + 1
        await bench.settle()


class Flood:
    """A link whose shard is always ahead: another STEP waits however many are taken."""

    def __init__(self, stop_after: int) -> None:
        self.taken = 0
        self.turns: list[int] = []
        self._stop_after = stop_after
        self._frame = encode(
            FrameKind.STEP, {name: 0 for name, _ in SPECS[FrameKind.STEP].words} | {"step": 1}, {}
        )

    def send(self, command: object) -> None: ...

    def send_frame(self, frame: bytes) -> None: ...

    def flush(self) -> None: ...

    def replies(self) -> Iterator[Frame]:
        while self.taken < self._stop_after:
            self.taken += 1
            yield Frame(memoryview(self._frame))

    async def wait(self) -> None:
        self.turns.append(self.taken)
        await trio.lowlevel.checkpoint()


@pytest.mark.trio
async def test_a_shard_that_is_always_ahead_does_not_keep_other_tasks_waiting(
    tmp_path: Path,
) -> None:
    limits = scheduling_limits()
    engine = Engine(AdmissionLimits(1), limits, byte_tokenizer(tmp_path), Metrics())
    flood = Flood(stop_after=20 * FRAMES_PER_TURN)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.serve, cast("ShardLink", flood))
        while len(flood.turns) < 5:  # this task has its turn again and again
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert flood.turns[:5] == [n * FRAMES_PER_TURN for n in range(5)]


class LostPixels:
    """Pixels of images that are never there."""

    def pin(self, image: PromptImage) -> None:
        return None

    def unpin(self, image: PromptImage) -> None:
        raise AssertionError("nothing was pinned")

    def on_ready(self, callback: Callable[[bytes], None]) -> None: ...

    def on_lost(self, callback: Callable[[bytes, str], None]) -> None:
        self.lose = callback


@pytest.mark.trio
async def test_an_image_that_is_lost_ends_the_requests_that_wait_for_it(tmp_path: Path) -> None:
    pixels, tokenizer = LostPixels(), byte_tokenizer(tmp_path)
    engine = Engine(
        AdmissionLimits(8), scheduling_limits(), tokenizer, Metrics(64, 64), pixels=pixels
    )

    def ask(*keys: bytes) -> TokenStream:
        images = tuple(
            PromptImage(i, 1, ((0, 1),), ImageSize(1, 1), key * 32, b"")
            for i, key in enumerate(keys)
        )
        return engine.submit(replace(make_request(tokenizer, "hello"), images=images))

    with ask(b"a", b"b") as both, ask(b"b") as other, ask() as none:
        pixels.lose(b"a" * 32, "an image of it cannot be decoded again: a defect")
        with pytest.raises(GenerationError, match="cannot be decoded again: a defect"):
            await collect(both)
        assert other.end is none.end is None
        assert engine.active == engine.scheduler.queue_size == 2
    engine.scheduler.check()
