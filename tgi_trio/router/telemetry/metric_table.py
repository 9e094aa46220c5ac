"""`METRICS`: every metric of the server, with its labels and buckets.

Names and bucket sets of the first part are TGI's, so that its dashboards work; the second part is
ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_METHODS = ("prefill", "decode")
# Values of `route`: the paths that answer with tokens or counts of them, and `other` for all other
# POST requests, such as a differently named predict route.
ROUTES: Final = (
    *("/", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"),
    *("/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/fim/completions", "/infill", "/v1/audio/transcriptions", "/invocations", "/vertex"),
    "other",
)
# fmt: off
_GAP_BOUNDS = (  # seconds, 1 µs to 1 s
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4,
    1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0,
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: str  # counter, gauge, histogram, or summary (sum and count only)
    help: str
    buckets: str = ""  # histograms: a key of `bucket_sets`
    label: str = ""  # at most one label
    values: tuple[str, ...] = ()  # all values of the label


METRICS: Final[tuple[Metric, ...]] = (
    # TGI's names, types, labels and buckets.
    Metric("tgi_request_count", "counter", "Requests that reached a handler"),
    Metric("tgi_request_success", "counter", "Generations that finished"),
    Metric(
        "tgi_request_failure",
        "counter",
        "Requests that failed, by cause",
        label="err",
        values=(
            *("overloaded", "validation", "template", "tools"),
            *("incomplete", "dropped", "generation", "unavailable"),
        ),
    ),
    Metric("tgi_request_duration", "histogram", "Handler start to end, seconds", "D"),
    Metric("tgi_request_validation_duration", "histogram", "Validation time, seconds", "D"),
    Metric("tgi_request_queue_duration", "histogram", "Time in the queue, seconds", "D"),
    Metric("tgi_request_inference_duration", "histogram", "First step to last token, seconds", "D"),
    Metric(
        "tgi_request_mean_time_per_token_duration",
        "histogram",
        "Inference time over generated tokens, seconds",
        "D",
    ),
    Metric("tgi_request_generated_tokens", "histogram", "Generated tokens per request", "T"),
    Metric("tgi_request_input_length", "histogram", "Prompt tokens per request", "I"),
    Metric("tgi_request_max_new_tokens", "histogram", "New tokens asked for per request", "T"),
    Metric("tgi_request_skipped_tokens", "summary", "Speculated tokens accepted per step"),
    Metric("tgi_queue_size", "gauge", "Requests waiting"),
    Metric("tgi_batch_next_size", "histogram", "Requests that joined the batch at once", "B"),
    Metric("tgi_batch_current_size", "gauge", "Sequences in the running batch"),
    Metric("tgi_batch_current_max_tokens", "gauge", "KV tokens the running batch may use"),
    Metric("tgi_batch_max_total_tokens", "gauge", "KV tokens the cache can hold"),
    Metric(
        "tgi_batch_concat",
        "counter",
        "Times that requests joined a running batch",
        label="reason",
        values=("backpressure", "wait_exceeded", "chunking"),
    ),
    Metric("tgi_batch_inference_count", "counter", "Steps begun", label="method", values=_METHODS),
    Metric("tgi_batch_inference_success", "counter", "Steps done", label="method", values=_METHODS),
    Metric(
        "tgi_batch_inference_failure",
        "counter",
        "Steps that raised, in which one sequence failed, or at which the shard died",
        label="method",
        values=_METHODS,
    ),
    Metric(
        "tgi_batch_inference_duration",
        "histogram",
        "Whole step, seconds",
        "D",
        label="method",
        values=_METHODS,
    ),
    Metric(
        "tgi_batch_forward_duration",
        "histogram",
        "Forward pass, seconds",
        "D",
        label="method",
        values=_METHODS,
    ),
    Metric(
        "tgi_batch_decode_duration",
        "histogram",
        "Choosing the tokens of a step, seconds",
        "D",
        label="method",
        values=_METHODS,
    ),
    # Ours.
    Metric("tgi_request_accepted", "counter", "Requests queued = finished + cancelled + failed"),
    Metric("tgi_request_finished", "counter", "Accepted requests that ended well"),
    Metric(
        "tgi_request_cancelled",
        "counter",
        "Accepted requests whose client left, by where they were",
        label="phase",
        values=("queue", "prefill", "decode"),
    ),
    Metric("tgi_request_failed", "counter", "Accepted requests that ended with an error"),
    Metric(
        "tgi_request_time_to_first_token_duration",
        "histogram",
        "Request received to first token, seconds",
        "D",
    ),
    Metric(
        "tgi_request_inter_token_latency_duration",
        "histogram",
        "Time between tokens of one stream, seconds",
        "D",
    ),
    Metric("tgi_route_requests", "counter", "Requests by route", label="route", values=ROUTES),
    Metric(
        "tgi_route_errors",
        "counter",
        "Requests answered with an error, in the middle of a stream too, by route",
        label="route",
        values=ROUTES,
    ),
    Metric(
        "tgi_route_duration",
        "histogram",
        "First byte of a request to the last of its answer, by route, seconds",
        "D",
        label="route",
        values=ROUTES,
    ),
    Metric("tgi_request_reasoning_tokens", "counter", "Tokens of thoughts, their marks included"),
    Metric("tgi_stored_responses", "gauge", "Answers of /v1/responses that are kept"),
    Metric("tgi_stored_responses_bytes", "gauge", "Bytes of kept responses and conversations"),
    Metric("tgi_kv_cache_usage", "gauge", "Part of the KV blocks that sequences hold, 0 to 1"),
    Metric("tgi_kv_blocks_free", "gauge", "KV blocks free"),
    Metric("tgi_kv_blocks_total", "gauge", "KV blocks in all"),
    Metric("tgi_prefix_cache_lookup_tokens", "counter", "Prompt tokens looked up in the cache"),
    Metric("tgi_prefix_cache_hit_tokens", "counter", "Prompt tokens found in the prefix cache"),
    Metric("tgi_state_slots_free", "gauge", "Slots for states of sequences that are free"),
    Metric("tgi_state_slots_total", "gauge", "Slots for states in all; 0: the model keeps none"),
    Metric("tgi_state_snapshots", "gauge", "Slots that hold states behind a cached prefix"),
    Metric("tgi_prefix_cache_blocks", "gauge", "KV blocks that only the prefix cache holds"),
    Metric(
        "tgi_prefix_cache_host_blocks",
        "gauge",
        "KV blocks copied in the host's memory (--prefix-cache-host-bytes)",
    ),
    Metric(
        "tgi_prefix_cache_host_blocks_total",
        "gauge",
        "KV blocks that the host's memory has room for",
    ),
    Metric(
        "tgi_prefix_cache_host_bytes",
        "gauge",
        "Bytes of the host's memory that hold KV blocks, on each rank",
    ),
    Metric(
        "tgi_prefix_cache_copied_out_blocks",
        "counter",
        "Evicted KV blocks copied to the host's memory",
    ),
    Metric(
        "tgi_prefix_cache_copied_back_blocks",
        "counter",
        "KV blocks copied back from the host's memory for prompts",
    ),
    Metric(
        "tgi_prefix_cache_host_hit_tokens", "counter", "Prompt tokens found in the host's memory"
    ),
    Metric(
        "tgi_batch_step_gap_duration",
        "histogram",
        "End of one step's compute to the start of the next, seconds",
        "G",
    ),
    Metric("tgi_image_count", "counter", "Images of prompts"),
    Metric("tgi_video_count", "counter", "Videos of prompts"),
    Metric("tgi_audio_count", "counter", "Sounds of prompts"),
    Metric("tgi_image_tokens", "counter", "Feature tokens of images, videos and sounds"),
    Metric(
        "tgi_image_cache_hits",
        "counter",
        "Images, videos and sounds that were known, and not decoded anew",
    ),
    Metric(
        "tgi_image_fetch_duration",
        "histogram",
        "Seconds to fetch an image, a video or a sound",
        "D",
    ),
    Metric(
        "tgi_image_decode_duration",
        "histogram",
        "Seconds to decode an image, a video or a sound",
        "D",
    ),
    Metric(
        "tgi_image_encode_duration",
        "histogram",
        "Seconds that a tower takes for an image, a video or a sound",
        "D",
    ),
    Metric("tgi_adapters_loaded", "gauge", "LoRA adapters in the shard's memory"),
    Metric(
        "tgi_adapter_bytes",
        "gauge",
        "Bytes of LoRA adapters in the shard's memory, on the first rank",
    ),
    Metric(
        "tgi_adapter_request_count",
        "counter",
        "Generations that were asked of an adapter",
        label="adapter",  # an operator's names, see `Metrics.know`
    ),
    Metric("tgi_batch_preemptions", "counter", "Running sequences sent back to the queue"),
    Metric("tgi_batch_prefill_tokens", "counter", "Prompt tokens computed"),
    Metric("tgi_batch_decode_rows", "gauge", "Sequences that decoded in the last step"),
    Metric("tgi_batch_draft_tokens", "counter", "Tokens drafted ahead, right or wrong"),
    Metric("tgi_batch_stalled_rows", "counter", "Rows that sat a step out for want of a KV block"),
    Metric("tgi_connections", "gauge", "Connections of clients"),
    Metric("tgi_connections_limit", "gauge", "Connections that clients may have at a time"),
    Metric(
        "tgi_connection_shortages",
        "counter",
        "Times that no more connections could be accepted for a while",
    ),
    Metric("tgi_shard_restarts", "counter", "Times that the shard group was started again"),
    Metric("tgi_shard_ready", "gauge", "1 while the shard group serves, else 0"),
)


def bucket_sets(max_input_tokens: int, max_total_tokens: int) -> dict[str, tuple[float, ...]]:
    """Return the upper bounds of every bucket set; D, I, T and B are TGI's (spec 9.1)."""
    return {
        "D": tuple(0.0001 * 1.5**k for k in range(1, 36)),  # 150 µs to 146 s
        "I": tuple(max_input_tokens / 100 * k for k in range(1, 101)),
        "T": tuple(max_total_tokens / 100 * k for k in range(1, 101)),
        "B": tuple(float(2**k) for k in range(11)),
        "G": _GAP_BOUNDS,
        "": (),  # summaries
    }
