"""Traces: the spans of a request, in memory and through a collector over gRPC."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as rpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.http_attributes import HTTP_ROUTE
from opentelemetry.semconv.attributes.url_attributes import URL_PATH, URL_SCHEME
from opentelemetry.trace import StatusCode

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import ENDLESS, served, until
from tests.router.http.wire.http2_client import CERTIFICATE
from tgi_trio.errors import ConfigurationError
from tgi_trio.router.request import Timings
from tgi_trio.router.telemetry.tracing import RequestSpan, Tracer, check_tracing_files, stages

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(rpc.TraceServiceServicer):
    """The receiving end of OTLP."""

    def __init__(self) -> None:
        self.batches: queue.Queue[messages.ExportTraceServiceRequest] = queue.Queue()

    def Export(
        self, request: messages.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> messages.ExportTraceServiceResponse:
        self.batches.put(request)
        return messages.ExportTraceServiceResponse()


@contextmanager
def collecting(tls: bool = False) -> Iterator[tuple[Collector, str]]:
    """Run a collector on a free port; yields it and its address.

    `tls`: with a certificate that it has signed itself.
    """
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_TraceServiceServicer_to_server(collector, server)
    if tls:
        pair = Path(CERTIFICATE).read_bytes()  # a key and its certificate
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pair, pair)]))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


async def spans_of(*calls: tuple[str, dict[str, object]], engine: FakeEngine | None = None) -> Any:
    """POST each body to its path at a traced server; return the spans by name, and the answers."""
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "test")
    answers = []
    async with served(engine, tracer=tracer) as server:
        client = await server.connect()
        await client.get("/health")
        for path, body in calls:
            answers.append(await client.post(path, body, traceparent=PARENT, x_request_id="mine"))
        await client.get("/health")  # the one before has been written down by now
    await tracer.close()
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    return spans, answers


@pytest.mark.trio
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_request_is_a_span_with_its_stages_within_the_clients_trace(path: str) -> None:
    spans, (answer,) = await spans_of((path, {"inputs": "hello"}))
    assert answer.status == 200
    (whole,) = spans.pop(f"POST {path}")
    assert spans.keys() == {"validation", "queue", "prefill", "decode"}, "nor of health"
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{whole.parent.span_id:016x}" == PARENT.split("-")[2]
    assert whole.attributes["request_id"] == "mine"
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["output_tokens"] > 0
    assert whole.attributes[gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS] == whole.attributes["output_tokens"]
    assert whole.attributes[gen_ai.GEN_AI_USAGE_INPUT_TOKENS] == whole.attributes["prompt_tokens"]
    assert whole.attributes[gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == 0
    assert whole.attributes[gen_ai.GEN_AI_OPERATION_NAME] == "text_completion"
    assert whole.attributes[HTTP_ROUTE] == whole.attributes[URL_PATH] == path
    assert whole.attributes[URL_SCHEME] == "http"
    start = whole.start_time
    for name in ("validation", "queue", "prefill", "decode"):
        (span,) = spans[name]
        assert span.parent.span_id == whole.context.span_id
        assert abs(span.start_time - start) < 1000, "each begins where the last one ended"
        start = span.end_time
    assert start <= whole.end_time + 1000


@pytest.mark.trio
async def test_several_generations_share_their_validation() -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 3}
    spans, (answer,) = await spans_of(("/v1/completions", body))
    assert answer.status == 200
    assert {name: len(found) for name, found in spans.items()} == {
        "POST /v1/completions": 1,
        "validation": 1,
        "queue": 2,
        "prefill": 2,
        "decode": 2,
    }


@pytest.mark.trio
async def test_a_refused_request_has_no_stages_and_no_fault_of_ours() -> None:
    spans, (answer,) = await spans_of(("/generate", {"inputs": ""}))
    assert answer.status == 422
    ((name, (span,)),) = spans.items()
    assert (name, span.status.status_code) == ("POST /generate", StatusCode.UNSET)
    assert "error.type" not in span.attributes


@pytest.mark.trio
async def test_an_unsampled_trace_writes_nothing() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "test")
    headers = {b"traceparent": PARENT.removesuffix("1").encode() + b"0"}
    now = trio.current_time()
    exchange = RequestSpan("POST", "/", "/", 200, headers, now, now, [Timings(now)])
    assert tracer.record(exchange) == ""
    await tracer.close()
    assert exporter.get_finished_spans() == ()


@pytest.mark.trio
async def test_failures_are_errors_whatever_the_status_was() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "test")
    now = trio.current_time()
    for status, failed in ((500, False), (200, True)):
        tracer.record(RequestSpan("POST", "/", "/", status, {}, now, now, failed=failed))
    await tracer.close()
    spans = exporter.get_finished_spans()
    assert [span.status.status_code for span in spans] == [StatusCode.ERROR] * 2
    assert [(span.attributes or {})["error.type"] for span in spans] == ["500", "generation_failed"]


@pytest.mark.trio
async def test_a_collector_receives_the_spans() -> None:
    with collecting() as (collector, endpoint):
        tracer = Tracer.to(endpoint, "my-service")
        async with served(tracer=tracer) as server:
            client = await server.connect()
            await client.post("/generate", {"inputs": "hello"}, traceparent=PARENT)
            await client.get("/health")
        await tracer.close()
        batch = collector.batches.get(timeout=120)
    (resource,) = batch.resource_spans
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert attributes["service.name"] == "my-service"
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["POST /generate", "decode", "prefill", "queue", "validation"]


@pytest.mark.trio
async def test_seeds_are_text_whether_otlp_has_a_number_for_them_or_not() -> None:
    now = trio.current_time()
    with collecting() as (collector, endpoint):
        tracer = Tracer.to(endpoint, "test")
        for seed in (2**64 - 1, 7):
            attributes = {"seed": seed, "output_tokens": 7, "nothing": None}
            tracer.record(RequestSpan("POST", "/", "/", 200, {}, now, now, attributes=attributes))
        await tracer.close()
        batch = collector.batches.get(timeout=120)
    (spans,) = [scope.spans for each in batch.resource_spans for scope in each.scope_spans]
    values = [{each.key: each.value for each in span.attributes} for span in spans]
    assert [each["seed"].string_value for each in values] == ["18446744073709551615", "7"]
    assert values[0]["output_tokens"].int_value == 7
    assert "nothing" not in values[0]


@pytest.mark.trio
async def test_paths_that_nobody_serves_do_not_name_spans() -> None:
    spans, answers = await spans_of(("/wp-login.php", {}), ("/v1/models/a", {}))
    assert [answer.status for answer in answers] == [404, 405]
    assert {name: len(found) for name, found in spans.items()} == {"POST": 2}


@pytest.mark.trio
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_client_that_leaves_is_logged_counted_and_traced(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "test")
    engine = FakeEngine(lambda prompt: ENDLESS)
    with caplog.at_level("INFO", "tgi_trio.access"):
        async with served(engine, tracer=tracer) as server:
            client = await server.connect()
            body = {"inputs": "hello", "parameters": {"max_new_tokens": 1000}}
            await client.send("POST", path, body)
            await until(lambda: bool(engine.live))
            await client.stream.aclose()
            await until(lambda: bool(caplog.records))
    await tracer.close()
    (record,) = caplog.records
    assert vars(record)["client_left"]
    *_, span = exporter.get_finished_spans()
    attributes = span.attributes or {}
    status = 200 if path == "/generate_stream" else 499
    assert attributes["http.response.status_code"] == status
    assert attributes["client_left"] is True
    assert span.status.status_code is StatusCode.UNSET, "no fault of ours"
    text = engine.metrics.render().decode()
    assert f'tgi_route_requests{{route="{path}"}} 1' in text
    assert f'tgi_route_errors{{route="{path}"}} 1' not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "abc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
    ],
)
def test_variables_that_opentelemetry_cannot_use_are_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"--otlp-endpoint.*{name}"):
        Tracer.to("http://127.0.0.1:1", "x")


@pytest.mark.trio
async def test_a_collector_with_a_certificate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", CERTIFICATE)
    with collecting(tls=True) as (collector, address):
        check_tracing_files(address)
        tracer = Tracer.to(address, "x")
        async with served(tracer=tracer) as server:
            client = await server.connect()
            await client.post("/generate", {"inputs": "hello"})
        await tracer.close()
        assert collector.batches.get(timeout=30).resource_spans


@pytest.mark.parametrize(
    "name", ["OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY"]
)
def test_certificates_that_cannot_be_read_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK would do without, and no span would arrive."""
    monkeypatch.setenv(name, "/nowhere.pem")
    check_tracing_files("http://localhost:4317")  # it reads none
    with pytest.raises(ConfigurationError, match=f"{name}=/nowhere.pem cannot be read: No such"):
        check_tracing_files("https://localhost:4317")


@pytest.mark.trio
async def test_an_unsampled_request_is_logged_without_a_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracer = Tracer(InMemorySpanExporter(), "test")
    with caplog.at_level("INFO", "tgi_trio.access"):
        async with served(tracer=tracer) as server:
            client = await server.connect()
            unsampled = PARENT.removesuffix("1") + "0"
            await client.post("/generate", {"inputs": "hello"}, traceparent=unsampled)
            await client.get("/health")
    await tracer.close()
    assert not hasattr(caplog.records[0], "trace_id")


@pytest.mark.trio
async def test_a_collector_that_is_not_there_harms_nobody() -> None:
    tracer = Tracer.to("http://127.0.0.1:1", "x")
    async with served(tracer=tracer) as server:
        client = await server.connect()
        for _ in range(5):
            assert (await client.post("/generate", {"inputs": "hello"})).status == 200
    with trio.fail_after(120):
        await tracer.close()


moments = st.lists(st.floats(0, 1e5), min_size=5, max_size=5).map(sorted)


@given(moments, st.integers(0, 4))
def test_stages_follow_each_other_to_the_end(at: list[float], reached: int) -> None:
    timings = Timings(at[0])
    for name, moment in list(zip(("queued", "started", "first_token"), at[1:4], strict=True))[
        :reached
    ]:
        setattr(timings, name, moment)
    found = list(stages(timings, at[4]))
    assert len(found) == min(reached, 3) + 1
    assert found[0][1] == at[0] and found[-1][2] == at[4]
    assert all(end == start for (_, _, end), (_, start, _) in pairwise(found))
