"""Traces: the stages of a request as OpenTelemetry spans, made when the request has ended.

`Timings` are recorded in any case, and spans are made from them at the same place as the access
log's line. So without `--otlp-endpoint` tracing costs nothing, and opentelemetry is not imported. A
thread of the SDK exports in batches. Its queue is bounded, so a slow or absent collector loses
spans, never requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from tgi_trio import __version__
from tgi_trio.errors import ConfigurationError
from tgi_trio.router.request import Timings
from tgi_trio.whole_files import SMALL, check_file

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

FLUSH_TIMEOUT = 2.0  # seconds for the last batch to be exported when the server ends

# Variables of the SDK that name files: a collector's certificate, or a client's.
_FILES = tuple(
    f"OTEL_EXPORTER_OTLP_{signal}{which}"
    for signal in ("TRACES_", "")
    for which in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
)
_PARENT = ("traceparent", "tracestate")  # W3C trace context

# What OpenTelemetry's conventions for generative AI call a generation, where its route says it.
_OPERATIONS = {
    "/": "text_completion",
    "/generate": "text_completion",
    "/generate_stream": "text_completion",
    "/v1/completions": "text_completion",
    "/v1/fim/completions": "text_completion",
    "/infill": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
# Names of these conventions for keys of a request's log line.
_USAGE = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A request that has ended. Times are on the trio clock, in seconds."""

    method: str
    path: str
    route: str | None  # template of the path; None: no route answers it
    status: int
    headers: Mapping[bytes, bytes]  # of the request, names in lower case
    began: float
    ended: float
    generations: Sequence[Timings] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)  # of the request's span
    scheme: str = "http"
    failed: bool = False

    @property
    def name(self) -> str:
        """Return the span's name: of few, as paths that clients make up are not part of it."""
        return self.method if self.route is None else f"{self.method} {self.route}"

    @property
    def error(self) -> str | None:
        """Return the kind of failure, `error.type` of the conventions; None: it is not ours."""
        if self.status >= 500:
            return str(self.status)
        return "generation_failed" if self.failed else None

    def all_attributes(self) -> dict[str, Any]:
        """Return what OTLP can encode of the attributes, and those of the conventions."""
        found: dict[str, Any] = {
            "http.request.method": self.method,
            "http.route": self.route,
            "http.response.status_code": self.status,
            "url.path": self.path,
            "url.scheme": self.scheme,
            "error.type": self.error,
            **self.attributes,
        }
        if self.generations:
            found["gen_ai.provider.name"] = "tgi_trio"
            found["gen_ai.operation.name"] = _OPERATIONS.get(self.route or "")
        found |= {_USAGE[key]: value for key, value in self.attributes.items() if key in _USAGE}
        if found.get("seed") is not None:
            # Unsigned, and OTLP's integers are signed. One attribute has one type, whatever its
            # value: some stores refuse spans by that.
            found["seed"] = str(found["seed"])
        return {name: value for name, value in found.items() if value is not None}


def check_tracing_installed() -> None:
    """Raise ConfigurationError if opentelemetry's exporter cannot be imported."""
    try:
        _import_exporter()
    except ImportError as error:
        raise ConfigurationError(
            f"--otlp-endpoint needs opentelemetry: pip install 'tgi-trio[otlp]' ({error})"
        ) from error


def check_tracing_files(endpoint: str) -> None:
    """Raise ConfigurationError for a certificate or key that is named and cannot be read.

    The SDK would go on with the system's, with which no collector of one's own is trusted.
    """
    if not endpoint.startswith("https:"):
        return
    for name in _FILES:
        path = os.environ.get(name)
        try:
            if path:
                check_file(Path(path), SMALL)
        except OSError as error:
            raise ConfigurationError(
                f"--otlp-endpoint: {name}={path} cannot be read: {error.strerror}"
            ) from error


def _import_exporter() -> None:
    with _reading_variables():
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter  # noqa: F401


@contextmanager
def _reading_variables() -> Iterator[None]:
    """Raise ConfigurationError where opentelemetry raises for the variables that it reads."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # of many kinds: whatever the SDK raises is about its variables
        named = sorted(name for name in os.environ if name.startswith("OTEL_"))
        raise ConfigurationError(
            f"--otlp-endpoint: opentelemetry does not start: {error}; it reads "
            f"{', '.join(named) or 'OTEL_...'} of the environment"
        ) from error


class Tracer:
    """Makes spans of requests and passes them to the exporting thread."""

    def __init__(self, exporter: SpanExporter, service_name: str) -> None:
        """Spans are of the service `service_name`; `close` ends the thread."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": service_name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tgi_trio", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, service_name: str) -> Tracer:
        """Return a tracer that exports OTLP over gRPC; the collector may come up later.

        Raises ConfigurationError if opentelemetry is not installed, or its variables are wrong.
        """
        check_tracing_installed()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        with _reading_variables():
            exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https:"))
            return cls(exporter, service_name)

    def record(self, request: RequestSpan) -> str:
        """Export the spans of `request`; return its trace id, "" if it is not sampled."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        # Spans use wall-clock time, our times are on trio's clock: both are read once, now.
        wall, now = time.time_ns(), trio.current_time()

        def nanoseconds(moment: float) -> int:
            return wall - int(1e9 * (now - moment))

        headers = request.headers
        given = {name: headers.get(name.encode(), b"").decode("latin-1") for name in _PARENT}
        whole = self._tracer.start_span(
            request.name,
            self._propagator.extract(given),
            SpanKind.SERVER,
            request.all_attributes(),
            start_time=nanoseconds(request.began),
        )
        if not whole.is_recording():
            return ""
        within = set_span_in_context(whole)
        for number, timings in enumerate(request.generations):
            for stage, start, end in stages(timings, request.ended):
                if number and stage == "validation":
                    continue  # common to all generations of a request
                span = self._tracer.start_span(
                    stage, within, attributes={"generation": number}, start_time=nanoseconds(start)
                )
                span.end(nanoseconds(end))
        if request.error is not None:
            whole.set_status(StatusCode.ERROR)
        whole.end(nanoseconds(request.ended))
        return f"{whole.get_span_context().trace_id:032x}"

    async def close(self) -> None:
        """Export what is left, for at most `FLUSH_TIMEOUT`."""
        with trio.move_on_after(FLUSH_TIMEOUT):
            await trio.to_thread.run_sync(self._provider.shutdown, abandon_on_cancel=True)


def stages(timings: Timings, ended: float) -> Iterator[tuple[str, float, float]]:
    """Yield (stage, start, end) of the stages that a generation reached; `ended` may cut the last.

    Trio clock, seconds. The stages are those of `RequestStats`.
    """
    finished = timings.finished if timings.finished is not None else ended
    moments = (timings.received, timings.queued, timings.started, timings.first_token, finished)
    start: float | None = timings.received
    for stage, end in zip(("validation", "queue", "prefill", "decode"), moments[1:], strict=True):
        if start is None:
            return
        yield stage, start, finished if end is None else end
        start = end
