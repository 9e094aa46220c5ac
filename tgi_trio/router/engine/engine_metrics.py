"""What the engine counts: requests and their times, steps of the shard, and the books' gauges."""

from __future__ import annotations

from collections import Counter

from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.engine.stream import StreamEnd
from tgi_trio.router.request import Request, Timings
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.telemetry.metrics import Metrics

# Metric -> counter of the scheduler.
COUNTERS = {
    "tgi_batch_preemptions": "preempted",
    "tgi_prefix_cache_lookup_tokens": "prefill_tokens",
    "tgi_prefix_cache_hit_tokens": "prefix_hit_tokens",
    "tgi_prefix_cache_host_hit_tokens": "host_hit_tokens",
    "tgi_prefix_cache_copied_out_blocks": "copied_out",
    "tgi_prefix_cache_copied_back_blocks": "copied_back",
}


# Of a step: the whole, forward pass, choosing of tokens.
_DURATIONS = (
    "tgi_batch_inference_duration",
    "tgi_batch_forward_duration",
    "tgi_batch_decode_duration",
)


class EngineMetrics:
    """The engine's part of the server's `Metrics`."""

    def __init__(self, metrics: Metrics, scheduler: Scheduler, adapters: AdapterRegistry) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._adapters = adapters
        self._counted: Counter[str] = Counter()  # scheduler counters already in the metrics
        # What every step or token observes: looking up a series takes longer than counting in it.
        self._gap = metrics.histogram("tgi_batch_step_gap_duration")
        self._between = metrics.histogram("tgi_request_inter_token_latency_duration")
        self._durations = {
            method: [metrics.histogram(name, method=method) for name in _DURATIONS]
            for method in ("prefill", "decode")
        }
        metrics.before_render(self._refresh)

    def count_accepted(self, request: Request) -> None:
        self._metrics.inc("tgi_request_accepted")
        self._metrics.observe("tgi_request_max_new_tokens", request.stopping.max_new_tokens)

    def count_left(self, phase: str) -> None:
        """`phase`: queue, prefill or decode, in which the client left."""
        self._metrics.inc("tgi_request_cancelled", phase=phase)
        self._metrics.inc("tgi_request_failure", err="dropped")

    def count_ended(self, end: StreamEnd | None) -> None:
        """A stream has ended that did not leave by itself."""
        if end is StreamEnd.FINISHED:
            self._metrics.inc("tgi_request_finished")
        else:
            self._metrics.inc("tgi_request_failed")
            self._metrics.inc("tgi_request_failure", err="generation")

    def count_failure(self, *, decodes: bool) -> None:
        """A step has failed; `decodes`: one of those it was for had tokens already."""
        self._metrics.inc("tgi_batch_inference_failure", method="decode" if decodes else "prefill")

    def count_prefill(self, rows: int, *, joins: bool) -> None:
        """`rows` have been sent to the shard; `joins`: to a batch that is running."""
        self._metrics.observe("tgi_batch_next_size", rows)
        if joins:
            self._metrics.inc("tgi_batch_concat", reason="chunking")

    def observe_tokens(self, timings: Timings, count: int, now: float) -> None:
        """`count` tokens of one stream have come; keeps when the first and the last of all did."""
        if timings.first_token is None:
            timings.first_token = now
            self._metrics.observe(
                "tgi_request_time_to_first_token_duration", now - timings.received
            )
        elif timings.last_token is not None:
            self._between.observe((now - timings.last_token) / count)
        timings.last_token = now

    def observe_step(self, report: StepReport) -> None:
        metrics = self._metrics
        if report.gap_ns:
            self._gap.observe(report.gap_ns / 1e9)
        for took in filter(None, report.seen_ns):
            metrics.observe("tgi_image_encode_duration", took / 1e9)
        if not report.sequence:
            return
        method = "prefill" if report.prefill_tokens else "decode"
        metrics.inc("tgi_batch_inference_count", method=method)
        metrics.inc("tgi_batch_inference_success", method=method)
        if report.recovered:
            metrics.inc("tgi_batch_inference_failure", method=method)
        inference, forward, decode = self._durations[method]
        inference.observe((report.gap_ns + report.forward_ns + report.sample_ns) / 1e9)
        forward.observe(report.forward_ns / 1e9)
        decode.observe(report.sample_ns / 1e9)
        for name, count in (
            ("tgi_batch_prefill_tokens", report.prefill_tokens),
            ("tgi_batch_stalled_rows", report.stalled_rows),
            ("tgi_batch_draft_tokens", report.draft_tokens),
        ):
            if count:
                metrics.inc(name, count)
        metrics.gauge("tgi_batch_decode_rows", report.decode_rows)
        spoke = len(report.token_count) - report.token_count.count(0)
        metrics.observe_all("tgi_request_skipped_tokens", spoke, len(report.token_ids) - spoke)

    def _refresh(self) -> None:
        """Bring gauges and the scheduler's counters up to date; called when somebody looks."""
        scheduler, metrics = self._scheduler, self._metrics
        total, free = scheduler.total_blocks, scheduler.free_blocks
        size = scheduler.limits.block_size
        metrics.gauge("tgi_queue_size", scheduler.queue_size)
        metrics.gauge("tgi_batch_current_size", scheduler.batch_size)
        metrics.gauge("tgi_batch_current_max_tokens", scheduler.held_blocks * size)
        metrics.gauge("tgi_batch_max_total_tokens", total * size)
        metrics.gauge("tgi_kv_blocks_total", total)
        metrics.gauge("tgi_kv_blocks_free", free)
        metrics.gauge("tgi_kv_cache_usage", scheduler.held_blocks / total)
        metrics.gauge("tgi_prefix_cache_blocks", scheduler.cached_blocks)
        copies, places = scheduler.host_blocks
        metrics.gauge("tgi_prefix_cache_host_blocks", copies)
        metrics.gauge("tgi_prefix_cache_host_blocks_total", places)
        slots = scheduler.state_slots
        metrics.gauge("tgi_state_slots_total", slots.total)
        metrics.gauge("tgi_state_slots_free", slots.free)
        metrics.gauge("tgi_state_snapshots", slots.snapshots)
        loaded = self._adapters.loaded
        metrics.gauge("tgi_adapters_loaded", len(loaded))
        metrics.gauge("tgi_adapter_bytes", sum(adapter.nbytes for adapter in loaded))
        for name, counter in COUNTERS.items():
            metrics.inc(name, scheduler.counters[counter] - self._counted[counter])
        self._counted = scheduler.counters.copy()
