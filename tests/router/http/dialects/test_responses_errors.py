"""Errors of OpenAI's Responses."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.router.http.dialects.conversations import engine
from tests.router.http.dialects.responses_answers import BODY, CLOCK, PATH, asked, error, events
from tests.router.http.served import served
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.http.engine_api import ServedLimits

pytestmark = pytest.mark.trio


INVALID = "invalid_request_error"
SMALL = ServedLimits(max_input_tokens=20, max_total_tokens=40)


@pytest.mark.parametrize(
    ("fields", "status", "code", "words"),
    [
        ({"input": ...}, 400, None, "input"),
        ({"chat_template_kwargs": {"self": 1}}, 400, None, "`self` has a field of its own"),
        ({"input": ""}, 400, None, "`input` cannot be empty"),
        ({"input": []}, 400, None, "`input` cannot be empty"),
        ({"input": [{"role": "x", "content": "a"}]}, 400, None, "`x` is none of"),
        (
            {"input": [{"type": "item_reference", "id": "m"}]},
            404,
            "item_not_found",
            "'m' not found",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
            None,
            "input[0] holds an image, and this model does not see images",
        ),
        ({"model": "other"}, 404, "model_not_found", "`other`"),
        ({"previous_response_id": "resp_1"}, 404, "previous_response_not_found", "resp_1"),
        ({"background": True, "store": False}, 400, None, "`background` needs the response"),
        ({"conversation": "conv_1"}, 404, "conversation_not_found", "conv_1"),
        ({"prompt": {"id": "p"}}, 400, None, "prompt"),
        ({"moderation": {"model": "m"}}, 400, None, "`moderation` is not supported"),
        ({"prompt_cache_options": {"prewarm": True}}, 400, None, "prewarm"),
        ({"image": {"context_compression": "enabled"}}, 400, None, "context_compression"),
        ({"input": [{"id": "msg_1"}]}, 404, "item_not_found", "send the item itself"),
        ({"input": [{"type": None, "id": "msg_1"}]}, 404, "item_not_found", "was not stored"),
        ({"input": [{"content": "a"}]}, 400, None, "input[0].role: missing"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, 400, None, "`input` holds"),
        ({"max_output_tokens": 0}, 400, None, "max_output_tokens"),
        ({"top_p": 2.0}, 400, None, "top_p"),
        ({"tool_choice": "any"}, 400, None, "`any`"),
        ({"tool_choice": "required"}, 400, None, "no tools"),
        ({"tool_choice": {"type": "function"}}, 400, None, "name"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}},
            *(400, None, "expected one of `auto`, `required`"),
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}},
            *(400, None, "expected a list of tools"),
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            *(400, None, "expected a list of tools"),
        ),
        ({"tool_choice": {"type": "function", "name": "x"}}, 400, None, "x not found"),
        ({"tools": [{"name": "x"}]}, 400, None, "type"),
        ({"tools": [{"type": "function"}]}, 400, None, "name"),
        ({"tools": [CLOCK, CLOCK]}, 400, None, "two tools"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, None, "schema"),
        ({"text": {"format": {"type": "xml"}}}, 400, None, "xml"),
    ],
)
async def test_what_is_refused(fields, status, code, words):
    found = error(await asked(engine(), **fields))
    assert found[:2] == (status, INVALID) and words in found[3]
    assert code is None or found[2] == code


async def test_a_prompt_that_is_too_long():
    for limits in (ServedLimits(max_input_tokens=19, max_total_tokens=20), SMALL):
        for more in ({}, {"max_output_tokens": 5}):
            found = error(await asked(engine(limits=limits), **more))
            assert found[:3] == (400, INVALID, "context_length_exceeded")


async def test_errors_before_the_route(http):
    async with served(engine(), HttpSettings(api_keys=("key",))) as server:
        answer = await (await server.connect()).post(PATH, BODY)
    assert error(answer)[:3] == (401, INVALID, "invalid_api_key")
    async with served(engine(), http) as server:
        client = await server.connect()
        broken = await client.post(PATH, b"{")
        stored = [await client.ask(method, PATH + "/resp_1") for method in ("GET", "DELETE")]
    assert error(broken)[:2] == (400, INVALID)
    assert [answer.status for answer in stored] == [404, 404]


async def test_an_overload_says_when_to_come_back():
    full = engine(limits=ServedLimits(max_concurrent_requests=1))
    full.permits = 1
    answer = await asked(full)
    assert error(answer)[:3] == (429, "rate_limit_error", "rate_limit_exceeded")
    assert answer.headers["retry-after"] == "2"


def read_by_sdk(stream: bytes) -> list[object]:
    """Return the events that OpenAI's client makes of a stream; it raises as it always does."""
    header = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=header, content=stream))
    with httpx.Client(transport=transport) as http:
        given: Any = http  # newer releases of the SDK name the same library's successor
        client = openai.OpenAI(api_key="-", base_url="http://here", http_client=given)
        return list(client.responses.create(model="m", input="x", stream=True))


async def test_a_failure_ends_a_stream(http):
    failing = engine("It rains.")
    failing.fail_after = 3
    answer = await asked(failing, http, stream=True)
    *told, raised, last = events(answer)
    assert told[0].type == "response.created" and last.type == "response.failed"
    assert raised.type == "error"  # at which SDKs raise
    with pytest.raises(openai.APIError, match="shard gave up") as failed:
        read_by_sdk(answer.body)
    assert failed.value.code == "server_error"
    assert isinstance(last.response, replies.ResponseReply)
    assert last.response.error is not None and "shard gave up" in last.response.error.message
    assert last.response.status == "failed" and last.response.error.code == "server_error"
    body = engine("It rains.")
    body.fail_after = 3
    assert error(await asked(body, http))[:3] == (500, "server_error", "server_error")
