"""Custom tools of chats, and choices of several tools, in OpenAI's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.http.dialects.conversations import CITY, engine, post, prompt
from tests.router.http.test_tools import CHAT, USER, chunks_of, folded, message_of
from tests.router.http.tool_calls import called
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": 'a "b"|[0-9]+'}}
LARK = {
    "type": "grammar",
    "grammar": {"syntax": "lark", "definition": 'start: "move " ("left" | "right")'},
}


def custom(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **more}}


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
PATCH = custom("patch", description="Patches.")
BODY = {"messages": USER, "tools": [WEATHER, CLOCK, PATCH], "max_tokens": 500}
NAMES = ("weather", "clock", "patch")
TEXT = '*** "é"\n\\ 😀'


def named(name: str, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


async def asked(one: Any, http: Any = None, **more: Any) -> Any:
    return await post(one, http, CHAT, BODY, more)


async def refused(**more: Any) -> str:
    one = engine()
    answer = await asked(one, **more)
    assert answer.status == 422 and not one.submitted and not one.permits, answer.body
    text: str = answer.json()["error"]["message"]
    return text


# ---- which of them may be called ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "required", "names"),
    [
        ("auto", False, {*NAMES}),
        (named("patch", "custom"), True, {"patch"}),
        ("patch", True, {"patch"}),
        (allowed("auto", named("clock")), False, {"clock"}),
        (allowed("required", named("clock")), True, {"clock"}),
        (allowed("auto", named("patch", "custom"), named("clock")), False, {"clock", "patch"}),
        (allowed("required", WEATHER, PATCH), True, {"weather", "patch"}),
    ],
)
async def test_the_choice_of_tools(choice, required, names):
    one = engine("Prose.")
    shown = prompt(one, await asked(one, tool_choice=choice))
    listed = json.loads(shown[: shown.index("<user>")])
    # All of them, unless one is named: what the prompt begins with stays, and is found cached.
    alone = choice == "patch" or choice == named("patch", "custom")
    assert {tool["function"]["name"] for tool in listed} == (names if alone else {*NAMES})
    grammar = one.submitted[0].sampling.grammar
    assert {name for name in NAMES if f'"{name}' in grammar or f'\\"{name}' in grammar} == names
    assert ("TEXT" not in grammar) == required


async def test_none_of_the_tools_may_be_called():
    one, free = engine("Prose."), engine("Prose.")
    shown = prompt(one, await asked(one, tool_choice=allowed("auto")))
    assert shown == prompt(free, await asked(free)), "what the prompt begins with stays"
    grammar = one.submitted[0].sampling.grammar
    assert grammar and not any(name in grammar for name in NAMES)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (
            allowed("none", named("clock")),
            "tool_choice.allowed_tools.mode: `none` is none of `auto`, `required`",
        ),
        (allowed(1), "tool_choice.allowed_tools.mode: Expected `str`"),
        (allowed("required"), "Tool error: `tool_choice` is `required`, and there are no tools"),
        (allowed("auto", named("rain")), "Tool error: Tool with name rain not found"),
        (
            allowed("auto", named("clock"), {"type": "mcp", "server_label": "x"}),
            "tool_choice.allowed_tools.tools[1].type: `mcp` is not served, only `function` and",
        ),
        (
            allowed("auto", {"type": "custom", "name": "patch"}),
            "tool_choice.allowed_tools.tools[0]: Object missing required field `custom`",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": []},
            "tool_choice: Object missing required field `allowed_tools`",
        ),
        ({"type": "custom"}, "tool_choice: Object missing required field `custom`"),
        ({"type": "function"}, "tool_choice: Object missing required field `function`"),
        (
            {"type": "web_search"},
            "tool_choice.type: `web_search` is not served, only `function`, `custom` and",
        ),
        (named("rain", "custom"), "Tool error: Tool with name rain not found"),
    ],
)
async def test_a_choice_that_cannot_be_served_says_what_can(choice, words):
    assert words in await refused(tool_choice=choice)


# ---- custom tools ------------------------------------------------------------------------------


async def test_the_model_is_shown_a_function_of_one_text():
    one = engine()
    tools = [custom("patch", description="Patches.", format=REGEX), custom("free")]
    shown = prompt(one, await asked(one, tools=tools))
    first, second = json.loads(shown[: shown.index("<user>")])
    assert first == {
        "type": "function",
        "function": {
            "name": "patch",
            "description": "Patches.",
            "parameters": {
                "type": "object",
                "properties": {
                    "input": {"type": "string", "description": 'regex grammar:\na "b"|[0-9]+'}
                },
                "required": ["input"],
            },
        },
    }
    assert second["function"]["parameters"]["properties"] == {"input": {"type": "string"}}


@pytest.mark.parametrize("form", [REGEX, LARK, {"type": "text"}, None])
async def test_the_text_is_held_to_its_form_as_that_of_responses_is(form):
    one, other = engine(), engine()
    tool = custom("patch", format=form)
    assert (await asked(one, tools=[tool], tool_choice="required")).status == 200
    flat = form if form is None else {"type": form["type"], **form.get("grammar", {})}
    body = {"input": "Rain?", "tools": [{"type": "custom", "name": "patch", "format": flat}]}
    answer = await post(other, None, "/v1/responses", body, {"tool_choice": "required"})
    assert answer.status == 200
    grammars = [each.submitted[0].sampling.grammar for each in (one, other)]
    assert grammars[0] == grammars[1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("patch", {"input": TEXT})], [("patch", TEXT)]),
        ([("patch", {"input": ""})], [("patch", "")]),
        (
            [("patch", {"input": "a"}), ("clock", {}), ("patch", {"input": "b"})],
            [("patch", "a"), ("clock", "{}"), ("patch", "b")],
        ),
    ],
)
async def test_stream_and_body_bring_the_same_texts(http, calls, expected, step):
    text = "Let me." + HERMES.write(calls)
    whole, stream = engine(text), engine(text)
    whole.tokens_per_step = stream.tokens_per_step = step
    message, reason = message_of(await asked(whole, http))
    assert (message.content, called(message), reason) == ("Let me.", expected, "tool_calls")
    chunks = chunks_of(await asked(stream, http, stream=True))
    assert folded(chunks) == ("Let me.", expected, "tool_calls")
    kinds = [call.type for call in message.tool_calls or []]
    assert kinds == ["function" if name == "clock" else "custom" for name, _ in expected]
    for chunk in chunks:
        indexes = [call.index for c in chunk.choices for call in c.delta.tool_calls or []]
        assert len(set(indexes)) == len(indexes)


async def test_the_bytes_of_a_call(http):
    text = HERMES.write([("patch", {"input": "+ x"})])
    (call,) = (await asked(engine(text), http)).json()["choices"][0]["message"]["tool_calls"]
    assert list(call) == ["id", "type", "custom"] and len(call.pop("id")) == 9
    assert call == {"type": "custom", "custom": {"name": "patch", "input": "+ x"}}
    stream = await asked(engine(text), http, stream=True)
    events = [json.loads(event)["choices"][0] for event in stream.events()[:-1]]
    first, *more = [
        event["delta"]["tool_calls"] for event in events if "tool_calls" in event["delta"]
    ]
    assert len(first[0].pop("id")) == 9
    assert first == [{"index": 0, "type": "custom", "custom": {"name": "patch", "input": ""}}]
    assert more == [[{"index": 0, "custom": {"input": "+ x"}}]]
    assert events[-1]["finish_reason"] == "tool_calls"


async def test_a_text_that_is_cut_off_is_left_out(http):
    text = HERMES.write([("patch", {"input": "+ x" * 20})])
    body = {"max_tokens": len(text) - 30}
    message, finish = message_of(await asked(engine(text), http, **body))
    streamed = folded(chunks_of(await asked(engine(text), http, stream=True, **body)))
    assert (called(message), finish) == ([("patch", "")], "length")
    assert streamed == ("", [("patch", "")], "length")


async def test_log_probabilities_come_with_every_answer(http):
    text = HERMES.write([("patch", {"input": "a"}), ("patch", {"input": "b"})])
    options = {"n": 2, "logprobs": True, "stream": True}
    chunks = chunks_of(await asked(engine(text), http, **options))
    for index in (0, 1):
        assert folded(chunks, index) == ("", [("patch", "a"), ("patch", "b")], "tool_calls")
        told = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == index]
        tokens = [entry.token for each in told if each for entry in each.content]
        assert "".join(tokens) == text + "</s>"


async def test_calls_of_earlier_turns():
    one = engine()
    history = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "+ x"}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]
    shown = prompt(one, await asked(one, tools=None, messages=history))
    call = 'a{"name": "patch", "arguments": {"input": "+ x"}}'
    assert f"{call}<end><tool>" in shown and "donea<end><assistant>" in shown


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"type": "custom"}, "messages[0].tool_calls[0]: missing field `custom`"),
        ({}, "messages[0].tool_calls[0]: missing field `function`"),
        ({"type": "custom", "custom": {"name": "f"}}, "missing required field `input`"),
    ],
)
async def test_a_call_of_an_earlier_turn_says_what_was_called(call, words):
    history = [{"role": "assistant", "tool_calls": [call]}]
    assert words in await refused(messages=history)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "custom"}, "tools[0]: Object missing required field `custom`"),
        ({"type": "custom", "name": "x"}, "tools[0]: Object missing required field `custom`"),
        ({"type": "web_search"}, "tools[0].type: `web_search` is not served, only `function` and"),
        (custom("f", format="lark"), "tools[0].custom.format: Expected `object | null`"),
        (custom("f", format={"type": "json"}), "neither `text` nor `grammar`"),
        (
            custom("f", format={"type": "grammar"}),
            "tools[0].custom.format: missing field `grammar`",
        ),
        (
            custom("f", format={"type": "grammar", "grammar": {"syntax": "lark"}}),
            "tools[0].custom.format.grammar: Object missing required field `definition`",
        ),
        (
            custom("f", format={**LARK, "grammar": {"syntax": "gbnf", "definition": "x"}}),
            "Tool error: the `format` of `f`: its `syntax` is neither `lark` nor `regex`",
        ),
        (
            custom(
                "f", format={**LARK, "grammar": {"syntax": "lark", "definition": "start: start"}}
            ),
            "recursion is not supported",
        ),
        (custom("a b"), "`a b` is no name for a function"),
        (custom("clock"), "two tools have the name `clock`"),
    ],
)
async def test_a_tool_that_cannot_be_served_says_why(tool, words):
    assert words in await refused(tools=[tool, CLOCK])
