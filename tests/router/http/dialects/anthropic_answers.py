"""Anthropic's Messages, asked for and read as their clients do."""

from __future__ import annotations

import json
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
from tgi_trio.router.http.dialects.anthropic import replies

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED: list[Any] = [{"role": "user", "content": "Rain?"}]
BODY: dict[str, Any] = {"model": "test/model", "max_tokens": 500, "messages": ASKED}
TOOLS = [
    {"name": "weather", "description": "Of a city", "input_schema": CITY},
    {"name": "clock", "input_schema": {"type": "object"}},
]


async def asked(engine: FakeEngine, http: Any = None, path: str = PATH, **more: Any) -> Answer:
    return await post(engine, http, path, BODY, more)


async def prompt_of(**more: Any) -> str:
    """Return the prompt that a body becomes."""
    one = engine()
    return prompt(one, await asked(one, **more))


def reply(answer: Answer) -> replies.MessageReply:
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=replies.MessageReply)


def events(answer: Answer) -> list[Any]:
    """Return the events, each named as its data's type, and of the documented shape."""
    found = []
    for name, data in frames(answer):
        assert name.decode() == json.loads(data)["type"]
        found.append(msgspec.json.decode(data, type=replies.MessageEvent))
    return found


def folded(told: list[Any]) -> tuple[list[Any], Any, Any]:
    """Return content, end and usage as clients put them together, checking indexes and order."""
    start, *middle, delta, stop = told
    assert isinstance(start, replies.MessageStart) and isinstance(stop, replies.MessageStop)
    assert isinstance(delta, replies.MessageDelta)
    assert start.message.content == [] and start.message.stop_reason is None
    content: list[Any] = []
    open = False
    for event in middle:
        if isinstance(event, replies.ContentBlockStart):
            assert not open and event.index == len(content)
            block: Any = event.content_block
            content.append(block)
            open, pieces = True, list[str]()
            continue
        assert open and event.index == len(content) - 1
        if isinstance(event, replies.ContentBlockStop):
            open = False
            if isinstance(block, replies.ToolUseContent):
                assert block.input == {}
                block.input = json.loads("".join(pieces) or "{}")
            continue
        match event.delta:
            case replies.TextDelta(text):
                block.text += text
            case replies.ThinkingDelta(thinking):
                assert not block.signature, "the signature comes last"
                block.thinking += thinking
            case replies.SignatureDelta(signature):
                assert not block.signature
                block.signature = signature
            case replies.InputJsonDelta(partial):
                pieces.append(partial)
    assert not open
    return content, delta.delta, delta.usage


def without_ids(content: list[Any]) -> list[Any]:
    for block in content:
        if isinstance(block, replies.ToolUseContent):
            assert block.id.startswith("toolu_")
            block.id = ""
    return content


THOUGHT, RAIN = replies.ThinkingContent("Hm, rain.", "unsigned"), replies.TextContent("It rains.")


def used(call: tuple[str, dict[str, Any]]) -> replies.ToolUseContent:
    return replies.ToolUseContent("", *call)


def error(answer: Answer) -> tuple[int, str, str]:
    found = msgspec.json.decode(answer.body, type=replies.AnthropicErrorResponse)
    assert found.request_id == answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status, found.error.type, found.error.message
