"""OpenAI's Responses: what comes in, what goes out, and in which order."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
import trio

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import Answer, read_until, served, until
from tests.router.http.test_messages import CITY, LIMITS, PARIS, ROME, TEMPLATE
from tests.router.http.thinking import let_think
from tgi_trio.errors import GrammarError
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "test/model", "input": "Rain?"}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city", "parameters": CITY}
CLOCK = {"type": "function", "name": "clock", "parameters": None, "strict": False}
ANY_TEXT = {"type": "grammar", "syntax": "lark", "definition": "start: /.*/s"}
PATCH = {"type": "custom", "name": "patch", "format": ANY_TEXT}
SPACE = {"type": "namespace", "name": "mcp", "tools": [{**CLOCK, "name": "now"}]}
SHELL = {"type": "local_shell"}
HOSTED = {"type": "web_search", "external_web_access": True}
TOOLS = [WEATHER, CLOCK, PATCH, SPACE, SHELL, HOSTED]


def engine(answer: str = "Yes.", template: str = TEMPLATE, **options: Any) -> FakeEngine:
    options.setdefault("limits", LIMITS)
    found = FakeEngine(lambda prompt: answer, **options)
    found.chat_template = ChatTemplate({"default": template}, {})
    return found


async def asked(engine: FakeEngine, http: Any = None, **more: Any) -> Answer:
    async with served(engine, http) as server:
        client = await server.connect()
        body = {name: value for name, value in {**BODY, **more}.items() if value is not ...}
        return await client.post(PATH, body)


async def prompt_of(**more: Any) -> str:
    """Return the prompt that a body becomes."""
    one = engine()
    answer = await asked(one, **more)
    assert answer.status == 200, answer.body
    return one.tokenizer.decode(one.submitted[0].prompt_ids)


def reply(answer: Answer) -> replies.ResponseReply:
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=replies.ResponseReply)


def events(answer: Answer) -> list[replies.ResponseEvent]:
    """Return the events, each named as its data's type, numbered and of the documented shape."""
    assert answer.status == 200, answer.body
    found = []
    *frames, last = answer.body.split(b"\n\n")
    assert last == b""
    for i, frame in enumerate(frames):
        name, data = frame.split(b"\n")
        event = msgspec.json.decode(data[6:], type=replies.ResponseEvent)
        assert name == b"event: " + event.type.encode()
        assert event.sequence_number == i
        found.append(event)
    return found


def final(told: list[replies.ResponseEvent]) -> replies.ResponseReply:
    """Return the last response, checking that the events before it say the same."""
    begun = [told.pop(0), told.pop(0)]
    assert [each.type for each in begun] == ["response.created", "response.in_progress"]
    last = told.pop()
    whole = last.response
    assert isinstance(whole, replies.ResponseReply)
    assert last.type == f"response.{whole.status}"
    for event in begun:
        start = event.response
        assert isinstance(start, replies.ResponseReply)
        assert (start.id, start.status, start.output) == (whole.id, "in_progress", [])
        assert start.usage is None and start.tools == whole.tools
    for index, item in enumerate(whole.output):
        mine = [each for each in told if each.output_index == index]
        assert mine[0].type == "response.output_item.added"
        assert mine[-1].type == "response.output_item.done" and mine[-1].item == item
        added = mine[0].item
        assert added is not msgspec.UNSET and (added.id, added.status) == (item.id, "in_progress")
        assert {each.item_id for each in mine[1:-1]} <= {item.id}
        pieces = "".join(each.delta for each in mine if isinstance(each.delta, str))
        match item:
            case replies.ReasoningItem(content=[part]) | replies.MessageItem(content=[part]):
                assert pieces == part.text
                assert [each.text for each in mine if isinstance(each.text, str)] == [part.text]
                assert mine[-2].part == part
            case replies.FunctionCallItem(arguments=arguments):
                assert pieces == arguments == mine[-2].arguments
                assert mine[-2].name == item.name
            case replies.CustomToolCallItem(input=text):
                assert pieces == text == mine[-2].input
    assert {each.output_index for each in told} <= set(range(len(whole.output)))
    return whole


def plain(output: list[Any]) -> list[Any]:
    """Return items without what no two answers have in common."""
    for item in output:
        assert item.id.partition("_")[0] in ("rs", "msg", "fc")
        item.id = ""
        if hasattr(item, "call_id"):
            assert item.call_id.startswith("call_")
            item.call_id = ""
    return output


DONE: replies.ItemStatus = "completed"
THOUGHT = replies.ReasoningItem("", DONE, [replies.ReasoningTextPart("Hm, rain.")])
RAIN = replies.MessageItem("", DONE, [replies.OutputTextPart("It rains.")])


def called(name: str, arguments: dict[str, Any], **more: Any) -> replies.FunctionCallItem:
    text = json.dumps(arguments, separators=(",", ":"))
    return replies.FunctionCallItem("", DONE, "", name, text, **more)


ACTION = {"command": ["ls", "-l"], "timeout_ms": 5}
SPOKEN = [
    ("It rains.", [RAIN]),
    ("", []),
    ("<think>Hm, rain.</think>It rains.", [THOUGHT, RAIN]),
    (HERMES.write([ROME, PARIS]), [called(*ROME), called(*PARIS)]),
    (
        "<think>Hm, rain.</think>It rains." + HERMES.write([("mcp.now", {}), ("clock", {})]),
        [THOUGHT, RAIN, called("now", {}, namespace="mcp"), called("clock", {})],
    ),
    (
        HERMES.write([("patch", {"input": 'a "b"\n'}), ("local_shell", ACTION)]),
        [
            replies.CustomToolCallItem("", DONE, "", "patch", 'a "b"\n'),
            replies.LocalShellCallItem(
                "", DONE, "", replies.ShellAction(["ls", "-l"], timeout_ms=5)
            ),
        ],
    ),
]


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("text", "output"), SPOKEN)
async def test_stream_and_body_say_the_same(http, monkeypatch, text, output, step):
    let_think(monkeypatch)
    whole, stream = engine(text), engine(text)
    whole.tokens_per_step = stream.tokens_per_step = step
    body = reply(await asked(whole, http, tools=TOOLS))
    streamed = final(events(await asked(stream, http, tools=TOOLS, stream=True)))
    assert plain(body.output) == plain(streamed.output) == output
    assert body.status == streamed.status == "completed"
    assert body.usage is not None and body.usage == streamed.usage
    assert body.usage.total_tokens == body.usage.input_tokens + body.usage.output_tokens


async def test_the_order_of_events(http, monkeypatch):
    let_think(monkeypatch)
    calls = HERMES.write([("clock", {}), ("patch", {"input": "x"}), ("local_shell", ACTION)])
    one = engine("<think>H</think>R" + calls)
    one.tokens_per_step = 1000
    told = events(await asked(one, http, tools=TOOLS, stream=True))
    assert [event.type.removeprefix("response.") for event in told] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta"),
        *("custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "output_item.done"),
        "completed",
    ]


async def test_what_a_response_repeats(http):
    more = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "k",
        "store": True,
        "truncation": "auto",
        "service_tier": "flex",
        "temperature": 0.5,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "max_output_tokens": 100,
    }
    found = (await asked(engine(), http, **more)).json()
    assert found["id"].startswith("resp_") and found["object"] == "response"
    assert found["completed_at"] >= found["created_at"]
    for name in (
        "instructions",
        "metadata",
        "user",
        "prompt_cache_key",
        "temperature",
        "reasoning",
    ):
        assert found[name] == more[name]
    assert found["tools"] == TOOLS and found["parallel_tool_calls"] is False
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (found["store"], found["truncation"], found["service_tier"]) == (
        False,
        "disabled",
        "default",
    )
    for name in ("error", "incomplete_details", "previous_response_id"):
        assert found[name] is None
    assert found["output"][0].pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
    assert found["output"] == [
        {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
    ]


async def test_usage(http):
    one = engine()
    one.cached = {0: 9}
    usage = reply(await asked(one, http)).usage
    prompt = len("<user>Rain?<end><assistant>")
    assert msgspec.to_builtins(usage) == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 9, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 5,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off(stream):
    async def ended(text: str, **more: Any) -> replies.ResponseReply:
        answer = await asked(engine(text), stream=stream, **more)
        found = final(events(answer)) if stream else reply(answer)
        assert found.status == "incomplete"
        assert found.incomplete_details == replies.IncompleteDetails("max_output_tokens")
        return found

    one = await ended("It rains.", max_output_tokens=1)
    assert [(item.status, item.content[0].text) for item in one.output] == [("incomplete", "I")]  # type: ignore[union-attr]
    (call,) = (await ended(HERMES.write([ROME]), max_output_tokens=50, tools=TOOLS)).output
    assert isinstance(call, replies.FunctionCallItem) and call.status == "incomplete"
    small = ServedLimits(max_input_tokens=27, max_total_tokens=30)
    answer = await asked(engine("It rains.", limits=small), max_output_tokens=500)
    assert reply(answer).status == "incomplete"


# ---- what comes in -------------------------------------------------------------------------------


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
        "<tool>noon\n[An image was here. This model does not see images.]xmcp.now<end><assistant>"
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
    for foreign in ("gAAAAabc", "tgi-trio:!", "tgi-trio:" + base64.b64encode(b"\xff").decode()):
        sent["encrypted_content"] = foreign
        assert "<assistant>Yes.<end>" in await prompt_of(input=items)
    not_asked = reply(await asked(engine("<think>Hm</think>Yes."))).output[0]
    assert not_asked.encrypted_content is msgspec.UNSET  # type: ignore[union-attr]


async def test_tools_as_templates_see_them():
    prompt = await prompt_of(tools=TOOLS)
    shown = json.loads(prompt[: prompt.index("<user>")])
    names = [tool["function"]["name"] for tool in shown]
    assert names == ["weather", "clock", "patch", "mcp.now", "local_shell"]
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
        ({"type": "allowed_tools", "mode": "auto", "tools": ALLOWED}, False, {"clock"}),
        ({"type": "allowed_tools", "mode": "required", "tools": ALLOWED}, True, {"clock"}),
        ({"type": "web_search"}, False, {"weather", "clock"}),
    ],
)
async def test_the_choice_of_a_tool(choice, required, names):
    one = engine("Prose.")
    assert (await asked(one, tools=TOOLS, tool_choice=choice)).status == 200
    grammar = one.submitted[0].sampling.grammar
    every = ("weather", "clock", "patch", "local_shell")
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


# ---- errors --------------------------------------------------------------------------------------


def error(answer: Answer) -> tuple[int, str, str | None, str]:
    found = msgspec.json.decode(answer.body, type=replies.ResponsesErrorResponse).error
    return answer.status, found.type, found.code, found.message


INVALID = "invalid_request_error"
SMALL = ServedLimits(max_input_tokens=20, max_total_tokens=40)


@pytest.mark.parametrize(
    ("fields", "status", "code", "words"),
    [
        ({"input": ...}, 400, None, "input"),
        ({"input": ""}, 400, None, "`input` cannot be empty"),
        ({"input": []}, 400, None, "`input` cannot be empty"),
        ({"input": [{"role": "x", "content": "a"}]}, 400, None, "`x` is none of"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, None, "nothing is stored"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
            None,
            "input_image",
        ),
        ({"model": "other"}, 404, "model_not_found", "`other`"),
        ({"previous_response_id": "resp_1"}, 404, "previous_response_not_found", "resp_1"),
        ({"background": True}, 400, None, "background"),
        ({"conversation": "conv_1"}, 400, None, "conversation"),
        ({"prompt": {"id": "p"}}, 400, None, "prompt"),
        ({"max_output_tokens": 0}, 400, None, "max_output_tokens"),
        ({"top_p": 2.0}, 400, None, "top_p"),
        ({"tool_choice": "any"}, 400, None, "`any`"),
        ({"tool_choice": "required"}, 400, None, "no tools"),
        ({"tool_choice": {"type": "function"}}, 400, None, "name"),
        ({"tool_choice": {"type": "function", "name": "x"}}, 400, None, "x not found"),
        ({"tools": [{"name": "x"}]}, 400, None, "type"),
        ({"tools": [{"type": "function"}]}, 400, None, "name"),
        ({"tools": [CLOCK, CLOCK]}, 400, None, "two tools"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, None, "schema"),
        ({"text": {"format": {"type": "xml"}}}, 400, None, "xml"),
    ],
)
async def test_what_is_refused(fields, status, code, words):
    found = error(await asked(engine(), **fields))
    assert found[:3] == (status, INVALID, code) and words in found[3]


async def test_a_prompt_that_is_too_long():
    for limits in (ServedLimits(max_input_tokens=19, max_total_tokens=20), SMALL):
        for more in ({}, {"max_output_tokens": 5}):
            found = error(await asked(engine(limits=limits), **more))
            assert found[:3] == (400, INVALID, "context_length_exceeded")


async def test_errors_before_the_route(http):
    async with served(engine(), HttpSettings(api_keys=("key",))) as server:
        answer = await (await server.connect()).post(PATH, BODY)
    assert error(answer)[:3] == (401, INVALID, "invalid_api_key")
    async with served(engine(), http) as server:
        client = await server.connect()
        broken = await client.post(PATH, b"{")
        stored = [await client.ask(method, PATH + "/resp_1") for method in ("GET", "DELETE")]
    assert error(broken)[:2] == (400, INVALID)
    assert [answer.status for answer in stored] == [404, 404]


async def test_an_overload_says_when_to_come_back():
    full = engine(limits=ServedLimits(max_concurrent_requests=1))
    full.permits = 1
    answer = await asked(full)
    assert error(answer)[:3] == (429, "rate_limit_error", "rate_limit_exceeded")
    assert answer.headers["retry-after"] == "2"


async def test_a_failure_ends_a_stream(http):
    failing = engine("It rains.")
    failing.fail_after = 3
    *told, last = events(await asked(failing, http, stream=True))
    assert told[0].type == "response.created" and last.type == "response.failed"
    assert isinstance(last.response, replies.ResponseReply)
    assert last.response.error is not None and "shard gave up" in last.response.error.message
    assert last.response.status == "failed" and last.response.error.code == "server_error"
    body = engine("It rains.")
    body.fail_after = 3
    assert error(await asked(body, http))[:3] == (500, "server_error", "server_error")


async def test_a_form_beside_tools_is_for_answers_that_call_none():
    rain = {"type": "object", "properties": {"rain": {"type": "boolean"}}}
    form = {"type": "json_schema", "name": "rain", "schema": rain}
    one = engine()
    assert (await asked(one, tools=TOOLS, text={"format": form})).status == 200
    grammar = one.submitted[0].sampling.grammar
    assert '"rain"' in grammar and "weather" in grammar and "TEXT" not in grammar


ODD = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=y)y"}}}


async def refuse_lookahead(grammar: str) -> None:
    """Check grammars as a shard does that cannot look ahead."""
    await trio.lowlevel.checkpoint()
    if "(?=y)" in grammar:
        raise GrammarError("no lookahead")


async def test_one_tool_that_no_grammar_fits_does_not_end_a_session(caplog):
    caplog.set_level("INFO")
    odd = {"type": "function", "name": "odd", "parameters": ODD}
    one, strict = engine(), engine()
    for each in (one, strict):
        each.validator._check_grammar = refuse_lookahead
    assert (await asked(one, tools=[*TOOLS, odd])).status == 200
    grammar = one.submitted[0].sampling.grammar
    assert "odd" in grammar and "weather" in grammar and "(?=y)" not in grammar
    assert "to the parameters of odd" in caplog.text
    answer = await asked(strict, tools=[*TOOLS, {**odd, "strict": True}])
    status, _, *_, message = error(answer)
    assert status == 400 and "the `parameters` of `odd`: no lookahead" in message


async def test_leaving_ends_a_stream_at_once(http):
    one = engine("ab" * 3000)
    async with served(one, http, running=False) as server:
        client = await server.connect()
        await client.send("POST", PATH, {**BODY, "stream": True})
        await until(lambda: bool(one.live))
        one.step()
        await read_until(client.stream, b"\n\n")
        await client.stream.aclose()
        await until(lambda: len(one.left) == 1)
    assert one.permits == 0 and not one.live
