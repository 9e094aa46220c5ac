"""Anthropic's Messages: what comes in, and what becomes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.http.dialects.anthropic_answers import (
    ASKED,
    BODY,
    COUNT,
    PATH,
    TOOLS,
    asked,
    prompt_of,
    reply,
)
from tests.router.http.dialects.conversations import CITY, engine
from tests.router.http.served import served
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};"


async def test_the_system_as_text_and_as_blocks():
    plain = await prompt_of(system="Be brief.")
    assert plain == "<system>Be brief.<end><user>Rain?<end><assistant>"
    assert await prompt_of(system=[text("Be brief.", cache_control={"type": "ephemeral"})]) == plain
    for nonce in ("ab", "cd"):
        assert await prompt_of(system=[text(BILLING.format(nonce)), text("Be brief.")]) == plain
    assert await prompt_of(system=BILLING.format("x")) == await prompt_of()
    assert "<system>Be brief.\n\nBe kind.<end>" in await prompt_of(
        system=[text("Be brief."), text("Be kind.")]
    )


async def test_messages_of_the_system_in_the_middle():
    late = [*ASKED, {"role": "system", "content": [text("It is late.")]}]
    assert await prompt_of(messages=late) == "<user>Rain?<end><system>It is late.<end><assistant>"


async def test_a_whole_round_of_tools():
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "xyz"},
                text("I look."),
                {
                    "type": "tool_use",
                    "id": "toolu_abc",
                    "name": "weather",
                    "input": {"city": "Rome"},
                },
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                text("And?"),
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_abc",
                    "content": [text("Rain"), {"type": "image", "source": {}}, text("today")],
                    "cache_control": {"type": "ephemeral"},
                },
            ],
        },
    ]
    prompt = await prompt_of(messages=messages)
    call = 'abc{"name": "weather", "arguments": {"city": "Rome"}}'
    assert prompt == (
        f"<user>Rain?<end><assistant>Look.I look.{call}<end>"
        "<tool>Rain\n[An image was here; results are read as text.]\ntodayabcweather<end>"
        "<user>And?<end><assistant>"
    )


@pytest.mark.parametrize(
    ("content", "failed", "shown"),
    [
        (None, False, ""),
        ("42", None, "42"),
        ("no such file", True, "Error: no such file"),
        ("Error: no such file", True, "Error: no such file"),
        ([{"type": "tool_reference", "tool_name": "x"}], False, "[tool_reference]"),
        ([{"type": "document", "source": {"type": "text", "data": "D"}}], False, "D"),
    ],
)
async def test_results_of_tools(content, failed, shown):
    result = {"type": "tool_result", "tool_use_id": "x", "content": content, "is_error": failed}
    prompt = await prompt_of(messages=[*ASKED, {"role": "user", "content": [result]}])
    assert prompt == f"<user>Rain?<end><tool>{shown}x<end><assistant>"


async def test_tools_as_templates_see_them():
    tools = [
        *TOOLS,
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "custom", "name": "plain", "defer_loading": True, "input_examples": []},
    ]
    prompt = await prompt_of(tools=tools)
    weather = {"name": "weather", "description": "Of a city", "parameters": CITY}
    shown = json.loads(prompt[: prompt.index("<user>")])
    assert [tool["function"]["name"] for tool in shown] == ["weather", "clock", "plain"]
    assert shown[0] == {"type": "function", "function": weather}
    assert "weather" not in await prompt_of(tools=tools, tool_choice={"type": "none"})


@pytest.mark.parametrize(
    ("choice", "required", "names"),
    [
        (None, False, {"weather", "clock"}),
        ({"type": "auto"}, False, {"weather", "clock"}),
        ({"type": "any"}, True, {"weather", "clock"}),
        ({"type": "tool", "name": "clock"}, True, {"clock"}),
        ({"type": "any", "disable_parallel_tool_use": True}, True, {"weather", "clock"}),
    ],
)
async def test_the_choice_of_a_tool(choice, required, names):
    one = engine("Prose. " + HERMES.write([("clock", {})]))
    message = reply(await asked(one, tools=TOOLS, tool_choice=choice))
    grammar = one.submitted[0].sampling.grammar
    assert {name for name in ("weather", "clock") if name in grammar} == names
    assert ("TEXT" not in grammar) == required
    assert len(message.content) == (1 if required else 2), "prose is none of a demanded call"
    several = "next call" in grammar
    assert several == (choice is None or (choice["type"] != "tool" and len(choice) == 1))


async def test_the_form_of_an_answer():
    for field in (
        {"output_config": {"format": {"type": "json_schema", "schema": CITY}}},
        {"output_format": {"type": "json_schema", "schema": CITY}},
    ):
        one = engine()
        assert (await asked(one, **field)).status == 200
        assert '"city"' in one.submitted[0].sampling.grammar


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "None None None"),
        ({"thinking": {"type": "disabled"}}, "False False None"),
        ({"thinking": {"type": "between_tools"}}, "False False None"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "True True None"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 0}}, "True True None"),
        ({"output_config": {"effort": "high"}}, "None None high"),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
            "True True low",
        ),
        ({"chat_template_kwargs": {"thinking": False}}, "None False None"),
    ],
)
async def test_how_the_model_is_to_think(fields, shown):
    one = engine(template="{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}")
    one.chat_template = ChatTemplate(
        {
            "default": "{{ enable_thinking | default('None') }} {{ thinking | default('None') }}"
            " {{ reasoning_effort | default('None') }}"
        },
        {},
    )
    assert (await asked(one, **fields)).status == 200
    assert one.tokenizer.decode(one.submitted[0].prompt_ids) == shown


@pytest.mark.parametrize(("effort", "shown"), [("high", "True"), ("none", "False")])
async def test_an_effort_that_a_template_does_not_read(effort, shown):
    one = engine(template="{{ enable_thinking | default('None') }}")
    assert (await asked(one, output_config={"effort": effort})).status == 200
    assert one.tokenizer.decode(one.submitted[0].prompt_ids) == shown


async def test_a_final_answer_is_continued():
    messages = [*ASKED, {"role": "assistant", "content": "It"}]
    assert await prompt_of(messages=messages) == "<user>Rain?<end><assistant>It"


async def test_what_agents_send_beside_is_ignored():
    more = {
        "metadata": {"user_id": "x"},
        "context_management": {"edits": []},
        "service_tier": "auto",
        "container": None,
        "mcp_servers": [],
        "betas": ["x"],
        "diagnostics": {"anything": [1]},
    }
    assert await prompt_of(**more) == await prompt_of()
    ctx = [{"role": "ctx", "content": "a"}, {"role": "msg", "content": "b"}]
    assert await prompt_of(messages=ctx) == "<user>a<end><user>b<end><assistant>"


async def test_beta_headers_and_queries_are_ignored(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        answer = await client.post(
            PATH + "?beta=true",
            BODY,
            anthropic_beta="a-2026-01-01,b",
            anthropic_version="2023-06-01",
        )
        count = await client.post(COUNT + "?beta=true", BODY)
        head = await client.ask("HEAD", "/")
    assert (answer.status, count.status, head.status) == (200, 200, 200)
    assert head.body == b""


async def test_how_tokens_are_drawn():
    one = engine()
    assert (await asked(one, temperature=0.5, top_p=0.9, top_k=7, seed=3)).status == 200
    drawn = one.submitted[0].sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed) == (0.5, 0.9, 7, 3)
    assert drawn.sample
    greedy = engine()
    assert (await asked(greedy, temperature=0, top_p=0.9)).status == 200
    assert not greedy.submitted[0].sampling.sample


# ---- counting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"system": "Be brief."},
        {"tools": TOOLS},
        {"tools": TOOLS, "system": [text("Be brief.")], "thinking": {"type": "adaptive"}},
    ],
)
async def test_the_count_is_that_of_the_usage(more):
    usage = reply(await asked(engine(), **more)).usage
    count = (await asked(engine(), path=COUNT, max_tokens=..., **more)).json()
    assert count == {"input_tokens": usage.input_tokens}
    assert usage.input_tokens >= len("<user>Rain?<end><assistant>") + (9 if more else 0)
