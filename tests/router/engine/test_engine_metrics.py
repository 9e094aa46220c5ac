"""What a step counts, as `/metrics` shows it."""

from __future__ import annotations

from tests.router.harness import scheduling_limits
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.engine.engine_metrics import EngineMetrics
from tgi_trio.router.request import Timings
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.telemetry.metrics import Metrics

MS = 1_000_000  # nanoseconds


def make_metrics() -> tuple[EngineMetrics, Metrics]:
    metrics = Metrics(64, 64)
    return EngineMetrics(metrics, Scheduler(scheduling_limits()), AdapterRegistry()), metrics


def report(**given: int) -> StepReport:
    """Return the report of a step in which two sequences said three tokens."""
    rows = {"sequence": [1, 2], "token_count": [1, 2], "token_ids": [3, 4, 5]}
    return StepReport(1, 1, **given, **rows)  # type: ignore[arg-type]


def test_steps_are_counted_by_what_they_did() -> None:
    engine, metrics = make_metrics()
    times = {"gap_ns": 1 * MS, "forward_ns": 4 * MS, "sample_ns": 2 * MS}
    engine.observe_step(report(**times, prefill_tokens=7, decode_rows=1, stalled_rows=3))
    engine.observe_step(report(**times, decode_rows=2, draft_tokens=5))
    engine.observe_step(StepReport(2, 2))  # it only acknowledges
    for name, whole in (("inference", 0.007), ("forward", 0.004), ("decode", 0.002)):
        for method in ("prefill", "decode"):
            histogram = metrics.histogram(f"tgi_batch_{name}_duration", method=method)
            assert (histogram.count, histogram.sum) == (1, whole), (name, method)
    gap = metrics.histogram("tgi_batch_step_gap_duration")
    assert (gap.count, gap.sum) == (2, 0.002)
    counts = {"prefill_tokens": 7, "stalled_rows": 3, "draft_tokens": 5, "decode_rows": 2}
    assert {name: metrics.value(f"tgi_batch_{name}") for name in counts} == counts
    skipped = metrics.histogram("tgi_request_skipped_tokens")
    assert (skipped.count, skipped.sum) == (4, 2)


def test_times_between_tokens_are_shared_by_those_that_come_together() -> None:
    engine, metrics = make_metrics()
    timings = Timings(received=1.0)
    engine.observe_tokens(timings, 1, 1.5)
    engine.observe_tokens(timings, 2, 2.5)
    first = metrics.histogram("tgi_request_time_to_first_token_duration")
    between = metrics.histogram("tgi_request_inter_token_latency_duration")
    assert (first.count, first.sum) == (1, 0.5)
    assert (between.count, between.sum) == (1, 0.5)
