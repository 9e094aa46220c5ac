"""OpenAI's Responses: what comes in, and what becomes of it."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest

from tests.router.http.dialects.conversations import CITY, engine, post, prompt
from tests.router.http.dialects.responses_answers import (
    BODY,
    CLOCK,
    FILES,
    HOSTED,
    PATH,
    TOOLS,
    asked,
    error,
    events,
    final,
    prompt_of,
    reply,
)
from tests.router.http.served import served
from tests.router.http.thinking import let_think
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text, "annotations": []} for text in texts]
    return {"type": "message", "role": role, "content": parts, "id": "msg_x"}


async def test_texts_and_messages():
    assert await prompt_of() == "<user>Rain?<end><assistant>"
    assert await prompt_of(input=[{"role": "user", "content": "Rain?"}]) == await prompt_of()
    items = [said("developer", "a", "b"), said("developer", "c"), said("user", "d")]
    expected = "<system>i\n\na\n\nb\n\nc<end><user>d<end><assistant>"
    assert await prompt_of(instructions="i", input=items) == expected
    answered = [said("user", "a"), said("assistant", "b")]
    assert await prompt_of(input=answered) == "<user>a<end><assistant>b<end><assistant>"


async def test_a_whole_round_of_tools():
    items = [
        said("user", "Rain?"),
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "S"}],
            "content": [{"type": "reasoning_text", "text": "Look."}],
        },
        said("assistant", "I look."),
        {
            "type": "function_call",
            "call_id": "call_abc",
            "name": "weather",
            "arguments": '{"city":"Rome"}',
            "status": "completed",
        },
        {
            "type": "function_call",
            "call_id": "x",
            "namespace": "mcp",
            "name": "now",
            "arguments": "",
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "call_abc", "output": "Rain"},
        {
            "type": "function_call_output",
            "call_id": "x",
            "output": [
                {"type": "input_text", "text": "noon"},
                {"type": "input_image", "image_url": "data:"},
            ],
        },
    ]
    calls = (
        'abc{"name": "weather", "arguments": {"city": "Rome"}}x{"name": "mcp.now", "arguments": {}}'
    )
    assert await prompt_of(input=items) == (
        f"<user>Rain?<end><assistant>Look.I look.{calls}<end>"
        "<tool>Rainabcweather<end>"
        "<tool>noon\n[An image was here; results are read as text.]xmcp.now<end><assistant>"
    )


async def test_calls_of_other_kinds():
    items = [
        said("user", "Go."),
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+ x"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        {
            "type": "local_shell_call",
            "call_id": "b",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "call_id": "b", "output": {"content": "files"}},
    ]
    assert await prompt_of(input=items) == (
        '<user>Go.<end><assistant>a{"name": "patch", "arguments": {"input": "+ x"}}<end>'
        "<tool>doneapatch<end>"
        '<assistant>b{"name": "local_shell", "arguments": {"command": ["ls"]}}<end>'
        "<tool>filesblocal_shell<end><assistant>"
    )


async def test_calls_of_tools_that_openai_defines_and_clients_run():
    ran = {"stdout": "a.py\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
    late = {"stdout": "", "stderr": "so", "outcome": {"type": "timeout"}}
    change = {"type": "delete_file", "path": "a.py"}
    items = [
        said("user", "Go."),
        {"type": "shell_call", "call_id": "a", "action": {"commands": ["ls", "make"]}},
        {"type": "shell_call_output", "call_id": "a", "output": [ran, late]},
        {"type": "apply_patch_call", "call_id": "b", "operation": change, "status": "completed"},
        {"type": "apply_patch_call_output", "call_id": "b", "status": "failed"},
    ]
    told = json.dumps({"name": "apply_patch", "arguments": change})
    assert await prompt_of(input=items) == (
        '<user>Go.<end><assistant>a{"name": "shell", "arguments": {"commands": ["ls", '
        '"make"]}}<end>'
        "<tool>a.py\n\n[exit code 0]\nso\n[timeout]ashell<end>"
        f"<assistant>b{told}<end><tool>failedbapply_patch<end><assistant>"
    )
    items[-1]["output"] = "No such file."
    assert "<tool>No such file.bapply_patch<end>" in await prompt_of(input=items)


async def test_a_shell_of_a_container_is_none_of_clients():
    hosted = {"type": "shell", "environment": {"type": "container_auto"}}
    one = engine("Prose.")
    answer = await asked(one, tools=[CLOCK, hosted], tool_choice={"type": "shell"})
    assert prompt(one, answer) == await prompt_of(tools=[CLOCK])
    one = engine("Prose.")
    allowed = [{"type": "shell"}, {"type": "function", "name": "clock"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    prompt(one, await asked(one, tools=[CLOCK, hosted], tool_choice=choice))
    assert "clock" in one.submitted[0].sampling.grammar


async def test_a_patch_fits_one_of_its_operations():
    one = engine("Prose.")
    prompt(one, await asked(one, tools=[FILES], tool_choice="required"))
    grammar = one.submitted[0].sampling.grammar
    assert all(each in grammar for each in ("create_file", "update_file", "delete_file"))
    assert "anyOf" in grammar


async def test_arguments_that_nest_without_end_are_shown_as_they_came():
    deep = '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"  # Python 3.13 reads 2000 levels
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": deep}
    shown = f"<assistant>a{json.dumps({'name': 'f', 'arguments': deep})}<end>"
    one = engine(limits=ServedLimits(max_input_tokens=150_000, max_total_tokens=160_000))
    answer = await asked(one, input=[said("user", "Go."), call], max_output_tokens=...)
    assert shown in prompt(one, answer)


async def test_clients_carry_thoughts(monkeypatch):
    let_think(monkeypatch)
    include = ["reasoning.encrypted_content"]
    one = engine("<think>Hm, é.</think>Yes.")
    async with served(one) as server:
        client = await server.connect()
        body = reply(await client.post(PATH, {**BODY, "include": include}))
        stream = await client.post(PATH, {**BODY, "include": include, "stream": True})
    thought, text = body.output
    assert isinstance(thought, replies.ReasoningItem)
    assert thought.encrypted_content == final(events(stream)).output[0].encrypted_content  # type: ignore[union-attr]
    sent: dict[str, Any] = {"type": "reasoning", "summary": []}
    sent["encrypted_content"] = thought.encrypted_content
    items = [said("user", "Rain?"), sent, msgspec.to_builtins(text), said("user", "So?")]
    assert "<assistant>Hm, é.Yes.<end>" in await prompt_of(input=items)
    not_utf8 = "tgi-trio:" + base64.b64encode(b"\xff").decode()
    for foreign in ("gAAAAabc", "tgi-trio:!", "tgi-trio:é", not_utf8):
        sent["encrypted_content"] = foreign
        assert "<assistant>Yes.<end>" in await prompt_of(input=items)
    not_asked = reply(await asked(engine("<think>Hm</think>Yes."))).output[0]
    assert not_asked.encrypted_content is msgspec.UNSET  # type: ignore[union-attr]


async def test_tools_as_templates_see_them():
    prompt = await prompt_of(tools=TOOLS)
    shown = json.loads(prompt[: prompt.index("<user>")])
    names = [tool["function"]["name"] for tool in shown]
    assert names == ["weather", "clock", "patch", "mcp.now", "local_shell", "shell", "apply_patch"]
    weather = {"name": "weather", "description": "Of a city", "parameters": CITY}
    assert shown[0] == {"type": "function", "function": weather}
    assert shown[2]["function"]["parameters"]["required"] == ["input"]
    assert "weather" not in await prompt_of(tools=TOOLS, tool_choice="none")
    assert await prompt_of(tools=[HOSTED]) == await prompt_of()


ALLOWED = [{"type": "function", "name": "clock"}, {"type": "web_search"}]


@pytest.mark.parametrize(
    ("choice", "required", "names"),
    [
        ("auto", False, {"weather", "clock"}),
        ("required", True, {"weather", "clock"}),
        ({"type": "function", "name": "clock"}, True, {"clock"}),
        ({"type": "custom", "name": "patch"}, True, {"patch"}),
        ({"type": "local_shell"}, True, {"local_shell"}),
        ({"type": "shell"}, True, {"shell"}),
        ({"type": "apply_patch"}, True, {"apply_patch"}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "shell"}, *ALLOWED]},
            False,
            {"shell", "clock"},
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": ALLOWED}, False, {"clock"}),
        ({"type": "allowed_tools", "mode": "required", "tools": ALLOWED}, True, {"clock"}),
        ({"type": "web_search"}, False, {"weather", "clock"}),
    ],
)
async def test_the_choice_of_a_tool(choice, required, names):
    one = engine("Prose.")
    shown = prompt(one, await asked(one, tools=TOOLS, tool_choice=choice))
    assert shown == await prompt_of(tools=TOOLS)  # it is found cached
    grammar = one.submitted[0].sampling.grammar
    every = ("weather", "clock", "patch", "local_shell", "shell", "apply_patch")
    found = {name for name in every if f'"{name}' in grammar or f'\\"{name}' in grammar}
    assert (found & names == names) and (len(names) == 2 or found == names)
    assert ("TEXT" not in grammar) == required


async def test_one_call_at_a_time():
    one = engine(HERMES.write([("clock", {})]))
    told = await asked(
        one, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True
    )
    (item,) = final(events(told)).output
    assert isinstance(item, replies.FunctionCallItem)
    assert "next call" not in one.submitted[0].sampling.grammar


async def test_the_form_of_an_answer():
    schema = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    one = engine()
    found = (await asked(one, text={"format": schema})).json()
    assert '"city"' in one.submitted[0].sampling.grammar
    assert found["text"]["format"] == schema
    loose = engine()
    assert (await asked(loose, text={"format": {"type": "json_object"}})).status == 200
    assert loose.submitted[0].sampling.grammar


async def test_the_form_of_an_answer_that_may_call_none_of_its_tools():
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    schema = {"type": "json_schema", "name": "city", "schema": CITY}
    one = engine('{"city":"Rome"}')
    shown = prompt(one, await asked(one, tools=TOOLS, tool_choice=choice, text={"format": schema}))
    assert shown == await prompt_of(tools=TOOLS)  # it is found cached
    grammar = one.submitted[0].sampling.grammar
    assert '"city"' in grammar and "clock" not in grammar and "TEXT" not in grammar


@pytest.mark.parametrize(
    ("effort", "shown"), [("high", "True high"), ("none", "False none"), (None, "None None")]
)
async def test_the_effort(effort, shown):
    enable, read = (
        "{{ enable_thinking | default('None') }}",
        "{{ reasoning_effort | default('None') }}",
    )
    first, second = shown.split()
    one = engine(template=enable)
    assert (await asked(one, reasoning={"effort": effort})).status == 200
    assert one.tokenizer.decode(one.submitted[0].prompt_ids) == first
    two = engine(template=read)
    assert (await asked(two, reasoning={"effort": effort})).status == 200
    assert two.tokenizer.decode(two.submitted[0].prompt_ids) == second


async def test_what_agents_send_beside_is_ignored():
    more = {
        "include": ["message.output_text.logprobs", "file_search_call.results"],
        "client_metadata": {"x": "y"},
        "max_tool_calls": 3,
        "stream_options": {"include_obfuscation": False},
        "context_management": [],
        "store": False,
        "background": False,
        "prompt_cache_retention": "24h",
        "anything": [1],
    }
    assert await prompt_of(**more) == await prompt_of()


async def test_how_tokens_are_drawn():
    one = engine("Yes. No.")
    more = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": " No"}
    (item,) = reply(await asked(one, **more)).output
    assert isinstance(item, replies.MessageItem) and item.content[0].text == "Yes."
    drawn = one.submitted[0].sampling
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.seed) == (0.5, 0.9, 7, 3)


@pytest.mark.parametrize(
    "more",
    [{}, {"instructions": "Be brief."}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}],
)
async def test_the_count_is_that_of_the_usage(more):
    usage = reply(await asked(engine(), **more)).usage
    assert usage is not None
    one = engine()
    count = await post(one, None, f"{PATH}/input_tokens", BODY, more)
    assert count.json() == {"object": "response.input_tokens", "input_tokens": usage.input_tokens}
    assert one.submitted == [] and one.permits == 0


@pytest.mark.parametrize("wrong", [{"prompt": {"id": "p"}}, {"input": []}, {"model": "other"}])
async def test_what_cannot_be_answered_cannot_be_counted(wrong):
    told = error(await post(engine(), None, f"{PATH}/input_tokens", BODY, wrong))
    assert told == error(await asked(engine(), **wrong))
