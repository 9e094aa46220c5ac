"""Deadlines and priorities: from body or header into the request, and what their end looks like."""

from __future__ import annotations

import pytest
import trio

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.errors import GenerationError, Overloaded

pytestmark = pytest.mark.trio

USER = [{"role": "user", "content": "Hi"}]
ROUTES = {
    "/generate": lambda more: {"inputs": "x", "parameters": more},
    "/generate_stream": lambda more: {"inputs": "x", "parameters": more},
    "/": lambda more: {"inputs": "x", "parameters": more},
    "/v1/chat/completions": lambda more: {"messages": USER, **more},
    "/v1/completions": lambda more: {"prompt": ["x", "y"], **more},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_timeout_and_priority_reach_the_queue(path):
    async with served() as server:
        client = await server.connect()
        began = trio.current_time()
        answer = await client.post(path, ROUTES[path]({"timeout": 40, "priority": -2}))
        ended = trio.current_time()
    assert answer.status == 200
    for request in server.engine.submitted:
        assert request.deadline is not None
        assert began + 40 <= request.deadline <= ended + 40
        assert request.priority == -2


async def test_without_them_a_request_waits_as_long_as_it_takes():
    async with served() as server:
        client = await server.connect()
        for path, body in ROUTES.items():
            await client.post(path, body({"timeout": None, "priority": None}))
    assert {(each.deadline, each.priority) for each in server.engine.submitted} == {(None, 0)}


@pytest.mark.parametrize(("header", "body", "sooner"), [("30", 90, 30), ("90.5", 30, 30)])
async def test_the_sooner_of_header_and_body_counts(header, body, sooner):
    async with served() as server:
        client = await server.connect()
        began = trio.current_time()
        await client.post("/v1/completions", {"prompt": "x", "timeout": body},
                          x_request_timeout=header)  # fmt: skip
        ended = trio.current_time()
    (request,) = server.engine.submitted
    assert began + sooner <= request.deadline <= ended + sooner


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("more", "header", "text"),
    [
        ({"timeout": 0}, "5", "`timeout` must be a number of seconds > 0. Given: 0"),
        ({"timeout": -1.5}, "5", "`timeout` must be a number of seconds > 0. Given: -1.5"),
        ({"timeout": "soon"}, "5", "timeout: Expected `float | null`, got `str`"),
        ({"priority": 1.5}, "5", "priority: Expected `int | null`, got `float`"),
        ({}, "0", "`x-request-timeout` must be a number of seconds > 0"),
        ({}, "soon", "`x-request-timeout` must be a number of seconds > 0. Given: soon"),
        ({}, "inf", "`x-request-timeout` must be a number of seconds > 0"),
        ({}, "nan", "`x-request-timeout` must be a number of seconds > 0"),
        ({}, "", "`x-request-timeout` must be a number of seconds > 0. Given: ``"),
    ],
)
async def test_bad_values_are_refused(path, more, header, text):
    async with served() as server:
        client = await server.connect()
        answer = await client.post(path, ROUTES[path](more), x_request_timeout=header)
    assert answer.status == 422
    assert text in answer.body.decode()
    assert not server.engine.submitted and server.engine.permits == 0


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_that_cannot_be_in_time_is_told_when_to_come_back(path):
    class Late(FakeEngine):
        def submit(self, request, timings=None, output=None):
            raise Overloaded("The request's deadline cannot be met", retry_after=7.2)

    async with served(Late()) as server:
        client = await server.connect()
        answer = await client.post(path, ROUTES[path]({"timeout": 1}))
    assert b"deadline cannot be met" in answer.body
    if path != "/generate_stream":  # always 200, as in TGI
        assert (answer.status, answer.headers["retry-after"]) == (429, "8")
    assert server.engine.permits == 0


@pytest.mark.parametrize("path", ROUTES)
async def test_an_expired_request_is_a_424(path):
    fake = FakeEngine()
    async with served(fake, running=False) as server:
        client = await server.connect()
        await client.send("POST", path, ROUTES[path]({"timeout": 1}))
        while not fake.live:
            await trio.sleep(0.001)
        for stream in list(fake.live.values()):
            del fake.live[stream.id]
            stream.deliver([], GenerationError("the request's deadline has passed"))
        answer = await client.answer()
    assert b"Request failed during generation: the request's deadline has passed" in answer.body
    assert answer.status == (200 if path == "/generate_stream" else 424)
    assert fake.permits == 0
