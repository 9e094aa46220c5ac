"""Runs a call's generations, and turns their results into a body or into events.

Everything that a call holds (permits, streams) is entered into `call.resources`. That is closed
synchronously as soon as the client leaves, so that nothing can interrupt the clean-up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import trio

from tgi_trio.errors import (
    Overloaded,
    ServerEnding,
    TemplateError,
    ToolError,
    Unavailable,
    ValidationError,
)
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.engine_api import TokenStreamApi
from tgi_trio.router.http.messages.events import Events
from tgi_trio.router.http.messages.problems import Problem, Refused, internal, to_problem
from tgi_trio.router.http.resume import resume_stream
from tgi_trio.router.http.sse import EventBody, StreamLimits
from tgi_trio.router.request import Outcome, Request, Sink, Timings, Token
from tgi_trio.router.telemetry.request_stats import RequestStats
from tgi_trio.router.text.output import OutputText

log = logging.getLogger(__name__)

Written = TypeVar("Written")

_MANY: Final = 256  # tokens that an answer shows one by one, alternatives among them


@dataclass(frozen=True, slots=True)
class Result:
    """A generation that has ended without an error."""

    request: Request
    request_stats: RequestStats
    outcome: Outcome
    tokens: list[Token]  # empty unless they were asked for

    def mean_logprob(self) -> float:
        """Return the score by which `best_of` chooses."""
        return sum(token.logprob for token in self.tokens) / max(len(self.tokens), 1)


def submit(call: Call, request: Request, output: OutputText | None = None) -> TokenStreamApi:
    """Queue a request for as long as the call lasts; raises Overloaded.

    `output` as `EngineApi.submit` has it.
    """
    timings = Timings(received=call.received)
    call.generations.append(timings)
    return call.resources.enter_context(call.engine.submit(request, timings, output))


async def collect_results(
    call: Call, requests: Sequence[Request], keep_tokens: bool
) -> list[Result]:
    """Run the requests concurrently and return their results in order.

    Raises the error of the first that fails, and Refused (400) if a front wants to resume it: only
    streams can be resumed.
    """
    if call.front is not None and call.front.emitted:
        raise Refused(400, "`x-tgi-emitted` is for streams: a body is made anew", "resume")
    done = trio.Event()
    streams: list[TokenStreamApi] = []
    tokens: list[list[Token]] = [[] for _ in requests]
    ends: list[tuple[Outcome, RequestStats] | None] = [None] * len(requests)
    failures: list[BaseException] = []

    def sink_for(i: int, timings: Timings) -> Sink:
        def sink(news: list[Token], end: Outcome | BaseException | None) -> None:
            if keep_tokens:
                tokens[i] += news
            if isinstance(end, BaseException):
                failures.append(end)
                done.set()
            elif end is not None:
                ends[i] = end, record_request(call, timings, end)
                if None not in ends:
                    done.set()

        return sink

    try:
        for i, request in enumerate(requests):
            if i:
                await call.pace.breathe()
            streams.append(submit(call, request))
            streams[i].attach(sink_for(i, streams[i].timings))  # no name for it: see the end
        await done.wait()
        if failures:
            if call.front is not None and isinstance(failures[0], ServerEnding):
                raise Unavailable(str(failures[0]))  # the front asks another replica
            raise failures[0]
        return [
            Result(request, end[1], end[0], kept)
            for request, end, kept in zip(requests, ends, tokens, strict=True)
            if end is not None
        ]
    finally:  # an error holds this frame, and streams hold the error: no garbage may be left
        failures.clear()
        streams.clear()


async def write_results(
    call: Call, results: Sequence[Result], write: Callable[[], Written]
) -> Written:
    """Return what `write` makes of results; in a thread where they show many tokens.

    A token, or an alternative of one, takes up to 10 us, and the loop would wait for all of them.
    """
    return await call.side_threads.run(write) if _count_shown(results) >= _MANY else write()


def _count_shown(results: Sequence[Result]) -> int:
    """Return how many tokens results show, alternatives among them, at the most.

    As many alternatives are taken for each token as any of the first ones has.
    """
    count = 0
    for result in results:
        tokens, outcome = result.tokens, result.outcome
        each = 1 + max((len(token.top) for token in tokens[:_MANY]), default=0)
        of_prompt = 1 + max(map(len, outcome.prompt_tops[:_MANY]), default=0)
        count += len(tokens) * each + len(outcome.prompt_logprobs) * of_prompt
    return count


async def stream_events(
    call: Call,
    requests: Sequence[Request],
    events: Sequence[Events],
    last: Callable[[], bytes] = bytes,
) -> EventBody:
    """Queue the requests and return a body that streams their events.

    `last` returns what follows the end of the last generation. Raises Overloaded.
    """
    settings = call.settings
    limits = StreamLimits(
        backlog=settings.stream_backlog,
        silence=settings.silence,
        direct=settings.direct_writes,
    )
    body = EventBody(limits, producers=len(requests))
    asked: Sequence[Request | None] = requests
    outputs: Sequence[OutputText | None] = [None] * len(requests)
    if call.front is not None:
        engine = call.engine
        vocab_size = engine.validator.vocab_size
        resumed = await resume_stream(
            call.front,
            call.turns,
            call.text_processor.tokenizer,
            vocab_size,
            requests,
            events,
            last,
        )
        asked, outputs = resumed.requests, resumed.outputs
        events, last = resumed.events, resumed.last
    for i, (request, output, render) in enumerate(zip(asked, outputs, events, strict=True)):
        if i:
            await call.pace.breathe()
        if request is None:
            body.finish(b"", last)
            continue
        stream = submit(call, request, output)
        # Control passes to the engine's task: it calls `deliver` in each of its steps
        # (`Engine._deliver`), while this one only keeps the connection (`EventBody.run`).
        stream.attach(EventFeed(call, stream, render, body, last).deliver)
    return body


class EventFeed:
    """The sink of a stream: turns one generation's tokens into events of a body.

    An object with slots rather than a closure: each variable of a closure is an object of its own,
    and for every event all of them would be cache misses.
    """

    __slots__ = ("_body", "_call", "_failed", "_last", "_render", "_stream")

    def __init__(
        self,
        call: Call,
        stream: TokenStreamApi,
        render: Events,
        body: EventBody,
        last: Callable[[], bytes],
    ) -> None:
        """`last` returns what follows the end of the body's last generation."""
        self._call = call
        self._stream = stream
        self._render = render
        self._body = body
        self._last = last
        self._failed = False

    def deliver(self, tokens: list[Token], end: Outcome | BaseException | None) -> None:
        """Write the events of one step's tokens; never raises."""
        if self._failed:
            return
        try:
            if end is None:
                self._body.write(self._render.step(tokens))
            elif self._call.front is not None and isinstance(end, ServerEnding):
                self._body.abandon()  # the front resumes it at another replica
            else:
                self._body.finish(self._end(tokens, end), self._last)
        except Exception as defect:  # ours: it may end this stream, but not the engine's step
            self._failed = True
            self._body.finish(self._render.error([], explain(self._call, defect)), self._last)

    def _end(self, tokens: list[Token], end: Outcome | BaseException) -> bytes:
        if isinstance(end, BaseException):
            return self._render.error(tokens, explain(self._call, end))
        request_stats = record_request(self._call, self._stream.timings, end)
        return with_receipt(self._render.end(tokens, end), request_stats)


def explain(call: Call, error: BaseException) -> Problem:
    """Return the client's error for `error`, after counting and logging it."""
    problem = to_problem(error)
    if problem is None:
        log_defect(call.request_id, error)
        return internal(call.request_id)
    cause = _cause(error)
    if cause is not None:
        call.engine.metrics.inc("tgi_request_failure", err=cause)
    return problem


def log_defect(request_id: str, error: BaseException) -> None:
    """Describe a defect under the id that the client is told."""
    log.error("request %s met a defect", request_id, exc_info=error)


def _cause(error: BaseException) -> str | None:
    """Return the label of a refusal in `tgi_request_failure`.

    None for a request that failed after it was accepted: the engine counts those.
    """
    match error:
        case ValidationError():
            return "validation"
        case TemplateError():
            return "template"
        case ToolError():
            return "tools"
        case Overloaded():
            return "overloaded"
        case Unavailable():
            return "unavailable"
        case Refused():
            return "validation" if error.status == 422 else None
    return None


def with_receipt(events: bytes, request_stats: RequestStats) -> bytes:
    """Add the stats, as `receipt`, to the last of these events: a JSON object in every API."""
    return b'%b,"receipt":%b}\n\n' % (events.removesuffix(b"}\n\n"), request_stats.json())


def record_request(call: Call, timings: Timings, outcome: Outcome) -> RequestStats:
    """Count a successful generation, and keep and return its stats, for the call's log line."""
    request_stats = RequestStats.of(timings, outcome, trio.current_time())
    metrics = call.engine.metrics
    metrics.inc("tgi_request_success")
    metrics.observe("tgi_request_duration", request_stats.total)
    metrics.observe("tgi_request_validation_duration", request_stats.validation)
    metrics.observe("tgi_request_queue_duration", request_stats.queue)
    metrics.observe("tgi_request_inference_duration", request_stats.inference)
    metrics.observe("tgi_request_mean_time_per_token_duration", request_stats.per_token)
    metrics.observe("tgi_request_generated_tokens", request_stats.output_tokens)
    metrics.observe("tgi_request_input_length", request_stats.prompt_tokens)
    if outcome.answer is not None:
        metrics.inc("tgi_request_reasoning_tokens", outcome.answer.thought_tokens)
    call.all_stats.append(request_stats)
    return request_stats


def take_permits(call: Call, prompts: int = 1, generations: int = 1) -> None:
    """Take a permit for each generation of each prompt, for as long as the call lasts.

    Raises Overloaded, and ValidationError for more than can ever run at once, since a client that
    is told of an overload would retry for ever.
    """
    most, count = call.engine.limits.max_concurrent_requests, prompts * generations
    if count > most:
        raise ValidationError(
            f"{prompts} prompts with {generations} generations each are {count}; at most {most} "
            "can run at once (--max-concurrent-requests)"
        )
    call.resources.enter_context(call.engine.permit(count))


def check_batch_size(call: Call, count: int) -> None:
    """Raise Refused (422) for more prompts in one call than --max-client-batch-size."""
    most = call.engine.limits.max_client_batch_size
    if count > most:
        text = f"Number of prompts exceeds the maximum allowed batch size of {most}"
        raise Refused(422, text, "batch size exceeded")
