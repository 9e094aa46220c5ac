"""The engine: admission, dispatch and fan-out between clients' streams and the shard.

All changes of state are synchronous (submit, leave, one step's commit), so cancellation never finds
them half made. The only awaits are for the next reply and, during a wide fan-out, a checkpoint
every `FAN_OUT` streams, which only lets others run: what is committed is also delivered.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import trio

from tgi_trio.errors import Draining, GenerationError, Overloaded, ServerEnding, Unavailable
from tgi_trio.ipc.adapters import decode_adapter_reply
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import decode_faults, decode_step
from tgi_trio.ipc.prefixes import decode_prefix_reply
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.engine.engine_metrics import EngineMetrics
from tgi_trio.router.engine.shard_link import ShardLink
from tgi_trio.router.engine.stream import TokenStream
from tgi_trio.router.request import FinishReason, Outcome, Request, Timings, Token
from tgi_trio.router.scheduling.image_pins import PixelSource
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.scheduling.shard_commands import Prefill, Progress
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.answer_text import output_text
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# Deliveries between two checkpoints: 512 socket writes would block the loop for 3 ms.
FAN_OUT = 128
# Requests that end between two checkpoints: answering each takes as long as dozens of deliveries.
# Deadlines that pass and steps share them, and each of the two may always end one.
ENDS_PER_TURN = 2
# Frames handled in one turn at most. Otherwise a router slower than its shard would handle ever
# more at once, and other tasks, such as new connections, would wait for ever longer.
FRAMES_PER_TURN = 8
# No more frames in a turn that has so many alternatives of tokens: reading and writing one takes
# a microsecond or two.
TOPS_PER_TURN = 1024
TOPS_PER_DELIVERY = 8  # alternatives that take as long as a delivery without any


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How many requests the engine admits."""

    max_concurrent_requests: int
    retry_after: float = 1.0  # seconds, sent with a 429


class Engine:
    """Connects clients' streams with the scheduler and, while a shard runs, with its link."""

    def __init__(
        self,
        admission: AdmissionLimits,
        limits: SchedulingLimits,
        tokenizer: Tokenizer,
        metrics: Metrics,
        clock: Callable[[], float] = trio.current_time,
        scheduler: Callable[[SchedulingLimits], Scheduler] = Scheduler,
        adapters: AdapterRegistry | None = None,
        pixels: PixelSource | None = None,
    ) -> None:
        """`pixels`: the store of images' pixels; None: no request may have images."""
        self.scheduler = scheduler(limits)
        if pixels is not None:
            self.scheduler.use_pixels(pixels)
            pixels.on_ready(lambda key: self._dispatch())
            pixels.on_lost(self._lose_image)
        self.last_step_at = clock()  # when the shard last showed progress; the supervisor reads it
        self._admission = admission
        self._adapters = AdapterRegistry() if adapters is None else adapters
        self._adapters.on_forgotten(self._evict_adapter)
        self._tokenizer = tokenizer
        self._metrics = EngineMetrics(metrics, self.scheduler, self._adapters)
        self._clock = clock
        self._streams: dict[int, TokenStream] = {}
        self._next_id = 1  # sequence ids are never reused, not even across shard restarts
        self._permits = 0
        self._retiring = False
        self._draining = False
        self._closed = ""  # why nothing can be served any more; empty: it can
        self._link: ShardLink | None = None
        self._idle = trio.Event()  # set whenever the last permit is returned while draining
        # Requests that steps have ended since deadlines were last looked at, and that deadlines
        # have since the last group of a step: each leaves the other so many fewer.
        self._finished, self._expired = 0, 0
        self._recheck = trio.Event()  # set when an earlier deadline has come, or room is to be made
        self._watched = math.inf  # the deadline that `watch_deadlines` waits for

    # ---- admission -------------------------------------------------------------------------

    @contextmanager
    def permit(self, count: int = 1) -> Iterator[None]:
        """Hold `count` of the `max_concurrent_requests` permits, without waiting for them.

        They are taken before validation and held for the whole generation, as in TGI. Raises
        Overloaded if they are not free, Draining during shutdown, Unavailable after `close`.
        """
        if self._closed:
            raise Unavailable(self._closed)
        if self._draining:
            raise Draining("the server is shutting down and takes no new requests")
        if self._permits + count > self._admission.max_concurrent_requests:
            raise Overloaded(retry_after=self._admission.retry_after)
        self._permits += count
        try:
            yield
        finally:
            self._permits -= count
            if self._draining and self._permits == 0:
                self._idle.set()

    @property
    def requests(self) -> int:
        """How many permits are held."""
        return self._permits

    def submit(
        self, request: Request, timings: Timings | None = None, output: OutputText | None = None
    ) -> TokenStream:
        """Queue a validated request and return its stream; never awaits.

        `output`: the state of its text, if the client has tokens from another server already.
        Raises Overloaded if the queue is full.
        """
        now = self._clock()
        id = self._next_id
        self._next_id += 1
        self.scheduler.add(id, request, now)
        timings = timings or Timings(received=now)
        timings.queued = now
        output = output or output_text(self._tokenizer, request)
        stream = TokenStream(id, request, output, timings, self.leave)
        self._streams[id] = stream
        self._metrics.count_accepted(request)
        self._dispatch()
        if request.deadline is not None and request.deadline < self._watched:
            self._recheck.set()
        return stream

    def leave(self, stream: TokenStream) -> None:
        """Cancel a stream whose client has left. Synchronous, idempotent, allowed at any time."""
        if self._streams.pop(stream.id, None) is None or stream.end is not None:
            return
        sequence = self.scheduler.find(stream.id)
        phase = "decode" if stream.generated else "queue"
        if phase == "queue" and sequence is not None and sequence.started is not None:
            phase = "prefill"
        self.scheduler.abort(stream.id, self._clock())
        stream.cancel()
        self._metrics.count_left(phase)
        self._dispatch()

    @property
    def active(self) -> int:
        """Streams that have not ended."""
        return len(self._streams)

    # ---- shutting down ----------------------------------------------------------------------

    def retire(self) -> None:
        """Turn health red, so that a load balancer looks elsewhere; requests are still admitted."""
        self._retiring = True

    @property
    def retiring(self) -> bool:
        """Whether the server is going to end."""
        return self._retiring

    def drain(self) -> None:
        """Admit no new requests from now on."""
        self._retiring = self._draining = True
        if self._permits == 0:
            self._idle.set()

    async def wait_drained(self) -> None:
        """Wait until every permit has been returned after `drain`."""
        await self._idle.wait()

    def close(self, why: str) -> None:
        """Fail all requests, present and future: no shard will be started again."""
        self._closed = why
        self._adapters.close(why)
        self.fail_all(why)

    def fail_all(self, message: str) -> None:
        """End every stream with an error."""
        now = self._clock()
        for id in list(self._streams):
            self.scheduler.abort(id, now)
            self._end(id, [], ServerEnding(message))
        self._dispatch()

    # ---- the shard side -----------------------------------------------------------------------

    async def serve(self, link: ShardLink) -> None:
        """Serve with one incarnation of the shard group until cancelled (it died, or we stop).

        Beside it runs `ShardLink.send_waiting`. What is unfinished is queued again, to be replayed.
        """
        self._link = link
        self.last_step_at = self._clock()
        try:
            self._adapters.attach(link.send_frame)
            self._dispatch()
            while True:
                # Here control returns from the shard's process (`Reporter.send`).
                await link.wait()
                await self._turn(link)
        finally:
            self._link = None
            self._adapters.detach()
            if self.scheduler.batch_size:  # a step was being computed, or about to be
                decodes = any(stream.generated for stream in self._streams.values())
                self._metrics.count_failure(decodes=decodes)
            for id in self.scheduler.shard_lost(self._clock()):
                self._fail(
                    id,
                    "the model's process ended again and again while it computed this request, "
                    "and only then: it is not tried again",
                )

    def _evict_adapter(self, number: int) -> None:
        """Free the cached prefixes of an adapter number that will not be used again."""
        self.scheduler.evict_adapter(number, self._clock())
        self._dispatch()

    async def watch_deadlines(self) -> None:
        """End requests whose deadline has passed, few in a turn, and go on with making room."""
        while True:
            deadline = self.scheduler.next_deadline
            self._watched = deadline if deadline is not None else math.inf
            with trio.move_on_at(self._watched):
                await self._recheck.wait()
            self._recheck = trio.Event()
            most, self._finished = max(1, ENDS_PER_TURN - self._finished), 0
            for id in self.scheduler.expire(self._clock(), most):
                self._expired += 1
                self._end(id, [], GenerationError("the request's deadline has passed"))
            self._dispatch()

    def _lose_image(self, key: bytes, why: str) -> None:
        """Fail the queued requests with an image; those on the shard have its pixels already."""
        for id, stream in list(self._streams.items()):
            images = stream.request.images
            if any(image.key == key for image in images) and self.scheduler.is_queued(id):
                self.scheduler.abort(id, self._clock())
                self._fail(id, why)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send what the scheduler wants sent now."""
        if self._link is None:
            return
        now = self._clock()
        was_idle = self.scheduler.batch_size == 0
        for command in self.scheduler.schedule(now):
            self._link.send(command)
            if isinstance(command, Prefill):
                self._metrics.count_prefill(len(command.rows), joins=not was_idle)
        if self.scheduler.makes_room:
            self._recheck.set()  # in the next turn this is done again
        if was_idle:
            self.last_step_at = now  # while it had no work, no step was due

    async def _turn(self, link: ShardLink) -> None:
        """Handle the replies that have arrived: commit, dispatch, then deliver to the streams.

        If several steps have queued up, each stream gets their tokens in one delivery.
        """
        link.flush()
        news: dict[int, list[Progress]] = {}
        try:
            self._commit(link, news)
            self._dispatch()
        finally:  # even if a frame was broken: streams go on behind what the scheduler has counted
            await self._fan_out(news)
        self._dispatch()  # stop strings may have made room

    def _commit(self, link: ShardLink, news: dict[int, list[Progress]]) -> None:
        """Apply the replies that have arrived, and add what they have for streams to `news`."""
        tops = 0  # alternatives so far
        for taken, frame in enumerate(link.replies(), start=1):
            now = self._clock()
            if frame.kind is FrameKind.STEP:
                report = decode_step(frame)
                self.last_step_at = now
                tops += len(report.top_ids) + len(report.prompt_top_ids)
                self._metrics.observe_step(report)
                for progress in self.scheduler.commit(report, now):
                    news.setdefault(progress.sequence_id, []).append(progress)
                    if progress.first:
                        self._note_start(progress.sequence_id)
            elif frame.kind is FrameKind.FAULT:
                acknowledged = frame.word("acknowledged")
                faults = decode_faults(frame)
                started = any(self.scheduler.emitted(fault.sequence) for fault in faults)
                self._metrics.count_failure(decodes=started)
                for fault in faults:  # what came before reaches its client, in one turn or in two
                    self._deliver(fault.sequence, news.pop(fault.sequence, []), now)
                self.scheduler.fault(faults, acknowledged, now)
                for fault in faults:
                    self._fail(fault.sequence, fault.message)
            elif frame.kind is FrameKind.ADAPTER_REPLY:
                self._adapters.settle(decode_adapter_reply(frame))
            elif frame.kind is FrameKind.PREFIX_REPLY:
                link.settle_keep(decode_prefix_reply(frame))
            if taken == FRAMES_PER_TURN or tops >= TOPS_PER_TURN:
                break

    async def _fan_out(self, news: dict[int, list[Progress]]) -> None:
        """Deliver what has been committed, all of it even if the shard dies meanwhile.

        Its death cancels `serve`. At a checkpoint that could be cancelled, the remaining streams
        would lose tokens that the scheduler replays as emitted, or their end.
        """
        # One timestamp object for a whole group: separate ones would be cache misses, stream by
        # stream, when the next step replaces them.
        delivered, ended, now = 0, self._take_expired(), self._clock()
        for id, progress_list in news.items():
            if self._deliver(id, progress_list, now):
                ended += 1
                self._finished += 1
            delivered += _count_deliveries(progress_list)
            if delivered >= FAN_OUT or ended >= ENDS_PER_TURN:
                await trio.lowlevel.cancel_shielded_checkpoint()
                delivered, ended, now = 0, self._take_expired(), self._clock()

    def _take_expired(self) -> int:
        """Return how many deadlines count among the ends of the next group, and forget them."""
        expired, self._expired = self._expired, 0
        return min(expired, ENDS_PER_TURN - 1)

    def _note_start(self, id: int) -> None:
        """Keep a sequence's start and cached tokens, which the scheduler forgets at its end."""
        stream, sequence = self._streams.get(id), self.scheduler.find(id)
        if stream is not None and sequence is not None:
            stream.timings.started = sequence.started
            stream.cached_tokens = sequence.cached

    def _deliver(self, id: int, progress_list: list[Progress], now: float) -> bool:
        """Hand a stream its tokens; returns whether it has ended with them."""
        stream = self._streams.get(id)
        if stream is None:  # left during this fan-out
            return False
        tokens: list[Token] = []
        end: Outcome | Exception | None = None
        try:
            for progress in progress_list:
                if (reason := stream.take(progress, tokens)) is not None:
                    end = stream.conclude(reason, tokens)
                    break
        except Exception as defect:  # in its text: it ends this stream, but not the engine's step
            end = defect
            self.scheduler.abort(id, now)
        if tokens:
            self._metrics.observe_tokens(stream.timings, len(tokens), now)
        if isinstance(end, Outcome) and end.reason is FinishReason.STOP_SEQUENCE:
            self.scheduler.finish(id, now)
        if end is not None:
            self._end(id, tokens, end)
        elif tokens:
            stream.deliver(tokens, None)  # to the sink that `stream_events` has attached
        return end is not None

    def _fail(self, id: int, message: str) -> None:
        """End one stream with an error."""
        self._end(id, [], GenerationError(message))

    def _end(self, id: int, tokens: list[Token], end: Outcome | BaseException) -> None:
        """Deliver the single terminal event of a stream, unless its client has left."""
        stream = self._streams.pop(id, None)
        if stream is None:
            return
        stream.timings.finished = self._clock()
        stream.deliver(tokens, end)
        self._metrics.count_ended(stream.end)


def _count_deliveries(progress_list: list[Progress]) -> int:
    """Return how many deliveries without alternatives take as long as these of one stream."""
    count = len(progress_list)
    if progress_list[-1].tops:  # a stream has them for each token or for none
        count += sum(len(top) for each in progress_list for top in each.tops) // TOPS_PER_DELIVERY
    return count
