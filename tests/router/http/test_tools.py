"""Tools of a chat: what the template is shown, and what becomes of an answer that calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.router.http.fake_engine import FakeEngine, byte_tokenizer
from tests.router.http.served import Answer, served
from tests.router.http.tool_calls import called, piece
from tgi_trio.errors import GrammarError
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages import replies
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.call_formats import FORMATS, HERMES

pytestmark = pytest.mark.trio

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Rain?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# In an order of its own and with a field we do not know: templates see it as it is.
WEATHER = {"type": "function", "function": {"strict": True, "name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
BODY = {"messages": USER, "tools": [WEATHER, CLOCK], "max_tokens": 500}
ROME, PARIS = ("weather", {"city": "Rome"}), ("weather", {"city": 'Pa"ris}'})
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls %}{{ c.id }}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)


def engine(answer: str, template: str = TEMPLATE, **options: Any) -> FakeEngine:
    found = FakeEngine(lambda prompt: answer, **options)
    found.chat_template = ChatTemplate({"default": template}, {})
    return found


async def asked(engine: FakeEngine, http: Any = None, **more: Any) -> Answer:
    async with served(engine, http) as server:
        client = await server.connect()
        return await client.post(CHAT, {**BODY, **more})


def message_of(answer: Answer) -> tuple[replies.OutputMessage, str]:
    reply = msgspec.json.decode(answer.body, type=replies.ChatCompletion)
    return reply.choices[0].message, reply.choices[0].finish_reason


def chunks_of(answer: Answer) -> list[replies.ChatCompletionChunk]:
    *events, done = answer.events()
    assert done == b"[DONE]"
    return [msgspec.json.decode(event, type=replies.ChatCompletionChunk) for event in events]


def folded(chunks: list[replies.ChatCompletionChunk], index: int = 0) -> tuple[str, list[Any], Any]:
    """Return content, calls and finish reason as a client puts them together."""
    content = ""
    calls: list[Any] = []
    reasons: list[Any] = []
    for choice in (c for chunk in chunks for c in chunk.choices if c.index == index):
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.type and call.id and piece(call)[0]
                assert getattr(call, call.type)
                calls.append([*piece(call)])
            else:
                assert not call.type and not call.id and not piece(call)[0]
                calls[call.index][1] += piece(call)[1]
        reasons.append(choice.finish_reason)
    assert set(reasons[:-1]) <= {None}
    return content, [tuple(call) for call in calls], reasons[-1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("prose", "calls", "reason"),
    [
        ("It rains.", [], "stop"),
        ("", [ROME], "tool_calls"),
        ("Let me look.", [ROME, PARIS, ("clock", {})], "tool_calls"),
    ],
)
async def test_stream_and_body_say_the_same(http, prose, calls, reason, step):
    text = prose + (HERMES.write(calls) if calls else "")
    expected = [(name, json.dumps(value, separators=(",", ":"))) for name, value in calls]
    whole, stream = engine(text), engine(text)
    whole.tokens_per_step = stream.tokens_per_step = step
    message, finish = message_of(await asked(whole, http))
    content, streamed, last = folded(chunks_of(await asked(stream, http, stream=True)))
    assert finish == last == reason
    assert (message.content or "") == content == prose
    assert called(message) == expected
    assert streamed == expected
    if calls:
        assert message.content is None or prose
        ids = [call.id for call in message.tool_calls or []]
        assert len(set(ids)) == len(ids)
        assert all(len(id) == 9 and id.isalnum() for id in ids)


async def test_the_bytes_of_a_call(http):
    text = HERMES.write([("clock", {})])
    answer = await asked(engine(text), http)
    choice = answer.json()["choices"][0]
    id = choice["message"]["tool_calls"][0].pop("id")
    assert len(id) == 9
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "clock", "arguments": "{}"}}],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
        "stop_reason": None,
        "matched_stop": 1,
    }
    stream = await asked(engine(text), http, stream=True)
    events = [json.loads(event)["choices"][0] for event in stream.events()[:-1]]
    first = events[0]["delta"]["tool_calls"][0]
    assert list(first) == ["index", "id", "type", "function"]
    assert [event["delta"] for event in events[1:]] == [
        {"role": "assistant", "tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {"role": "assistant"},
    ]


async def test_a_call_that_is_cut_off_says_length(http):
    body = {"max_tokens": len(HERMES.write([ROME])) - 20}
    text = HERMES.write([ROME])
    message, finish = message_of(await asked(engine(text), http, **body))
    content, calls, last = folded(chunks_of(await asked(engine(text), http, stream=True, **body)))
    assert finish == last == "length"
    assert called(message) == calls
    assert '{"city":"Rome"}'.startswith(calls[0][1]) and content == ""


async def test_several_answers_with_log_probabilities_and_usage(http):
    text = "Well." + HERMES.write([ROME])
    options = {"n": 2, "logprobs": True, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = chunks_of(await asked(engine(text), http, **options))
    for index in (0, 1):
        assert folded(chunks, index) == ("Well.", [("weather", '{"city":"Rome"}')], "tool_calls")
        tokens = [
            entry.token
            for chunk in chunks
            for choice in chunk.choices
            if choice.index == index and choice.logprobs
            for entry in choice.logprobs.content
        ]
        assert "".join(tokens) == text + "</s>"
    assert usage.usage is not None and usage.usage.completion_tokens == 2 * (len(text) + 1)
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
async def test_the_format_is_the_templates_own_and_its_special_tokens_are_seen(form):
    """A mark that is a special token is a part of the call, and never of the answer's text."""
    template = TEMPLATE + "{#" + " ".join(form.signs) + "#}"
    tokenizer = byte_tokenizer(("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>"))
    calls = [ROME, PARIS] if form.next else [PARIS]
    for text, content in ((form.write(calls), None), ("Dry.", "Dry.")):
        message, _ = message_of(await asked(engine(text, template, tokenizer=tokenizer)))
        assert message.content == content
        assert len(message.tool_calls or []) == (len(calls) if content is None else 0)


# ---- what the model is told --------------------------------------------------------------------


async def prompt_of(template: str = TEMPLATE, **more: Any) -> str:
    found = engine("", template)
    async with served(found) as server:
        client = await server.connect()
        answer = await client.post("/chat_tokenize", json.dumps({**BODY, **more}).encode())
    assert answer.status == 200, answer.body
    return answer.json()["templated_text"]


# Some templates fail where there are no parameters.
NONE: dict[str, Any] = {"type": "object", "properties": {}}
SHOWN = {"type": "function", "function": {"name": "clock", "parameters": NONE}}


async def test_the_template_sees_the_tools_as_they_were_sent():
    assert await prompt_of() == json.dumps([WEATHER, SHOWN]) + "<user>Rain?"
    assert await prompt_of(tool_choice="required") == await prompt_of()
    assert await prompt_of(tool_choice="none") == await prompt_of(tools=None) == "<user>Rain?"
    assert await prompt_of(tool_choice="clock") == json.dumps([SHOWN]) + "<user>Rain?"
    assert (await prompt_of(tool_prompt="Call!")).endswith("<user>Rain?\n---\nCall!")
    renamed = {"type": "function", "function": {"name": "weather", "arguments": CITY}}
    shown = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    assert await prompt_of(tools=[renamed]) == json.dumps([shown]) + "<user>Rain?"


async def test_a_template_without_tools_is_told_in_the_last_message():
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    listed = json.dumps([WEATHER, SHOWN], separators=(",", ":"))
    assert await prompt_of(plain, tool_prompt="Call!") == f"<user>Rain?\n---\n{listed}\nCall!"
    assert '<tool_call>\n{"name":' in await prompt_of(plain)
    large = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 2**64}}}
    tool = {"type": "function", "function": {"name": "count", "parameters": large}}
    assert f'"maximum":{2**64}' in await prompt_of(plain, tools=[tool])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    history = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "6"}]
    assert await prompt_of(plain, messages=history, tools=None) == (
        f"<user>Rain?<assistant>{HERMES.write([('f', {'a': 1})])}<tool>6"
    )


async def test_earlier_calls_and_their_results_reach_the_template():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    bare = {"function": {"name": "g", "arguments": {"b": [2]}}}
    broken = {"id": "c3", "function": {"name": "h", "arguments": "{oops"}}
    history = [
        {"role": "assistant", "content": None, "tool_calls": [call, bare, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "6.7"},
    ]
    assert await prompt_of(messages=history, tools=[]) == (
        '<assistant>c1{"name": "f", "arguments": {"a": 1}}{"name": "g", "arguments": {"b": [2]}}'
        'c3{"name": "h", "arguments": "{oops"}<tool>6.7c1'
    )


async def test_arguments_that_nest_without_end_are_shown_as_they_came():
    deep = '{"a":' + "[" * 100_000
    for text in (deep, deep + "]" * 100_000 + "}"):
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": text}}
        history = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        assert await prompt_of(messages=history, tools=[]) == (
            f"<assistant>c1{json.dumps({'name': 'f', 'arguments': text})}"
        )


async def test_the_grammar_reaches_the_shard_and_only_with_tools():
    for more, constrained in (
        ({}, True),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, True),
        ({"tool_choice": "none"}, False),
        ({"tools": []}, False),
    ):
        found = engine(HERMES.write([("clock", {})]))
        await asked(found, **more)
        assert bool(found.submitted[0].sampling.grammar) == constrained, more


async def test_a_tool_whose_schema_has_no_grammar_is_named(http):
    async def check(grammar: str, tokenizer: Path | None) -> None:
        if "strin" in grammar.replace("string", ""):
            raise GrammarError("grammar is not valid: Invalid type: strin")
        if len(grammar) > 2000:
            raise GrammarError("grammar is not valid: it has too many bytes")

    broken = named("broken", parameters={"properties": {"x": {"type": "strin"}}})
    many = [named(f"f{i}", parameters=CITY) for i in range(30)]
    for tools, text in (
        ([WEATHER, broken], "Tool error: the `parameters` of `broken`: grammar is not valid: Inv"),
        (many, "Input validation error: grammar is not valid: it has too many bytes"),
    ):
        found = engine("", limits=ServedLimits(max_input_tokens=8000, max_total_tokens=9000))
        found.validator._check_grammar = check
        answer = await asked(found, http, tools=tools)
        assert answer.status == 422
        assert answer.json()["error"]["message"].startswith(text)
        assert not found.permits and not found.submitted


async def test_without_grammars_there_are_no_tools(http):
    found = engine("")
    found.validator._check_grammar = None  # --disable-grammar-support
    answer = await asked(found, http)
    assert answer.json()["error"]["message"] == "Input validation error: grammar is not supported"
    assert (await asked(found, http, tool_choice="none")).status == 200


# ---- errors ------------------------------------------------------------------------------------


def named(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **parameters}}


MANY = [named(f"f{i}") for i in range(30)]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"tool_choice": "rain", "tools": [CLOCK, WEATHER]},
            "Tool error: Tool with name rain not found among `clock`, `weather`",
        ),
        (
            {"tool_choice": "r" * 200, "tools": MANY},
            f"name {'r' * 128}... not found among `f0`, `f1`, `f2`, `f3`, `f4`, `f5`, `f6`, `f7`, ",
        ),
        ({"tool_choice": "r", "tools": MANY}, "`f19` and 10 more"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "none"}}},
            "Tool error: Tool with name none not found",
        ),
        ({"tools": None, "tool_choice": "rain"}, "Tool with name rain not found: `tools` is empty"),
        ({"tools": None, "tool_choice": "required"}, "is `required`, and there are no tools"),
        ({"tools": [], "tool_choice": "required"}, "is `required`, and there are no tools"),
        ({"tools": [CLOCK, CLOCK]}, "Tool error: two tools have the name `clock`"),
        ({"tools": [named("a b")]}, "Tool error: `a b` is no name for a function"),
        ({"tools": [named("")]}, "Tool error: `` is no name for a function"),
        ({"tools": [named("f", parameters=[])]}, "the `parameters` of `f` must be a JSON schema"),
        (
            {"tools": [named("f", parameters={"type": "array"})]},
            "the `parameters` of `f` must be a JSON schema of type `object`",
        ),
        (
            {"response_format": {"type": "json", "value": {}}},
            "Tool error: Grammar and tools are mutually exclusive",
        ),
        (
            {"tools": [], "response_format": {"type": "json", "value": {}}},
            "Tool error: Grammar and tools are mutually exclusive",
        ),
        ({"tools": [CLOCK, {"type": "function"}]}, "tools[1]: Object missing required field"),
        ({"tools": [named("f") | {"function": 1}]}, "tools[0].function: Expected `object`"),
    ],
)
async def test_wrong_tools_are_told_before_anything_runs(more, text):
    found = engine("")
    answer = await asked(found, stream=True, **more)
    assert answer.status == 422
    assert text in answer.json()["error"]["message"]
    if "Tool error" in text:
        assert answer.json()["error_type"] == "tool_error"
        assert b'tgi_request_failure{err="tools"} 1' in found.metrics.render()
    assert not found.submitted and not found.permits
