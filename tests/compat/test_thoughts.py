"""A model that thinks before whatever is forced: the whole server, with the shard's grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.system.server import ServerProcess, serving

pytestmark = pytest.mark.system

# The embedded model's marks of turns; it answers, and whatever it says first is a thought here.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "<|assistant|>{{ '<think></think>' if enable_thinking is false else '<think>\n' }}"
)
FLAGS = ("--chat-template", TEMPLATE, "--reasoning", "<think>,</think>")
QUESTION: list[Any] = [{"role": "user", "content": "What is a ring buffer?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ring", "list"]}, "size": {"type": "integer", "maximum": 9}},
    "required": ["name", "size"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "buffer", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "make", "parameters": SCHEMA}}
BUDGET = {"thinking_token_budget": 8}
ASKED: dict[str, Any] = {"model": "tgi", "messages": QUESTION, "temperature": 0, "max_tokens": 120}


@pytest.fixture(scope="module", params=[(), ("--speculate", "4")], ids=["one-by-one", "drafting"])
def thinking(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with serving(*FLAGS, *request.param) as server:
        yield server


@pytest.fixture
def client(thinking: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{thinking.url}/v1", api_key="-", max_retries=0) as found:
        yield found


def told(client: OpenAI, **more: Any) -> tuple[str, str, list[tuple[str, str]], str, int]:
    """Return thought, content, calls, reason and reasoning tokens; a stream says the same."""
    options = {**ASKED, **more}
    whole = client.chat.completions.create(**options)
    (choice,) = whole.choices
    thought = getattr(choice.message, "reasoning_content", "")
    calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    counted = whole.usage.completion_tokens_details.reasoning_tokens or 0
    streamed: list[Any] = ["", "", []]
    reason = ""
    for chunk in client.chat.completions.create(**options, stream=True):
        (news,) = chunk.choices
        streamed[0] += getattr(news.delta, "reasoning_content", None) or ""
        streamed[1] += news.delta.content or ""
        for call in news.delta.tool_calls or []:
            if call.index == len(streamed[2]):
                streamed[2].append([call.function.name, ""])
            streamed[2][call.index][1] += call.function.arguments
        reason = news.finish_reason or reason
    content = choice.message.content or ""
    assert (thought, content, reason) == (streamed[0], streamed[1], choice.finish_reason)
    assert calls == [tuple(call) for call in streamed[2]]
    return thought, content, calls, reason, counted


def fits(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"name", "size"}
    assert found["name"] in ("ring", "list") and found["size"] <= 9


def test_a_form_behind_a_bounded_thought(client: OpenAI) -> None:
    thought, content, calls, reason, counted = told(
        client, response_format=FORMAT, extra_body=BUDGET
    )
    assert thought and 8 <= counted <= 8 + len("</think>")
    assert (calls, reason) == ([], "stop")
    fits(content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "make"}}])
def test_a_call_behind_a_bounded_thought(client: OpenAI, choice: Any) -> None:
    options = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    thought, content, calls, reason, counted = told(client, **options, extra_body=BUDGET)
    assert thought and counted >= 8 and content == ""
    ((name, arguments),) = calls
    assert (name, reason) == ("make", "tool_calls")
    fits(arguments)


def test_an_answer_behind_a_bounded_thought(client: OpenAI) -> None:
    thought, content, _, _, counted = told(client, extra_body=BUDGET)
    assert thought and content and counted >= 8


def test_a_thought_that_does_not_end(client: OpenAI) -> None:
    whole = client.chat.completions.create(**{**ASKED, "max_tokens": 5})
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and choice.message.content is None
    assert getattr(choice.message, "reasoning_content", "")


OFF: list[dict[str, Any]] = [
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning": {"enabled": False}},
    {"thinking": {"type": "disabled"}},
]


@pytest.mark.parametrize("off", OFF, ids=str)
def test_without_a_thought(client: OpenAI, off: dict[str, Any]) -> None:
    thought, content, _, _, counted = told(client, response_format=FORMAT, extra_body=off)
    assert not thought and counted == 0
    fits(content)


def test_a_bounded_thought_that_is_left_out(client: OpenAI) -> None:
    """As OpenRouter's clients ask."""
    asks = {"reasoning": {"max_tokens": 8, "exclude": True}}
    thought, content, _, _, counted = told(client, response_format=FORMAT, extra_body=asks)
    assert not thought and 8 <= counted <= 8 + len("</think>")
    fits(content)


def test_the_marks_are_told(thinking: ServerProcess) -> None:
    told = httpx.get(f"{thinking.url}/info", timeout=30).json()["reasoning"]
    assert told == {"start": "<think>", "end": "</think>", "source": "--reasoning"}
    assert "thoughts stand between '<think>' and '</think>' (--reasoning)" in thinking.output


def test_a_default_of_the_server() -> None:
    with serving(*FLAGS, "--default-chat-template-kwargs", '{"enable_thinking": false}') as server:
        for more, place in (({}, "</think>"), ({"enable_thinking": True}, "<think>\n")):
            body = {"messages": QUESTION, "chat_template_kwargs": more}
            answer = httpx.post(f"{server.url}/chat_tokenize", json=body, timeout=30)
            assert answer.json()["templated_text"].endswith(place)


def test_a_flag_that_says_nothing() -> None:
    with pytest.raises(AssertionError, match="--reasoning: expected auto, none, or two marks"):
        with serving("--reasoning", "<think>"):
            pass
