"""Messages of earlier turns in the forms that OpenAI's API has for them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.http.served import served
from tests.router.http.thinking_answers import engine
from tests.router.text.role_templates import TEMPLATES

pytestmark = pytest.mark.trio

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
USER = {"role": "user", "content": "Rain?"}


async def tokenized(message: dict[str, Any]) -> tuple[int, str]:
    """Return the status, and the prompt of a chat with `message` in it, or an error."""
    async with served(engine("", TEMPLATE)) as server:
        client = await server.connect()
        answer = await client.post("/chat_tokenize", {"messages": [USER, message, USER]})
    return answer.status, answer.json()["templated_text"] if answer.status == 200 else answer.text


@pytest.mark.parametrize(
    "fields",
    [
        {"content": None, "refusal": "I will not."},
        {"refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
        {"content": [{"type": "text", "text": "I will "}, {"type": "refusal", "refusal": "not."}]},
        {"content": "I will not.", "refusal": None},
    ],
)
async def test_a_refusal_is_what_the_model_said(fields):
    found = await tokenized({"role": "assistant", **fields})
    assert found == (200, "[user]Rain?[assistant]I will not.[user]Rain?")


@pytest.mark.parametrize("content", [None, "I look."])
async def test_calls_of_the_old_form_are_refused_by_name(content):
    call = {"name": "weather", "arguments": "{}"}
    status, told = await tokenized({"role": "assistant", "content": content, "function_call": call})
    assert status == 422 and "messages[1].function_call: not read: use `tool_calls`" in told


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Calls are text there, and so are results.
        (
            "parity",
            '<user>Rain?<end><assistant>Well.\n\n<tool_call>\n{"name": "look", "arguments": {}}\n'
            "</tool_call>\n\nStopped.<end><user><tool_response>\nWet.\n</tool_response>\n\nRain?"
            "<end><assistant>",
        ),
        (
            "alternating",
            '<user>Rain?<end><assistant>Well.<call>{"name": "look", "arguments": {}}</call><end>'
            "<assistant>Stopped.<end><tool>Wet.\n\nRain?<end>",
        ),
    ],
)
async def test_what_an_interrupt_leaves_is_written_where_roles_must_alternate(name, expected):
    call = {"id": "123456789", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    past = [
        {"role": "assistant", "content": "Well."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": "Stopped."},
        {"role": "tool", "tool_call_id": "123456789", "content": "Wet."},
    ]
    async with served(engine("", TEMPLATES[name])) as server:
        client = await server.connect()
        answer = await client.post("/chat_tokenize", {"messages": [USER, *past, USER]})
    assert (answer.status, answer.json()["templated_text"]) == (200, expected)


@pytest.mark.parametrize("part", [{"type": "refusal"}, {"type": "refusal", "text": "No."}])
async def test_a_part_without_its_refusal_is_refused(part):
    status, told = await tokenized({"role": "assistant", "content": [part]})
    assert status == 422 and "parts of type `refusal` are not read" in told
