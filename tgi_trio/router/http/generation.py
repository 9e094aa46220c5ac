"""From a call to running generations, and from those to a body or to events.

Everything a call holds (permits, streams) is entered into `call.resources`: when the client leaves
it is closed at once and synchronously, so that nothing can interrupt the clean-up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

import trio

from tgi_trio import __version__
from tgi_trio.errors import TemplateError, ToolError, ValidationError
from tgi_trio.router.http.engine_api import TokenStream
from tgi_trio.router.http.errors import Header, Problem, Refused, internal, problem_of
from tgi_trio.router.http.events import Events
from tgi_trio.router.http.exchange import Call, HttpSettings, Reply
from tgi_trio.router.http.sse import EventBody, StreamLimits
from tgi_trio.router.receipt import Receipt
from tgi_trio.router.request import Outcome, Request, Timings, Token

log = logging.getLogger(__name__)

# The names that clients of HF's libraries send when they mean "the model you serve".
BASE_NAMES = frozenset({"tgi", "dummy"})


@dataclass(frozen=True, slots=True)
class Result:
    """A generation that has ended well."""

    request: Request
    receipt: Receipt
    outcome: Outcome
    tokens: list[Token]  # empty unless they were asked for

    def mean_logprob(self) -> float:
        """Return what `best_of` compares."""
        return sum(token.logprob for token in self.tokens) / max(len(self.tokens), 1)


def submit(call: Call, request: Request) -> TokenStream:
    """Queue a request for as long as the call lasts; raises Overloaded."""
    timings = Timings(received=call.received)
    call.generations.append(timings)
    return call.resources.enter_context(call.engine.submit(request, timings))


async def gather(call: Call, requests: Sequence[Request], keep_tokens: bool) -> list[Result]:
    """Run the requests side by side and return their results in order.

    Raises what the first one that fails raised.
    """
    done = trio.Event()
    streams: list[TokenStream] = []
    tokens: list[list[Token]] = [[] for _ in requests]
    ends: list[tuple[Outcome, Receipt] | None] = [None] * len(requests)
    failures: list[BaseException] = []

    def sink_for(i: int) -> Callable[[list[Token], Outcome | BaseException | None], None]:
        def sink(news: list[Token], end: Outcome | BaseException | None) -> None:
            if keep_tokens:
                tokens[i] += news
            if isinstance(end, BaseException):
                failures.append(end)
                done.set()
            elif end is not None:
                ends[i] = end, settle(call, streams[i].timings, end)
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
        Result(request, end[1], end[0], kept)
        for request, end, kept in zip(requests, ends, tokens, strict=True)
        if end is not None
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
                receipt = settle(call, stream.timings, end)
                body.finish(with_receipt(render.end(tokens, end), receipt), last)
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
    elif isinstance(error, ToolError):
        call.engine.metrics.inc("tgi_request_failure", err="tools")
    return problem


def with_receipt(events: bytes, receipt: Receipt) -> bytes:
    """Put the receipt into the last of these events, which is an object in every API."""
    return b'%b,"receipt":%b}\n\n' % (events.removesuffix(b"}\n\n"), receipt.json())


def settle(call: Call, timings: Timings, outcome: Outcome) -> Receipt:
    """Count a generation that ended well, and keep its receipt for the log line of the call."""
    receipt = Receipt.of(timings, outcome, trio.current_time())
    metrics = call.engine.metrics
    metrics.inc("tgi_request_success")
    metrics.observe("tgi_request_duration", receipt.total)
    metrics.observe("tgi_request_validation_duration", receipt.validation)
    metrics.observe("tgi_request_queue_duration", receipt.queue)
    metrics.observe("tgi_request_inference_duration", receipt.inference)
    metrics.observe("tgi_request_mean_time_per_token_duration", receipt.per_token)
    metrics.observe("tgi_request_generated_tokens", receipt.output_tokens)
    metrics.observe("tgi_request_input_length", receipt.prompt_tokens)
    call.receipts.append(receipt)
    return receipt


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
    receipts = [result.receipt for result in results]
    outcomes = [result.outcome for result in results]
    headers = compute_headers(call, characters)
    if compute_time:
        seconds = trio.current_time() - call.received
        headers.insert(1, (b"x-compute-time", b"%.9g" % seconds))
    # Whole milliseconds, each generation's cut off before they are added: TGI's way.
    headers += [
        (b"x-%b" % name, b"%d" % sum(int(1e3 * part(receipt)) for receipt in receipts))
        for name, part in _TIMES.items()
    ]
    headers += [
        (b"x-prompt-tokens", b"%d" % sum(each.prompt_tokens for each in outcomes)),
        (b"x-generated-tokens", b"%d" % sum(each.generated_tokens for each in outcomes)),
        (b"x-cached-tokens", b"%d" % sum(each.cached_tokens for each in outcomes)),
    ]
    return headers


_TIMES: Final[Mapping[bytes, Callable[[Receipt], float]]] = {
    b"total-time": attrgetter("total"),
    b"validation-time": attrgetter("validation"),
    b"queue-time": attrgetter("queue"),
    b"inference-time": attrgetter("inference"),
    b"time-per-token": attrgetter("per_token"),
    b"prefill-time": attrgetter("prefill"),
    b"decode-time": attrgetter("decode"),
}


def event_stream(call: Call, body: EventBody | bytes, characters: int) -> Reply:
    """Return the reply that carries events."""
    headers = stream_headers(call, characters)
    return Reply(body, content_type=b"text/event-stream", headers=headers)
