"""Headers of the answers to generations: what they cost, in TGI's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final

import trio

from tgi_trio.router.http.call import Call, Reply
from tgi_trio.router.http.event_log import EventLogBody
from tgi_trio.router.http.generation import Result
from tgi_trio.router.http.sse import EventBody
from tgi_trio.router.http.wire.headers import Header
from tgi_trio.router.telemetry.request_stats import RequestStats

Events = bytes | EventBody | EventLogBody


def stream_headers(call: Call, characters: int) -> list[Header]:
    """Return the headers of an event stream."""
    return [
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        *compute_headers(call, characters),
    ]


def compute_headers(call: Call, characters: int) -> list[Header]:
    """Return the headers of every generation; `characters`: how many the prompts have."""
    return [
        (b"x-compute-type", call.settings.compute_type.encode("latin-1", "replace")),
        (b"x-compute-characters", b"%d" % characters),
    ]


def timing_headers(
    call: Call, characters: int, results: Sequence[Result], compute_time: bool = True
) -> list[Header]:
    """Return the headers of a reply with a whole body, added up over its generations."""
    all_stats = [result.request_stats for result in results]
    outcomes = [result.outcome for result in results]
    headers = compute_headers(call, characters)
    if compute_time:
        seconds = trio.current_time() - call.received
        headers.insert(1, (b"x-compute-time", b"%.9g" % seconds))
    # As TGI does: each generation's time is cut to whole milliseconds before they are added.
    headers += [
        (b"x-%b" % name, b"%d" % sum(int(1e3 * part(request_stats)) for request_stats in all_stats))
        for name, part in _TIMES.items()
    ]
    headers += [
        (b"x-prompt-tokens", b"%d" % sum(each.prompt_tokens for each in outcomes)),
        (b"x-generated-tokens", b"%d" % sum(each.generated_tokens for each in outcomes)),
        (b"x-cached-tokens", b"%d" % sum(each.cached_tokens for each in outcomes)),
    ]
    return headers


_TIMES: Final[Mapping[bytes, Callable[[RequestStats], float]]] = {
    b"total-time": attrgetter("total"),
    b"validation-time": attrgetter("validation"),
    b"queue-time": attrgetter("queue"),
    b"inference-time": attrgetter("inference"),
    b"time-per-token": attrgetter("per_token"),
    b"prefill-time": attrgetter("prefill"),
    b"decode-time": attrgetter("decode"),
}


def event_stream(call: Call, body: Events, characters: int) -> Reply:
    """Return the reply that carries events."""
    headers = stream_headers(call, characters)
    return Reply(body, content_type=b"text/event-stream", headers=headers)
