"""A chat as OpenAI's clients send it gets the prompt that transformers makes of the same chat."""

from __future__ import annotations

import json
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.http.fake_engine import byte_tokenizer
from tests.router.text.test_chat_template import SPECIAL, TOOL, theirs
from tgi_trio.router.http.call import SYSTEM_RANDOM
from tgi_trio.router.http.conversation import choose_tools
from tgi_trio.router.http.dialects.chat import to_conversation
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.rendering import render_with_tools
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.text_processor import TextProcessor

TEMPLATE = """
{%- if tools %}{{ tools | tojson(indent=2) }}
{% endif %}
{%- for message in messages %}
    {{- '<' ~ message.role ~ '>' }}
    {%- if message.reasoning_content %}{{ '(' ~ message.reasoning_content ~ ')' }}{% endif %}
    {%- if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '[' ~ call.id ~ call.function.name ~ call.function.arguments | tojson ~ ']' }}
    {%- endfor %}
    {%- if message.tool_call_id is defined %}{{ '#' ~ message.tool_call_id }}{% endif %}
    {%- if message.name is defined %}{{ '@' ~ message.name }}{% endif %}
    {{- '<end>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""

WORDS = st.text(alphabet="ab é<'&\n", min_size=1, max_size=8)
VALUES = st.one_of(st.integers(-9, 9), WORDS, st.none(), st.lists(st.booleans(), max_size=2))
CALL = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["c1", "123456789"]),
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.just("f"), "arguments": st.dictionaries(WORDS, VALUES, max_size=2)}
        ),
    }
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": WORDS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": WORDS}, optional={"reasoning_content": WORDS}
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "tool_calls": st.lists(CALL, min_size=1, max_size=2)},
        optional={"content": WORDS},
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": WORDS, "tool_call_id": st.just("c1")},
        optional={"name": st.just("f")},
    ),
)
TURNED = {"function": dict(reversed(TOOL["function"].items())), "type": "function"}  # type: ignore[attr-defined]
TOOLS = st.sampled_from([None, [TOOL], [TURNED | {"extra": [1]}]])


def as_sent(message: dict[str, Any], in_parts: bool) -> dict[str, Any]:
    """Return a message as OpenAI has it: arguments are text, contents may come in parts."""
    sent = dict(message)
    if "tool_calls" in message:
        sent["tool_calls"] = [
            {
                **call,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in message["tool_calls"]
        ]
        sent.setdefault("content", None)
    elif in_parts:
        text = message["content"]
        sent["content"] = [{"type": "text", "text": part} for part in (text[:1], text[1:])]
    return sent


def with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which those of the system that come first are one."""
    first = list(takewhile(lambda message: message["role"] == "system", messages))
    joined = "\n\n".join(message["content"] for message in first)
    return [{"role": "system", "content": joined}] * bool(first) + messages[len(first) :]


def prompt_of(template: str = TEMPLATE, /, **body: Any) -> str:
    call: Any = SimpleNamespace(
        ids=SYSTEM_RANDOM,
        text_processor=TextProcessor(TOKENIZER, ChatTemplate({"default": template}, SPECIAL)),
        engine=SimpleNamespace(limits=ServedLimits()),
    )
    request = msgspec.convert(body, schema.ChatRequest)
    conversation = to_conversation(call, request)
    prompt = render_with_tools(call, conversation, choose_tools(call, conversation))
    assert isinstance(prompt, str)
    return prompt


TOKENIZER = byte_tokenizer()


@settings(max_examples=60)
@given(
    messages=st.lists(MESSAGE, min_size=1, max_size=4),
    tools=TOOLS,
    in_parts=st.booleans(),
    prompt=st.booleans(),
)
def test_the_prompt_is_that_of_transformers(
    messages: list[dict[str, Any]], tools: list[Any] | None, in_parts: bool, prompt: bool
) -> None:
    ours = prompt_of(
        messages=[as_sent(message, in_parts) for message in messages],
        tools=tools,
        add_generation_prompt=prompt,
        continue_final_message=False,
    )
    expected = with_one_system(messages)
    assert ours == theirs(TEMPLATE, expected, tools=tools, add_generation_prompt=prompt)


@pytest.mark.parametrize("flag", [None, True])
@given(history=st.lists(MESSAGE, max_size=2), last=st.text(alphabet="abc ", min_size=1))
@settings(max_examples=20)
def test_a_final_message_of_the_assistant_is_continued(
    flag: bool | None, history: list[dict[str, Any]], last: str
) -> None:
    messages = [*history, {"role": "assistant", "content": last}]
    ours = prompt_of(
        messages=[as_sent(message, False) for message in messages], continue_final_message=flag
    )
    arranged = with_one_system(messages)
    expected = theirs(TEMPLATE, arranged, continue_final_message=True, add_generation_prompt=False)
    assert ours == expected


def test_messages_of_developers_and_late_ones_of_the_system() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "It is late."},
    ]
    start = "<system>Be brief.\n\nBe kind.<end><user>Hi"
    assert prompt_of(messages=messages) == start + "<end><system>It is late.<end><assistant>"
    refusing = TEMPLATE.replace(
        "{{- '<' ~",
        "{%- if not loop.first and message.role == 'system' %}{{ 1 / 0 }}{% endif %}{{- '<' ~",
    )
    assert prompt_of(refusing, messages=messages) == start + "\n\nIt is late.<end><assistant>"
