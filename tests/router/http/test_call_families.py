"""Chats with tools behind the templates of real families: an answer, and the round after it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.router.http import tool_calls
from tests.router.http.fake_engine import FakeEngine, byte_tokenizer
from tests.router.http.served import served
from tests.router.http.test_tools import chunks_of, folded, message_of
from tests.router.text.families import BY_NAME as FAMILIES
from tests.router.text.families import template_of
from tgi_trio.router.http.messages import replies
from tgi_trio.router.text.tools.call_formats import HERMES
from tgi_trio.router.text.tools.probe import find_call_style

pytestmark = pytest.mark.trio

CHAT = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Rain?"}],
    "tools": TOOLS,
    "max_tokens": 500,
}
ARGUMENTS = {"city": "2\nZürich", "days": 3}
NAMES = sorted(FAMILIES)


def engine(name: str, answer: str) -> FakeEngine:
    """Return a model of a family that gives an answer; its marks are special tokens."""
    family = FAMILIES[name]
    found = FakeEngine(lambda prompt: answer, tokenizer=byte_tokenizer(family.added))
    found.chat_template = template_of(name)
    return found


def called(name: str, function: str = "weather", arguments: Any = ARGUMENTS) -> str:
    """Return what the model writes when it calls, behind the thought where the prompt has one."""
    family = FAMILIES[name]
    form = find_call_style(template_of(name), family.added).format
    thought = f"Hm.{family.marks[1]}" if family.marks and family.default == "inside" else ""
    return thought + form.write([(function, arguments)])


@pytest.mark.parametrize("name", ["deepseek-v3.1", "gpt-oss", "qwen2.5", "qwen3-coder"])
@pytest.mark.parametrize("none", [{}, {"parameters": None}, {"arguments": None}])
async def test_a_function_without_parameters_is_shown_as_one_without_arguments(
    name: str, none: dict[str, None]
) -> None:
    async with served(engine(name, "")) as server:
        client = await server.connect()
        prompts = []
        for parameters in (none, {"parameters": {"type": "object", "properties": {}}}):
            clock = {"type": "function", "function": {"name": "clock", **parameters}}
            answer = await client.post("/chat_tokenize", {**BODY, "tools": [clock]})
            assert answer.status == 200, answer.body
            prompts.append(answer.json()["templated_text"])
    assert prompts[0] == prompts[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
async def test_a_call_and_the_round_after_it(name: str) -> None:
    found = engine(name, called(name))
    async with served(found) as server:
        client = await server.connect()
        message, reason = message_of(await client.post(CHAT, BODY))
        assert reason == "tool_calls" and message.content is None
        (call,) = message.tool_calls or []
        name_called, arguments = tool_calls.made(call)
        assert (name_called, json.loads(arguments)) == ("weather", ARGUMENTS)
        events = chunks_of(await client.post(CHAT, {**BODY, "stream": True}))
        assert folded(events) == ("", [("weather", arguments)], "tool_calls")
        past = [
            {"role": "assistant", "content": None, "tool_calls": [json.loads(_json(call))]},
            {"role": "tool", "tool_call_id": call.id, "content": "sun"},
        ]
        body = {**BODY, "messages": [*BODY["messages"], *past]}
        answer = await client.post("/chat_tokenize", body)
        assert answer.status == 200, answer.body
        prompt = answer.json()["templated_text"]
        assert "weather" in prompt and "Zürich" in prompt and "sun" in prompt
        # What another API or model called its call is taken as well.
        renamed = json.dumps(body["messages"]).replace(call.id, "toolu_01ABCDEFG")
        answer = await client.post("/chat_tokenize", {**body, "messages": json.loads(renamed)})
        assert answer.status == 200, answer.body


def _json(call: replies.OutputToolCall) -> str:
    return msgspec.json.encode(call).decode()


CHANNELS = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
)


async def test_channels_are_told_apart_with_tools_and_without() -> None:
    call = called("gpt-oss")
    text = CHANNELS + call
    async with served(engine("gpt-oss", text)) as server:
        client = await server.connect()
        answer = await client.post(CHAT, BODY)
        message, reason = message_of(answer)
        assert (message.content, reason) == ("Let me look.", "tool_calls")
        assert answer.json()["choices"][0]["message"]["reasoning_content"] == "Hm."
        content, calls, last = folded(chunks_of(await client.post(CHAT, {**BODY, "stream": True})))
        assert (content, [name for name, _ in calls], last) == (
            "Let me look.",
            ["weather"],
            "tool_calls",
        )
    final = CHANNELS + "<|channel|>final<|message|>Dry."
    async with served(engine("gpt-oss", final)) as server:
        client = await server.connect()
        for more in ({}, {"tools": None}, {"tool_choice": "none"}):
            answer = await client.post(CHAT, {**BODY, **more})
            message, reason = message_of(answer)
            assert (message.content, reason) == ("Let me look.\n\nDry.", "stop"), more
            assert answer.json()["choices"][0]["message"]["reasoning_content"] == "Hm."


MALFORMED = [
    "{trigger}",
    "{trigger}{trigger}",
    "{trigger} is a word",
    "{opening}unknown",
    "{half}",
    "{call}{trigger}",
    "{call}{call}",
    "{trigger}{call}",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
async def test_whatever_a_model_writes_is_an_answer(name: str) -> None:
    form = find_call_style(template_of(name), FAMILIES[name].added).format
    call = form.write([("weather", ARGUMENTS)])
    said = ""
    found = engine(name, "")
    found.answer = lambda prompt: said
    async with served(found) as server:
        client = await server.connect()
        for text in MALFORMED:
            said = text.format(
                trigger=form.trigger, opening=form.beginning, call=call, half=call[: len(call) // 2]
            )
            answer = await client.post(CHAT, BODY)
            assert answer.status == 200, answer.body
            message, reason = message_of(answer)
            calls = tool_calls.called(message)
            streamed = folded(chunks_of(await client.post(CHAT, {**BODY, "stream": True})))
            assert streamed == (message.content or "", calls, reason), text


async def test_an_unknown_family_calls_as_hermes_does() -> None:
    assert find_call_style(None, ()).format is HERMES


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
async def test_the_text_of_a_custom_tool_comes_back_as_it_was_written(name: str) -> None:
    text = '+ "é"\n- x'
    found = engine(name, called(name, "patch", {"input": text}))
    body = {**BODY, "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    async with served(found) as server:
        client = await server.connect()
        message, reason = message_of(await client.post(CHAT, body))
        assert (tool_calls.called(message), reason) == ([("patch", text)], "tool_calls")
        streamed = folded(chunks_of(await client.post(CHAT, {**body, "stream": True})))
        assert streamed == ("", [("patch", text)], "tool_calls")
