"""Connections and requests that are over leave no cycles for Python's collector to find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial

import pytest
import trio
import trio.testing
from hypercorn.protocol.http_stream import HTTPStream
from werkzeug.exceptions import HTTPException

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import ENDLESS, STREAM, Client, read_until, served, until
from tests.router.http.wire.http2_client import Http2
from tgi_trio.router.http.app import HttpRequest
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.wire.connection import Connection
from tgi_trio.router.http.wire.http2 import Http2Session, Http2Transport

pytestmark = pytest.mark.trio


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Have nothing collected but by counts of references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count_left() -> int:
    """Return how many connections and requests there are, and errors about these."""
    kinds = (Connection, HttpRequest, Http2Session, Http2Transport, HTTPStream, HTTPException, Call)
    return sum(isinstance(each, kinds) for each in gc.get_objects())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/info", "/nothing", "/metrics"])
async def test_a_connection_that_has_ended_is_gone(http, path):
    before = count_left()
    method = "GET" if path in ("/info", "/nothing") else "POST"
    status = {"/nothing": 404, "/metrics": 405}.get(path, 200)
    async with served(http=http) as server:
        for _ in range(3):
            client = await server.connect()
            await client.send(method, path, None if method == "GET" else {"inputs": "x"})
            assert (await client.answer()).status == status
            await client.stream.aclose()
        del client
        await until(lambda: count_left() <= before)


MESSAGES = [{"role": "user", "content": f"message {i}"} for i in range(3000)]
TOOLS = [{"type": "function", "function": {"name": f"tool_{i:05}"}} for i in range(3000)]
# Of a few hundred bytes, and such as are read or prepared in threads.
REFUSED = {
    "no JSON": ("/v1/chat/completions", b"{", 400),
    "a wrong field": ("/generate", {"inputs": 5}, 422),
    "a wrong value": ("/generate", {"inputs": "x", "parameters": {"temperature": -1}}, 422),
    "a wrong message": ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": 5}]}, 422),
    "too long": ("/generate", {"inputs": "word " * 200_000}, 422),
    "too many messages": ("/v1/chat/completions", {"messages": MESSAGES}, 400),
    "too large a grammar": (
        "/v1/chat/completions",
        {"messages": MESSAGES[:1], "tools": TOOLS},
        422,
    ),
    "a wrong tag": (
        "/v1/chat/completions",
        {"messages": MESSAGES[:1], "structural_tag": {"format": {"type": "nothing"}}},
        422,
    ),
    "too many ids": ("/v1/completions", {"prompt": [*range(3, 200)] * 200}, 400),
}


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_that_is_refused_is_gone(http, name):
    """Its error held it, and its body: of threads that trio's frames hold."""
    path, body, status = REFUSED[name]
    before = count_left()
    limits = ServedLimits(max_input_tokens=1000, max_total_tokens=2000)
    async with served(FakeEngine(limits=limits), http) as server:
        for _ in range(3):
            client = await server.connect()
            answer = await client.post(path, body)
            assert answer.status == status, answer.body
            await client.stream.aclose()
        del client
        await until(lambda: count_left() <= before)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/completions"])
async def test_a_generation_that_fails_is_gone(http, path):
    before = count_left()
    engine = FakeEngine()
    engine.fail_after = 1
    async with served(engine, http) as server:
        for _ in range(3):
            client = await server.connect()
            field = "prompt" if path == "/v1/completions" else "inputs"
            answer = await client.post(path, {field: "x"})
            assert b"the shard gave up" in answer.body
            await client.stream.aclose()
        del client
        engine.left.clear()
        await until(lambda: count_left() <= before)


@pytest.mark.usefixtures("uncollected")
async def test_a_request_whose_client_has_left_is_gone(http):
    before = count_left()
    engine = FakeEngine(lambda prompt: ENDLESS)
    async with served(engine, http) as server:
        for path in ("/generate_stream", "/generate"):
            stream = await server.raw()
            await stream.send_all(Client.request("POST", path, STREAM, {}))
            await until(lambda: bool(engine.live))
            if path == "/generate_stream":
                await read_until(stream, b"\r\n\r\n")
            stream.socket.close()
            await until(lambda: not engine.live and engine.permits == 0)
        engine.left.clear()
        await until(lambda: count_left() <= before)


@pytest.mark.usefixtures("uncollected")
async def test_requests_of_http2_are_gone_and_then_their_connection(http):
    """One that is answered, one that is streamed, and one that the client gives up."""
    before = count_left()
    engine = FakeEngine(lambda prompt: ENDLESS if prompt == "y" else "Hello")
    async with served(engine, http) as server:
        client = Http2(await server.raw())
        for path in ("/generate", "/generate_stream", "/nothing"):
            id = await client.post(path, b'{"inputs":"x"}')
            await client.pump(partial(client.ended.__contains__, id))
            await until(lambda: count_left() <= before + 2)  # the connection and its session
        id = await client.post("/generate_stream", b'{"inputs":"y"}')
        await client.pump(lambda: bool(client.body[id]))
        client.connection.reset_stream(id)
        await client.flush()
        await until(lambda: not engine.live and engine.permits == 0)
        engine.left.clear()
        await until(lambda: count_left() <= before + 2)
        await client.stream.aclose()
        await until(lambda: count_left() <= before)


@pytest.mark.usefixtures("uncollected")
async def test_what_is_no_request_is_gone(http):
    before = count_left()
    async with served(http=http) as server:
        for data in (b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GE"):
            stream = await server.raw()
            await stream.send_all(data)
            await trio.testing.wait_all_tasks_blocked()
            await stream.aclose()
        await until(lambda: count_left() <= before)
