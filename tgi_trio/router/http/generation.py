"""From a call to running generations, and from those to a body or to events.

Everything a call holds (permits, streams) is entered into `call.resources`: when the client leaves
it is closed at once and synchronously, so that nothing can interrupt the clean-up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from tgi_trio import __version__
from tgi_trio.errors import TemplateError, ValidationError
from tgi_trio.router.http.engine_api import TokenStream
from tgi_trio.router.http.errors import Header, Problem, Refused, internal, problem_of
from tgi_trio.router.http.events import Events
from tgi_trio.router.http.exchange import Call, HttpSettings, Reply
from tgi_trio.router.http.sse import EventBody, StreamLimits
from tgi_trio.router.request import Outcome, Request, Timings, Token

log = logging.getLogger(__name__)

# The names that clients of HF's libraries send when they mean "the model you serve".
BASE_NAMES = frozenset({"tgi", "dummy"})


@dataclass(frozen=True, slots=True)
class Result:
    """A generation that has ended well."""

    request: Request
    timings: Timings
    outcome: Outcome
    tokens: list[Token]  # empty unless they were asked for

    def mean_logprob(self) -> float:
        """Return what `best_of` compares."""
        return sum(token.logprob for token in self.tokens) / max(len(self.tokens), 1)


def submit(call: Call, request: Request) -> TokenStream:
    """Queue a request for as long as the call lasts; raises Overloaded."""
    timings = Timings(received=call.received)
    return call.resources.enter_context(call.engine.submit(request, timings))


async def gather(call: Call, requests: Sequence[Request], keep_tokens: bool) -> list[Result]:
    """Run the requests side by side and return their results in order.

    Raises what the first one that fails raised.
    """
    done = trio.Event()
    streams: list[TokenStream] = []
    tokens: list[list[Token]] = [[] for _ in requests]
    ends: list[Outcome | None] = [None] * len(requests)
    failures: list[BaseException] = []

    def sink_for(i: int) -> Callable[[list[Token], Outcome | BaseException | None], None]:
        def sink(news: list[Token], end: Outcome | BaseException | None) -> None:
            if keep_tokens:
                tokens[i] += news
            if isinstance(end, BaseException):
                failures.append(end)
                done.set()
            elif end is not None:
                ends[i] = end
                observe(call, streams[i].timings, end)
                if None not in ends:
                    done.set()

        return sink

    streams += [submit(call, request) for request in requests]
    for i, stream in enumerate(streams):
        stream.attach(sink_for(i))
    await done.wait()
    if failures:
        raise failures[0]
    return [
        Result(request, stream.timings, outcome, kept)
        for request, stream, outcome, kept in zip(requests, streams, ends, tokens, strict=True)
        if outcome is not None
    ]


def pour(
    call: Call,
    requests: Sequence[Request],
    events: Sequence[Events],
    last: Callable[[], bytes] = bytes,
) -> EventBody:
    """Queue the requests and return a body that carries their events as they come.

    `last` gives what follows the end of the last generation. Raises Overloaded.
    """
    settings = call.settings
    limits = StreamLimits(
        backlog=settings.stream_backlog,
        silence=settings.silence,
        direct=settings.direct_writes,
    )
    body = EventBody(limits, producers=len(requests))
    streams = [submit(call, request) for request in requests]
    for stream, render in zip(streams, events, strict=True):
        stream.attach(_sink(call, stream, render, body, last))
    return body


def _sink(
    call: Call,
    stream: TokenStream,
    render: Events,
    body: EventBody,
    last: Callable[[], bytes],
) -> Callable[[list[Token], Outcome | BaseException | None], None]:
    write, step = body.write, render.step
    failed = False

    def sink(tokens: list[Token], end: Outcome | BaseException | None) -> None:
        nonlocal failed
        if failed:
            return
        try:
            if end is None:
                write(step(tokens))
            elif isinstance(end, BaseException):
                body.finish(render.error(tokens, explain(call, end)), last)
            else:
                observe(call, stream.timings, end)
                body.finish(render.end(tokens, end), last)
        except Exception as defect:  # ours: it may end this stream, but not the engine's step
            failed = True
            body.finish(render.error([], explain(call, defect)), last)

    return sink


def explain(call: Call, error: BaseException) -> Problem:
    """Return what to tell the client about `error`, counting and logging it."""
    problem = problem_of(error)
    if problem is None:
        log.error("request %s met a defect", call.request_id, exc_info=error)
        return internal(call.request_id)
    if isinstance(error, ValidationError):
        call.engine.metrics.inc("tgi_request_failure", err="validation")
    elif isinstance(error, TemplateError):
        call.engine.metrics.inc("tgi_request_failure", err="template")
    return problem


def observe(call: Call, timings: Timings, outcome: Outcome) -> None:
    """Count a generation that ended well."""
    metrics, now = call.engine.metrics, trio.current_time()
    queued = timings.queued if timings.queued is not None else timings.received
    started = timings.started if timings.started is not None else queued
    inference = now - started
    metrics.inc("tgi_request_success")
    metrics.observe("tgi_request_duration", now - timings.received)
    metrics.observe("tgi_request_validation_duration", queued - timings.received)
    metrics.observe("tgi_request_queue_duration", started - queued)
    metrics.observe("tgi_request_inference_duration", inference)
    metrics.observe(
        "tgi_request_mean_time_per_token_duration", inference / max(outcome.generated_tokens, 1)
    )
    metrics.observe("tgi_request_generated_tokens", outcome.generated_tokens)
    metrics.observe("tgi_request_input_length", outcome.prompt_tokens)


def admit(call: Call, count: int = 1) -> None:
    """Take `count` permits for as long as the call lasts; raises Overloaded."""
    call.resources.enter_context(call.engine.permit(count))


def check_batch_size(call: Call, count: int) -> None:
    """Raise Refused (422) for more prompts in one call than --max-client-batch-size."""
    most = call.engine.limits.max_client_batch_size
    if count > most:
        text = f"Number of prompts exceeds the maximum allowed batch size of {most}"
        raise Refused(422, text, "batch size exceeded")


# ---- model names -------------------------------------------------------------------------------


def resolve_model(call: Call, name: str | None) -> str:
    """Return the name an answer carries for the model that `name` stands for.

    Raises Refused (404), listing what is served, for a name that is not ours.
    """
    card = call.engine.model
    if name is None or name in BASE_NAMES:
        return card.id
    if name == card.id or name in card.aliases:
        return name
    served = ", ".join(f"`{each}`" for each in (card.id, *card.aliases, *sorted(BASE_NAMES)))
    raise Refused(404, f"The model `{name}` is not served here. Served: {served}", "not_found")


def fingerprint(settings: HttpSettings) -> str:
    """Return `system_fingerprint`."""
    return f"{__version__}-{settings.docker_label or 'native'}"


def unix_now() -> int:
    """Return the time for `created`."""
    return int(time.time())


# ---- headers -----------------------------------------------------------------------------------


def stream_headers(call: Call, characters: int) -> list[Header]:
    """Return the headers of an event stream."""
    return [
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        *compute_headers(call, characters),
    ]


def compute_headers(call: Call, characters: int) -> list[Header]:
    """Return the headers that every generation has; `characters` counts the prompts."""
    return [
        (b"x-compute-type", call.settings.compute_type.encode("latin-1", "replace")),
        (b"x-compute-characters", b"%d" % characters),
    ]


def timing_headers(
    call: Call, characters: int, results: Sequence[Result], compute_time: bool = True
) -> list[Header]:
    """Return the headers of a whole reply; times of several generations are added up."""
    now = trio.current_time()
    sums = [0] * 5
    for result in results:
        timings = result.timings
        queued = timings.queued if timings.queued is not None else timings.received
        started = timings.started if timings.started is not None else queued
        inference = now - started
        each = (
            now - timings.received,
            queued - timings.received,
            started - queued,
            inference,
            inference / max(result.outcome.generated_tokens, 1),
        )
        sums = [total + int(seconds * 1000) for total, seconds in zip(sums, each, strict=True)]
    names = (b"total", b"validation", b"queue", b"inference")
    headers = compute_headers(call, characters)
    if compute_time:
        headers.insert(1, (b"x-compute-time", b"%.9g" % (now - call.received)))
    headers += [(b"x-%b-time" % name, b"%d" % ms) for name, ms in zip(names, sums, strict=False)]
    prompt_tokens = sum(result.outcome.prompt_tokens for result in results)
    generated = sum(result.outcome.generated_tokens for result in results)
    headers += [
        (b"x-time-per-token", b"%d" % sums[4]),
        (b"x-prompt-tokens", b"%d" % prompt_tokens),
        (b"x-generated-tokens", b"%d" % generated),
    ]
    return headers


def event_stream(call: Call, body: EventBody | bytes, characters: int) -> Reply:
    """Return the reply that carries events."""
    headers = stream_headers(call, characters)
    return Reply(body, content_type=b"text/event-stream", headers=headers)
