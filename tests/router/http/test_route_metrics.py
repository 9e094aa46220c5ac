"""Requests, errors and durations are counted by route, whatever API it is of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.http.fake_engine import GAP_MARKS, FakeEngine, byte_tokenizer
from tests.router.http.served import STREAM, read_until, served, until
from tgi_trio.router.http.app import ROUTES
from tgi_trio.router.telemetry.metric_table import ROUTES as NAMES

pytestmark = pytest.mark.trio

USER: list[Any] = [{"role": "user", "content": "x"}]
BODIES: dict[str, Any] = {
    "/": {"inputs": "x", "parameters": {"max_new_tokens": 4}},
    "/generate": {"inputs": "x", "parameters": {"max_new_tokens": 4}},
    "/generate_stream": {"inputs": "x", "parameters": {"max_new_tokens": 4}},
    "/v1/completions": {"prompt": "x", "max_tokens": 4},
    "/v1/fim/completions": {"prompt": "x", "suffix": "y", "max_tokens": 4},
    "/infill": {"input_prefix": "x", "input_suffix": "y", "n_predict": 4},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"model": "tgi", "messages": USER, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "tgi", "messages": USER},
    "/invocations": {"inputs": "x", "parameters": {"max_new_tokens": 4}},
    "/vertex": {"instances": [{"inputs": "x", "parameters": {"max_new_tokens": 4}}]},
}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


def counted(engine: FakeEngine, route: str) -> tuple[float, float, float]:
    names = ("tgi_route_requests", "tgi_route_errors", "tgi_route_duration")
    requests, errors, durations = (engine.metrics.value(name, route=route) for name in names)
    return requests, errors, durations


async def test_every_name_is_a_route():
    elsewhere = "/v1/audio/transcriptions"  # a form: `test_transcriptions.py`
    assert {*BODIES, elsewhere, "other"} == set(NAMES)
    assert set(BODIES) <= {route.path for route in ROUTES if route.method == "POST"}


@pytest.mark.parametrize("path", BODIES)
async def test_answers_and_refusals(http, path):
    engine = FakeEngine(tokenizer=byte_tokenizer(GAP_MARKS))
    async with served(engine, http) as server:
        client = await server.connect()
        assert (await client.post(path, BODIES[path])).status == 200
        assert (await client.post(path, b"{")).status >= 400
        await client.get("/health")
        assert (await client.post("/tokenize", {"inputs": "x"})).status == 200
        assert (await client.post("/nothing", {})).status == 404
    assert counted(engine, path) == (2, 1, 2)
    assert counted(engine, "other") == (1, 0, 1)


@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_that_fails_is_an_error(http, path):
    engine = FakeEngine()
    engine.fail_after = 2
    async with served(engine, http) as server:
        client = await server.connect()
        assert (await client.post(path, {**BODIES[path], "stream": True})).status == 200
    assert counted(engine, path) == (1, 1, 1)


async def test_a_client_that_leaves_is_no_error(http):
    engine = FakeEngine(lambda prompt: "ab" * 3000)
    async with served(engine, http, running=False) as server:
        client = await server.connect()
        await client.send("POST", "/generate_stream", STREAM)
        await until(lambda: bool(engine.live))
        engine.step()
        await read_until(client.stream, b"\n\n")
        await client.stream.aclose()
        await until(lambda: counted(engine, "/generate_stream")[0] == 1)
    assert counted(engine, "/generate_stream")[1] == 0
