"""`reasoning_effort`: a variable of the chat template, refused where the template reads none."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from openai.types.shared import ReasoningEffort

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import Answer, served
from tgi_trio.router.http.messages.shared_fields import Effort
from tgi_trio.router.text.chat_template import ChatTemplate

pytestmark = pytest.mark.trio

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
# As gpt-oss writes it: set inside a macro where the client says nothing.
READS = """
{%- macro system() -%}
    {%- if reasoning_effort is not defined %}
        {%- set reasoning_effort = "medium" %}
    {%- endif %}
    {{- "Reasoning: " ~ reasoning_effort }}
{%- endmacro %}
{{- system() }}|{{ messages[0].content }}"""
IGNORES = "{{ messages[0].content }}"


async def ask(path: str, templates: dict[str, str], **more: Any) -> Answer:
    engine = FakeEngine(lambda prompt: prompt)
    engine.chat_template = ChatTemplate(templates, {})
    async with served(engine) as server:
        client = await server.connect()
        return await client.post(path, {**CHAT, **more})


async def prompt(templates: dict[str, str], **more: Any) -> str:
    answer = await ask("/chat_tokenize", templates, **more)
    assert answer.status == 200, answer.body
    return str(answer.json()["templated_text"])


async def test_a_template_that_reads_it_gets_it():
    templates = {"default": READS}
    assert await prompt(templates, reasoning_effort="high") == "Reasoning: high|x"
    assert await prompt(templates, reasoning_effort=None) == "Reasoning: medium|x"
    assert await prompt(templates) == "Reasoning: medium|x"
    also = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert await prompt(templates, **also) == "Reasoning: low|x"
    answer = await ask("/v1/chat/completions", templates, reasoning_effort="high")
    assert answer.json()["choices"][0]["message"]["content"] == "Reasoning: high|x"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat_tokenize", "/tokenize"])
async def test_one_that_does_not_refuses_it(path):
    answer = await ask(path, {"default": IGNORES}, reasoning_effort="high")
    assert answer.status == 422
    assert b"`reasoning_effort` is not supported: the chat template of this model" in answer.body
    assert (await ask(path, {"default": IGNORES}, reasoning_effort=None)).status == 200


async def test_the_template_that_is_used_decides():
    templates = {"default": READS, "tool_use": IGNORES}
    asked = {"reasoning_effort": "high", "tools": [TOOL]}
    # A template for tools that shows none is not the one that is used.
    assert (await prompt(templates, **asked)).startswith("Reasoning: high|x")
    templates["tool_use"] = IGNORES + "{{ tools | length }}"
    assert (await ask("/chat_tokenize", templates, **asked)).status == 422


async def test_two_ways_to_say_it_are_one_too_many():
    more = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}
    answer = await ask("/chat_tokenize", {"default": READS}, **more)
    assert answer.status == 422
    assert b"chat_template_kwargs: `reasoning_effort` has a field of its own" in answer.body


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "reasoning_effort": "warp"}, 422, "reasoning_effort"),
        (
            "/v1/responses",
            {"input": "x", "reasoning": {"effort": "warp"}},
            400,
            "reasoning.effort",
        ),
        (
            "/v1/messages",
            {**CHAT, "model": "tgi", "max_tokens": 1, "output_config": {"effort": "warp"}},
            400,
            "output_config.effort",
        ),
    ],
)
async def test_words_that_no_api_knows_are_refused(path, body, status, field):
    engine = FakeEngine(lambda prompt: prompt)
    engine.chat_template = ChatTemplate({"default": READS}, {})
    async with served(engine) as server:
        client = await server.connect()
        answer = await client.post(path, body)
    words = ", ".join(f"`{each}`" for each in sorted(get_args(Effort)))
    assert answer.status == status
    assert f"{field}: Invalid enum value 'warp', expected one of {words}" in answer.text


async def test_every_word_of_openais_sdk_is_known():
    words = {word for each in get_args(ReasoningEffort) for word in get_args(each)}
    assert words == set(get_args(Effort))


async def test_a_completion_has_no_template():
    async with served() as server:
        client = await server.connect()
        body = {"prompt": "x", "reasoning_effort": "high"}
        answer = await client.post("/v1/completions", body)
        assert answer.status == 422
        assert b"`reasoning_effort` is not supported: it is for chat templates" in answer.body
        assert (await client.post("/v1/completions", {"prompt": "x"})).status == 200
