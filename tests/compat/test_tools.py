"""Tool calls with the clients that people use, in one piece and as a stream."""

from __future__ import annotations

import json
import re
from typing import Any

import openai as package
import pytest
from huggingface_hub import InferenceClient
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageCustomToolCall

from tests.system.server import ServerProcess

pytestmark = pytest.mark.system

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
BROKEN = {
    "type": "function",
    "function": {"name": "broken", "parameters": {"properties": {"x": {"type": "strin"}}}},
}
DANGLING = {
    "type": "function",
    "function": {"name": "dangling", "parameters": {"properties": {"x": {"$ref": "#/nowhere"}}}},
}
ASKED: dict[str, Any] = {"messages": QUESTION, "tools": [WEATHER, CLOCK], "max_tokens": 300}
GREEDY: dict[str, Any] = {**ASKED, "model": "tgi", "temperature": 0}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


def check_call(name: str, arguments: str) -> None:
    """Check a call by hand against the tools above."""
    found = json.loads(arguments)
    assert json.dumps(found, ensure_ascii=False, separators=(",", ":")) == arguments
    if name == "clock":
        assert found == {}
    else:
        assert name == "get_weather"
        assert {"city", "unit"} <= set(found) <= {"city", "days", "unit"}
        assert isinstance(found["city"], str) and len(found["city"]) <= 12
        assert found["unit"] in ("celsius", "fahrenheit")
        assert 1 <= found.get("days", 1) <= 9


@pytest.mark.parametrize("choice", ["required", NAMED, "get_weather"])
def test_openai_gets_the_calls_it_demands(openai: OpenAI, choice: Any) -> None:
    options: Any = {**GREEDY, "tool_choice": choice, "parallel_tool_calls": False}
    whole = openai.chat.completions.create(**options).choices[0]
    chunks = [c.choices[0] for c in openai.chat.completions.create(**options, stream=True)]
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"
    assert {chunk.finish_reason for chunk in chunks[:-1]} == {None}
    assert whole.message.content is None
    assert not any(chunk.delta.content for chunk in chunks)
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.id
    check_call(call.function.name, call.function.arguments)
    deltas = [delta for chunk in chunks for delta in chunk.delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    assert deltas[0].id and deltas[0].function and deltas[0].function.name == call.function.name
    assert not any(delta.id or delta.type for delta in deltas[1:])
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == (
        call.function.arguments
    )
    if choice != "required":
        assert call.function.name == "get_weather"


def test_openais_stream_helper_puts_a_call_together(openai: OpenAI) -> None:
    options: Any = {**GREEDY, "tool_choice": NAMED}
    whole = openai.chat.completions.create(**options).choices[0].message
    with openai.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert [c.function.arguments for c in final.tool_calls or []] == [
        c.function.arguments for c in whole.tool_calls or []
    ]
    assert final.content is None


def test_openai_gets_the_text_of_a_custom_tool_and_sends_it_back(openai: OpenAI) -> None:
    definition = 'start: "move " SIDE\nSIDE: "left" | "right"\n'
    form = {"type": "grammar", "grammar": {"syntax": "lark", "definition": definition}}
    robot: Any = {"type": "custom", "custom": {"name": "robot", "format": form}}
    choice: Any = {"type": "custom", "custom": {"name": "robot"}}
    options: Any = {**GREEDY, "tools": [robot, CLOCK], "tool_choice": choice}
    whole = openai.chat.completions.create(**options).choices[0]
    (call,) = whole.message.tool_calls or []
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert call.custom.name == "robot" and call.custom.input in ("move left", "move right")
    assert whole.finish_reason == "tool_calls"
    chunks = openai.chat.completions.create(**options, stream=True)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    told = [delta.model_dump()["custom"] for delta in deltas]  # the package's type lacks the field
    assert told[0]["name"] == "robot" and deltas[0].id
    assert "".join(each["input"] for each in told) == call.custom.input
    history = [*QUESTION, whole.message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    again = openai.chat.completions.create(**{**options, "messages": history, "max_tokens": 1})
    assert again.usage is not None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_openai_allows_some_of_the_tools(openai: OpenAI, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    message = openai.chat.completions.create(**GREEDY, tool_choice=choice).choices[0].message
    names = {call.function.name for call in message.tool_calls or [] if call.type == "function"}
    assert names == {"clock"} or (mode == "auto" and not names)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_drawn_the_arguments_fit_the_schema(openai: OpenAI, seed: int) -> None:
    options: Any = {**GREEDY, "temperature": 1.0, "seed": seed, "n": 2, "tool_choice": "required"}
    for choice in openai.chat.completions.create(**options).choices:
        assert choice.message.tool_calls and choice.message.content is None
        *whole, last = choice.message.tool_calls
        for call in whole:
            check_call(call.function.name, call.function.arguments)
        if choice.finish_reason == "tool_calls":
            check_call(last.function.name, last.function.arguments)
        else:
            assert choice.finish_reason == "length"


def test_auto_lets_the_model_answer_in_prose_as_one_generation(openai: OpenAI) -> None:
    asked = [{"role": "user", "content": "What is continuous batching?"}]  # none of the tools is
    options: Any = {**GREEDY, "messages": asked, "tool_choice": "auto", "logprobs": True}
    whole = openai.chat.completions.create(**options)
    chunks = [c.choices[0] for c in openai.chat.completions.create(**options, stream=True)]
    choice, usage = whole.choices[0], whole.usage
    assert choice.message.content and not choice.message.tool_calls
    assert choice.finish_reason == chunks[-1].finish_reason == "stop"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
    told = [
        entry.token
        for chunk in chunks
        for entry in (chunk.logprobs.content if chunk.logprobs else None) or []
    ]
    assert choice.logprobs and choice.logprobs.content and usage
    assert told == [entry.token for entry in choice.logprobs.content]
    assert len(told) == usage.completion_tokens


def test_none_is_a_chat_without_tools(openai: OpenAI) -> None:
    none = openai.chat.completions.create(**GREEDY, tool_choice="none")
    plain = openai.chat.completions.create(**{**GREEDY, "tools": package.omit})
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage == plain.usage


def test_a_result_is_sent_back_with_the_call_it_answers(openai: OpenAI) -> None:
    first = openai.chat.completions.create(**GREEDY, tool_choice=NAMED).choices[0].message
    (call,) = first.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    history = [*QUESTION, first, result]
    second: Any = {**GREEDY, "messages": history, "max_tokens": 20, "tool_choice": "none"}
    assert openai.chat.completions.create(**second).choices[0].message.content


def test_openai_is_told_what_is_wrong(openai: OpenAI) -> None:
    for wrong, text in (
        ({"tool_choice": "unknown"}, "Tool with name unknown not found"),
        ({"tools": [CLOCK, CLOCK]}, "two tools have the name `clock`"),
        ({"response_format": {"type": "json_object"}}, "mutually exclusive"),
        ({"tools": [CLOCK, BROKEN]}, "the `parameters` of `broken`: .*: Invalid type: strin"),
        ({"tools": [CLOCK, DANGLING]}, "the `parameters` of `dangling`: .*'/nowhere'"),
    ):
        options: Any = {**GREEDY, **wrong}
        with pytest.raises(package.UnprocessableEntityError, match=text):
            openai.chat.completions.create(**options, stream=True)


def test_tags_hold_beside_tools(openai: OpenAI) -> None:
    """Whatever a model says that is so warm that it would say anything."""
    number = {"type": "regex", "pattern": "[0-9]{1,3}"}
    tag = {"type": "tag", "begin": "The sum ", "content": number, "end": "."}
    free = {"type": "triggered_tags", "triggers": ["The"], "tags": [tag], "at_least_one": True}
    extra = {"structural_tag": {"format": free}}
    options: Any = {**GREEDY, "temperature": 1.5, "seed": 4, "n": 3, "max_tokens": 60}
    for choice in openai.chat.completions.create(**options, extra_body=extra).choices:
        text = choice.message.content or ""
        assert re.match(r"The sum [0-9]{1,3}\.", text)
        assert len(re.findall(r"The sum [0-9]{1,3}\.", text)) == text.count("The")
    required = openai.chat.completions.create(**options, tool_choice="required", extra_body=extra)
    for choice in required.choices:
        if choice.finish_reason == "tool_calls":
            for call in choice.message.tool_calls or []:
                check_call(call.function.name, call.function.arguments)


# ---- huggingface_hub -------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"function": {"name": "get_weather"}}])
def test_the_hubs_client_gets_the_same(served: ServerProcess, choice: Any) -> None:
    client = InferenceClient(base_url=served.url)
    options: Any = {**ASKED, "temperature": 0, "tool_choice": choice}
    whole = client.chat_completion(**options).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat_completion(**options, stream=True)]
    assert whole.finish_reason == chunks[-1].finish_reason
    calls = whole.message.tool_calls
    assert calls and not whole.message.content
    texts = [""] * len(calls)
    for delta in (delta for chunk in chunks for delta in chunk.delta.tool_calls or []):
        texts[delta.index] += delta.function.arguments
    assert texts == [call.function.arguments for call in calls]
    if whole.finish_reason == "tool_calls":
        for call in calls:
            check_call(call.function.name, call.function.arguments)
