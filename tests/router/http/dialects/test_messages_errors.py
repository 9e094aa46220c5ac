"""Errors of Anthropic's Messages, in their words."""

from __future__ import annotations

import pytest

from tests.router.http.dialects.anthropic_answers import (
    BODY,
    COUNT,
    PATH,
    TOOLS,
    asked,
    error,
    events,
)
from tests.router.http.dialects.conversations import engine
from tests.router.http.served import served
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.dialects.anthropic import replies
from tgi_trio.router.http.engine_api import ServedLimits

pytestmark = pytest.mark.trio


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize(
    ("fields", "status", "type", "words"),
    [
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": ...}, 400, "invalid_request_error", "messages"),
        ({"model": ...}, 400, "invalid_request_error", "model"),
        ({"model": "other"}, 404, "not_found_error", "`other`"),
        ({"messages": [{"role": "x", "content": "a"}]}, 400, "invalid_request_error", "`x`"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "name"),
        (
            {"chat_template_kwargs": {"messages": []}},
            400,
            "invalid_request_error",
            "`messages` has a field of its own",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "no tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
            400,
            "invalid_request_error",
            "x not found",
        ),
        ({"tools": [{"name": "a b"}]}, 400, "invalid_request_error", "no name for a function"),
        ({"tools": [{"input_schema": {}}]}, 400, "invalid_request_error", "tools[0]: missing"),
        (
            {"tools": [{"name": "a", "input_schema": {"type": "string"}}]},
            400,
            "invalid_request_error",
            "the `input_schema` of `a` must be",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "image",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            400,
            "invalid_request_error",
            "document",
        ),
    ],
)
async def test_what_is_refused(path, fields, status, type, words):
    found = error(await asked(engine(), path=path, **fields))
    assert found[:2] == (status, type) and words in found[2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": ...}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0, "stream": True}, "`max_tokens` of 0 has no stream"),
        ({"top_p": 2.0}, "top_p"),
        ({"stop_sequences": ["x"] * 65}, "64"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "xml"),
    ],
)
async def test_what_is_refused_of_an_answer(fields, words):
    status, type, message = error(await asked(engine(), **fields))
    assert (status, type) == (400, "invalid_request_error") and words in message


async def test_a_prompt_that_is_too_long():
    small = ServedLimits(max_input_tokens=20, max_total_tokens=40)
    found = error(await asked(engine(limits=small)))
    assert found == (400, "invalid_request_error", "prompt is too long: 27 tokens > 20 maximum")
    tight = ServedLimits(max_input_tokens=19, max_total_tokens=20)
    words = "prompt is too long: 27 tokens > 19 maximum"
    assert error(await asked(engine(limits=tight)))[2] == words
    full = ServedLimits(max_input_tokens=40, max_total_tokens=27)
    assert error(await asked(engine(limits=full)))[2].startswith(
        "prompt is too long: 27 tokens > 26 "
    )
    count = await asked(engine(limits=small), path=COUNT)
    assert count.json() == {"input_tokens": 27}, "a count has no bound"


async def test_errors_before_the_route(http):
    async with served(engine(), HttpSettings(api_keys=("key",))) as server:
        client = await server.connect()
        assert error(await client.post(PATH, BODY))[:2] == (401, "authentication_error")
        for headers in ({"x_api_key": "key"}, {"authorization": "Bearer key"}):
            assert (await client.post(PATH, BODY, **headers)).status == 200
            assert (await client.post(COUNT, BODY, **headers)).status == 200
    async with served(engine(), http) as server:
        client = await server.connect()
        broken = await client.post(PATH, b"{")
        plain = await client.post(PATH, BODY, content_type="text/plain")
    assert error(broken)[:2] == (400, "invalid_request_error")
    assert error(plain)[:2] == (400, "invalid_request_error")
    async with served(engine(), HttpSettings(payload_limit=10)) as server:
        large = await (await server.connect()).post(PATH, BODY)
    assert error(large)[:2] == (413, "request_too_large")


async def test_what_is_not_served_of_the_api(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        batches = await client.post(f"{PATH}/batches", {})
        got = await client.get(PATH)
    status, type, message = error(batches)
    assert (status, type) == (404, "not_found_error") and "/v1/messages/batches" in message
    assert error(got)[:2] == (405, "invalid_request_error") and got.headers["allow"] == "POST"


async def test_an_overload_says_when_to_come_back():
    full = engine(limits=ServedLimits(max_concurrent_requests=1))
    full.permits = 1
    answer = await asked(full)
    assert error(answer)[:2] == (429, "rate_limit_error")
    assert answer.headers["retry-after"] == "2"


async def test_a_failure_ends_a_stream(http):
    failing = engine("It rains.")
    failing.fail_after = 3
    *told, last = events(await asked(failing, http, stream=True))
    assert isinstance(last, replies.AnthropicErrorResponse)
    assert last.error.type == "api_error" and "shard gave up" in last.error.message
    assert isinstance(told[0], replies.MessageStart)
    body = engine("It rains.")
    body.fail_after = 3
    assert error(await asked(body, http))[:2] == (500, "api_error")


async def test_browsers_may_send_what_the_sdk_sends():
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.ask(
            "OPTIONS", PATH, origin="http://a", access_control_request_method="POST"
        )
    allowed = set(answer.headers["access-control-allow-headers"].split(","))
    assert {"x-api-key", "anthropic-version", "anthropic-beta"} <= allowed
