"""Receipts: parts add up, and several add up to one."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.router.receipt import Receipt
from tgi_trio.router.request import FinishReason, Outcome, Timings

moments = st.lists(st.floats(0, 1e5), min_size=5, max_size=5).map(sorted)


def outcome(tokens: int = 4) -> Outcome:
    return Outcome(FinishReason.LENGTH, "text", tokens, 7, 3, seed=5)


@given(moments)
def test_the_parts_are_the_whole(at: list[float]) -> None:
    received, queued, started, first, now = at
    timings = Timings(received, queued=queued, started=started, first_token=first)
    receipt = Receipt.of(timings, outcome(), now)
    parts = receipt.validation + receipt.queue + receipt.prefill + receipt.decode
    assert parts == pytest.approx(receipt.total)
    assert receipt.per_token == pytest.approx(receipt.inference / 4)
    twice = Receipt.sum([receipt, receipt])
    assert twice.total == 2 * receipt.total
    assert (twice.prompt_tokens, twice.cached_tokens, twice.output_tokens) == (14, 6, 8)
    assert twice.seed is None
    assert Receipt.sum([receipt]) == receipt


def test_what_never_happened_took_no_time() -> None:
    receipt = Receipt.of(Timings(received=1.0), outcome(0), 3.0)
    assert (receipt.validation, receipt.queue, receipt.decode) == (0, 0, 0)
    assert receipt.total == receipt.prefill == receipt.per_token == 2.0


def test_what_a_stream_and_a_log_line_say() -> None:
    timings = Timings(1.0, queued=1.25, started=1.5, first_token=2.0)
    receipt = Receipt.of(timings, outcome(), 4.0)
    assert orjson.loads(receipt.json()) == {
        "queue_ms": 250.0,
        "prefill_ms": 500.0,
        "decode_ms": 2000.0,
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "output_tokens": 4,
    }
    fields = receipt.fields()
    assert (fields["total_time"], fields["time_per_token"], fields["seed"]) == (3000.0, 625.0, 5)
