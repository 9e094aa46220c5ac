"""Thoughts and calls of the embedded model, as whoever has just started a server meets them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.system.client import chat_events, post
from tests.system.server import ServerProcess

pytestmark = pytest.mark.system

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
QUESTION = "What is 12 times 7?"
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


def chat(demo: ServerProcess, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 200, **fields}
    answer = post(f"{demo.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def test_it_thinks_before_it_answers_if_asked_to(demo: ServerProcess) -> None:
    question = {"role": "user", "content": "What is continuous batching?"}
    plain, thought = chat(demo, [question]), chat(demo, [question], **THINKS)
    assert "join the running batch" in plain["message"]["content"]
    assert not plain["message"].get("reasoning_content")
    assert thought["message"]["content"] == plain["message"]["content"]
    assert "continuous batching" in thought["message"]["reasoning_content"]
    assert len(thought["message"]["reasoning_content"]) < 100


@pytest.mark.parametrize("fields", [{}, THINKS], ids=["plain", "thinks"])
def test_it_calls_a_tool_and_says_what_came_of_it(
    demo: ServerProcess, fields: dict[str, Any]
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    first = chat(demo, messages, tools=[CALCULATE], **fields)
    assert first["finish_reason"] == "tool_calls"
    (call,) = first["message"]["tool_calls"]
    assert call["function"]["name"] == "calculate"
    assert orjson.loads(call["function"]["arguments"]) == {"expression": "12 * 7"}
    assert bool(first["message"].get("reasoning_content")) == bool(fields)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "84"}
    last = chat(demo, [*messages, first["message"], result], tools=[CALCULATE], **fields)
    assert last["finish_reason"] == "stop"
    assert "84" in last["message"]["content"]


def test_a_stream_brings_the_same_thought_and_call(demo: ServerProcess) -> None:
    fields = {"temperature": 0, "max_tokens": 200, "tools": [CALCULATE], **THINKS}
    body = chat(demo, [{"role": "user", "content": QUESTION}], **fields)["message"]
    deltas = [event["choices"][0]["delta"] for event in chat_events(demo.url, QUESTION, **fields)]
    said = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert said == body["reasoning_content"]
    assert arguments == body["tool_calls"][0]["function"]["arguments"]
    assert calls[0]["function"]["name"] == "calculate"
