"""OpenAI's Responses, asked for and read as their clients do."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.router.http.dialects.conversations import (
    CITY,
    engine,
    frames,
    post,
    prompt,
)
from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import Answer
from tgi_trio.router.http.dialects.responses import replies

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "test/model", "input": "Rain?"}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city", "parameters": CITY}
CLOCK = {"type": "function", "name": "clock", "parameters": None, "strict": False}
ANY_TEXT = {"type": "grammar", "syntax": "lark", "definition": "start: /.*/s"}
PATCH = {"type": "custom", "name": "patch", "format": ANY_TEXT}
SPACE = {"type": "namespace", "name": "mcp", "tools": [{**CLOCK, "name": "now"}]}
SHELL = {"type": "local_shell"}
COMMANDS = {"type": "shell", "environment": {"type": "local"}}
FILES = {"type": "apply_patch"}
HOSTED = {"type": "web_search", "external_web_access": True}
TOOLS = [WEATHER, CLOCK, PATCH, SPACE, SHELL, COMMANDS, FILES, HOSTED]


async def asked(engine: FakeEngine, http: Any = None, **more: Any) -> Answer:
    return await post(engine, http, PATH, BODY, more)


async def prompt_of(**more: Any) -> str:
    """Return the prompt that a body becomes."""
    one = engine()
    return prompt(one, await asked(one, **more))


def reply(answer: Answer) -> replies.ResponseReply:
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=replies.ResponseReply)


def events(answer: Answer) -> list[replies.ResponseEvent]:
    """Return the events, each named as its data's type, numbered and of the documented shape."""
    found = []
    for i, (name, data) in enumerate(frames(answer)):
        event = msgspec.json.decode(data, type=replies.ResponseEvent)
        assert (name.decode(), i) == (event.type, event.sequence_number)
        found.append(event)
    return found


def final(told: list[replies.ResponseEvent]) -> replies.ResponseReply:
    """Return the last response, checking that the events before it say the same."""
    begun = [told.pop(0), told.pop(0)]
    assert [each.type for each in begun] == ["response.created", "response.in_progress"]
    last = told.pop()
    whole = last.response
    assert isinstance(whole, replies.ResponseReply)
    assert last.type == f"response.{whole.status}"
    for event in begun:
        start = event.response
        assert isinstance(start, replies.ResponseReply)
        assert (start.id, start.status, start.output) == (whole.id, "in_progress", [])
        assert start.usage is None and start.tools == whole.tools
    for index, item in enumerate(whole.output):
        mine = [each for each in told if each.output_index == index]
        assert mine[0].type == "response.output_item.added"
        assert mine[-1].type == "response.output_item.done" and mine[-1].item == item
        added = mine[0].item
        assert added is not msgspec.UNSET and (added.id, added.status) == (item.id, "in_progress")
        assert {each.item_id for each in mine[1:-1]} <= {item.id}
        pieces = "".join(each.delta for each in mine if isinstance(each.delta, str))
        match item:
            case (
                replies.ReasoningItem(content=[part])
                | replies.ReasoningItem(summary=[part])
                | replies.MessageItem(content=[part])
            ):
                assert pieces == part.text
                assert [each.text for each in mine if isinstance(each.text, str)] == [part.text]
                assert mine[-2].part == part
            case replies.FunctionCallItem(arguments=arguments):
                assert pieces == arguments == mine[-2].arguments
                assert mine[-2].name == item.name
            case replies.CustomToolCallItem(input=text):
                assert pieces == text == mine[-2].input
    assert {each.output_index for each in told} <= set(range(len(whole.output)))
    return whole


def plain(output: list[Any]) -> list[Any]:
    """Return items without what no two answers have in common."""
    for item in output:
        assert item.id.partition("_")[0] in ("rs", "msg", "fc")
        item.id = ""
        if hasattr(item, "call_id"):
            assert item.call_id.startswith("call_")
            item.call_id = ""
    return output


def error(answer: Answer) -> tuple[int, str, str | None, str]:
    found = msgspec.json.decode(answer.body, type=replies.ResponsesErrorResponse).error
    return answer.status, found.type, found.code, found.message
