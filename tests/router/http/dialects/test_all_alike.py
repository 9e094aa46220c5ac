"""One conversation by each of the three APIs: the same prompt, answer, end and usage."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from tests.router.http.fake_engine import FakeEngine, byte_tokenizer
from tests.router.http.served import Client, served
from tests.router.text.families import BY_NAME, template_of
from tgi_trio.router.text.tools.probe import find_call_style

pytestmark = pytest.mark.trio

NAMES = sorted(BY_NAME)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
ARGUMENTS: dict[str, Any] = {"city": "Zürich", "days": 2}
GIVEN = json.dumps(ARGUMENTS, ensure_ascii=False)
THOUGHT, LOOK, RESULT = "A thought.", "I look.", "sun"


class Answer(NamedTuple):
    """What a client makes of an answer, whatever the API."""

    thought: str
    text: str
    calls: list[tuple[str, Any]]
    end: str
    usage: tuple[int, int, int, int]  # prompt, of it cached, answer, of it thoughts


def engine(name: str, answer: str) -> FakeEngine:
    family = BY_NAME[name]
    found = FakeEngine(lambda prompt: answer, tokenizer=byte_tokenizer(family.added))
    found.chat_template = template_of(name)
    found.cached = {0: 7, 1: 7, 2: 7}
    return found


# The conversation as each API has it, but for the length of its answer; ids differ in prefixes.
FUNCTION = {"name": "weather", "description": "Of a city", "parameters": CITY}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": LOOK,
            "reasoning_content": THOUGHT,
            "tool_calls": [
                {
                    "id": "abcdefgh1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": GIVEN},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": RESULT},
        {"role": "user", "content": "And then?"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
RESPONSES: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": "Rain?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": THOUGHT}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": LOOK}]},
        {
            "type": "function_call",
            "call_id": "call_abcdefgh1",
            "name": "weather",
            "arguments": GIVEN,
        },
        {"type": "function_call_output", "call_id": "call_abcdefgh1", "output": RESULT},
        {"role": "user", "content": "And then?"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
}
MESSAGES: dict[str, Any] = {
    "model": "tgi",
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": THOUGHT, "signature": "x"},
                {"type": "text", "text": LOOK},
                {
                    "type": "tool_use",
                    "id": "toolu_abcdefgh1",
                    "name": "weather",
                    "input": ARGUMENTS,
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_abcdefgh1", "content": RESULT},
                {"type": "text", "text": "And then?"},
            ],
        },
    ],
    "tools": [{**FUNCTION, "input_schema": CITY}],
}


def bodies(most: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the conversation as each API has it, with its path."""
    return [
        ("/v1/chat/completions", CHAT | {"max_tokens": most}),
        ("/v1/responses", RESPONSES | {"max_output_tokens": most}),
        ("/v1/messages", MESSAGES | {"max_tokens": most}),
    ]


def read_arguments(text: str) -> Any:
    """Return arguments; of a call that was cut off none, as Anthropic's bodies have it."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def of_chat(found: Any) -> Answer:
    (choice,), usage = found["choices"], found["usage"]
    message = choice["message"]
    calls = [each["function"] for each in message.get("tool_calls") or []]
    return Answer(
        message.get("reasoning_content") or "",
        message["content"] or "",
        [(each["name"], read_arguments(each["arguments"])) for each in calls],
        choice["finish_reason"],
        (
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0),
        ),
    )


def of_response(found: Any) -> Answer:
    output, usage = found["output"], found["usage"]
    said = {
        kind: [part["text"] for item in output if item["type"] == kind for part in item["content"]]
        for kind in ("reasoning", "message")
    }
    calls = [each for each in output if each["type"] == "function_call"]
    end = "tool_calls" if calls else "stop"
    return Answer(
        "".join(said["reasoning"]),
        "".join(said["message"]),
        [(each["name"], read_arguments(each["arguments"])) for each in calls],
        "length" if found["status"] == "incomplete" else end,
        (
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
            usage["output_tokens_details"]["reasoning_tokens"],
        ),
    )


ENDS = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def of_message(found: Any) -> Answer:
    blocks, usage = found["content"], found["usage"]
    return Answer(
        "".join(each["thinking"] for each in blocks if each["type"] == "thinking"),
        "".join(each["text"] for each in blocks if each["type"] == "text"),
        [(each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"],
        ENDS[found["stop_reason"]],
        (
            usage["input_tokens"] + usage["cache_read_input_tokens"],
            usage["cache_read_input_tokens"],
            usage["output_tokens"],
            usage["output_tokens_details"]["thinking_tokens"],
        ),
    )


READERS = (of_chat, of_response, of_message)


async def answers(client: Client, most: int) -> list[Answer]:
    found = []
    for (path, body), read in zip(bodies(most), READERS, strict=True):
        answer = await client.post(path, body)
        assert answer.status == 200, (path, answer.body)
        found.append(read(json.loads(answer.body)))
    return found


def said(name: str) -> list[str]:
    """Return what a model of a family may write: a thought, words, calls."""
    family = BY_NAME[name]
    form = find_call_style(template_of(name), family.added).format
    begins = family.marks[0] if family.marks and family.default == "may-open" else ""
    thought = f"{begins}Hm.{family.marks[1]}" if family.marks and family.default != "closed" else ""
    calls = form.write([("weather", ARGUMENTS)] * (2 if form.next else 1))
    return ["Dry.", f"{thought}Dry.", f"{thought}{calls}"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
async def test_the_three_apis_say_the_same(name: str) -> None:
    for text in said(name):
        for most in (900, len(text.encode()) // 2):
            one = engine(name, text)
            async with served(one) as server:
                first, *others = await answers(await server.connect(), most)
            assert len(set(one.prompts)) == 1, one.prompts
            assert others == [first] * 2, text
            assert first.usage[1] == 7 and first.usage[0] == len(one.submitted[0].prompt_ids)
            if most == 900 and text == said(name)[-1]:
                assert first.calls and first.calls[0] == ("weather", ARGUMENTS)
                assert first.end == "tool_calls"
