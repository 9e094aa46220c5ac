"""Receipts: parts add up, and several add up to one."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.router.request import FinishReason, Outcome, Timings
from tgi_trio.router.telemetry.request_stats import RequestStats

moments = st.lists(st.floats(0, 1e5), min_size=5, max_size=5).map(sorted)


def outcome(tokens: int = 4) -> Outcome:
    return Outcome(FinishReason.LENGTH, "text", tokens, 7, 3, seed=5)


@given(moments)
def test_the_parts_are_the_whole(at: list[float]) -> None:
    received, queued, started, first, now = at
    timings = Timings(received, queued=queued, started=started, first_token=first)
    request_stats = RequestStats.of(timings, outcome(), now)
    parts = (
        request_stats.validation
        + request_stats.queue
        + request_stats.prefill
        + request_stats.decode
    )
    assert parts == pytest.approx(request_stats.total)
    assert request_stats.per_token == pytest.approx(request_stats.inference / 4)
    twice = RequestStats.sum([request_stats, request_stats])
    assert twice.total == 2 * request_stats.total
    assert (twice.prompt_tokens, twice.cached_tokens, twice.output_tokens) == (14, 6, 8)
    assert twice.seed is None
    assert RequestStats.sum([request_stats]) == request_stats


def test_what_never_happened_took_no_time() -> None:
    request_stats = RequestStats.of(Timings(received=1.0), outcome(0), 3.0)
    assert (request_stats.validation, request_stats.queue, request_stats.decode) == (0, 0, 0)
    assert request_stats.total == request_stats.prefill == request_stats.per_token == 2.0


def test_what_a_stream_and_a_log_line_say() -> None:
    timings = Timings(1.0, queued=1.25, started=1.5, first_token=2.0)
    request_stats = RequestStats.of(timings, outcome(), 4.0)
    assert orjson.loads(request_stats.json()) == {
        "queue_ms": 250.0,
        "prefill_ms": 500.0,
        "decode_ms": 2000.0,
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "output_tokens": 4,
    }
    fields = request_stats.fields()
    assert (fields["total_time"], fields["time_per_token"], fields["seed"]) == (3000.0, 625.0, 5)
