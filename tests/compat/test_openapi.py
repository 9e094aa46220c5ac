"""Requests made from our own OpenAPI document: every answer is one that the document promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.system.server import ServerProcess, serving
from tgi_trio.router.http.documented_routes import OPERATIONS, Operation
from tgi_trio.router.http.openapi import document

pytestmark = pytest.mark.system

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server whose shard answers nonsense at once, and briefly."""
    with serving("--max-total-tokens", "48", fake='{"step_ms": 0}') as found:
        yield found


@pytest.fixture(scope="module")
def schema() -> Any:
    return schemathesis.openapi.from_dict(without_events())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: f"{each.method} {each.path}")
def test_every_answer_is_in_the_document(
    server: ServerProcess, schema: Any, operation: Operation
) -> None:
    cases = schema[operation.path][operation.method].as_strategy()

    @settings(
        max_examples=12 if operation.body else 4,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def ask(case: Any) -> None:
        response = case.call(base_url=server.url, timeout=240)
        case.validate_response(response, checks=CHECKS)
        if response.headers.get("content-type") == ["text/event-stream"]:
            check_events(operation, response.content)

    ask()


def without_events() -> dict[str, Any]:
    """Return the document without the types of events: it describes their data, for which OpenAPI
    3.1 has no words, and schemathesis takes it for the event with its name and all."""
    api: dict[str, Any] = orjson.loads(document())
    for methods in api["paths"].values():
        for described in methods.values():
            content = described["responses"]["200"].get("content", {})
            if "text/event-stream" in content:
                content["text/event-stream"] = {}
    return api


def check_events(operation: Operation, body: bytes) -> None:
    """Check that each event has the documented shape, or tells of an error."""
    frames = body.split(b"\n\n")
    assert frames.pop() == b""
    for frame in frames:
        if frame in (b":", b"data: [DONE]"):
            continue
        data = frame.rpartition(b"data: ")[2]  # some have a line with their name in front
        if b'"error"' in data:
            assert "error" in msgspec.json.decode(data)
        else:
            msgspec.json.decode(data, type=operation.events)
