"""What OpenAI's APIs tell of an error beside its text: the wrong field, and a word for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import seeing_engine
from tests.router.http.served import served
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages.blame import find_code
from tgi_trio.router.http.messages.problems import Problem

pytestmark = pytest.mark.trio


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "x" * 99_999}, "expected one of `high`"),
        ("/v1/chat/completions", {"model": "x" * 99_999}, "is not served here. Served: "),
        ("/v1/responses", {"model": "x" * 99_999}, "is not served here. Served: "),
        ("/generate", {"parameters": {"adapter_id": "x" * 99_999}}, "adapter_id"),
        ("/generate", {"parameters": {"grammar": {"type": "x" * 99_999}}}, "parameters.grammar"),
    ],
)
async def test_a_long_value_is_not_repeated_as_a_whole(path, body, says):
    asked = {"messages": [{"role": "user", "content": "x"}], "input": "x", "inputs": "x"}
    async with served() as server:
        client = await server.connect()
        answer = await client.post(path, {**asked, **body})
    assert 400 <= answer.status < 500
    assert says in answer.text and "xxx" in answer.text
    assert len(answer.text) < 4000


CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    COMPLETION: {"prompt": "Hi"},
    RESPONSE: {"input": "Hi"},
}
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "name": "f"}
NOTHING = {"type": "json_schema", "json_schema": {"schema": False}}
DATA = "data:image/png;base64,AAAA"
TEXT, IMAGE = {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": DATA}}
INPUT_TEXT = {"type": "input_text", "text": "x"}
INPUT_IMAGE = {"type": "input_image", "image_url": DATA}
HOLDER = "[0].content[1].image_url"  # Codex leaves out an image that is named like that
WRONG, MISSING, TYPE = "invalid_value", "missing_required_parameter", "invalid_type"
UNSERVED = "unsupported_parameter"
TELLING: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": ...}, "messages", MISSING),
    (CHAT, {"messages": []}, "messages", WRONG),
    (CHAT, {"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content", TYPE),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", MISSING),
    (CHAT, {"max_tokens": 0}, "max_tokens", WRONG),
    (CHAT, {"max_tokens": -2}, "max_tokens", WRONG),
    (CHAT, {"max_tokens": 10**6}, "max_tokens", WRONG),  # a shorter prompt would not help
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", WRONG),
    (CHAT, {"min_tokens": 5, "max_tokens": 2}, "min_tokens", WRONG),
    (CHAT, {"logit_bias": {"1": "x"}}, "logit_bias", TYPE),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "top_logprobs", WRONG),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools", WRONG),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", MISSING),
    (CHAT, {"tools": [TOOL], "tool_choice": "g"}, "tool_choice", WRONG),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", WRONG),
    (CHAT, {"response_format": NOTHING}, "response_format", WRONG),
    (CHAT, {"guided_json": "{"}, "guided_json", WRONG),
    (CHAT, {"audio": {"voice": "x"}}, "audio", UNSERVED),
    (CHAT, {"model": "other"}, "model", "model_not_found"),
    (CHAT, {"messages": [{"role": "user", "content": [TEXT, IMAGE]}]}, f"messages{HOLDER}", WRONG),
    (
        RESPONSE,
        {"input": [{"role": "user", "content": [INPUT_TEXT, INPUT_IMAGE]}]},
        f"input{HOLDER}",
        WRONG,
    ),
    (COMPLETION, {"prompt": 5}, "prompt", TYPE),
    (COMPLETION, {"prompt": ""}, "prompt", WRONG),
    (COMPLETION, {"suffix": "x"}, "suffix", UNSERVED),
    (COMPLETION, {"logprobs": 50}, "logprobs", WRONG),
    (COMPLETION, {"best_of": 2, "stream": True}, "best_of", "unsupported_value"),
    (COMPLETION, {"guided_choice": []}, "guided_choice", WRONG),
    (RESPONSE, {"tools": [{"name": "x"}]}, "tools[0].type", MISSING),
    (RESPONSE, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", MISSING),
    (RESPONSE, {"prompt": {"id": "p"}}, "prompt", UNSERVED),
    (RESPONSE, {"background": True, "store": False}, "background", "invalid_value"),
    (RESPONSE, {"tools": [NAMED], "tool_choice": {**NAMED, "name": "g"}}, "tool_choice", WRONG),
    (
        RESPONSE,
        {"previous_response_id": "r"},
        "previous_response_id",
        "previous_response_not_found",
    ),
    (RESPONSE, {"input": [{"type": "item_reference", "id": "i"}]}, "input[0]", "item_not_found"),
    (RESPONSE, {"input": [{"role": "x", "content": "a"}]}, "input[0].role", WRONG),
]


async def asked(path: str, limits: ServedLimits | None = None, **fields: Any) -> Any:
    body = {name: value for name, value in {**BODIES[path], **fields}.items() if value is not ...}
    async with served(FakeEngine(limits=limits or ServedLimits())) as server:
        return await (await server.connect()).post(path, body)


@pytest.mark.parametrize(("path", "fields", "param", "code"), TELLING)
async def test_an_error_names_its_field_and_its_kind(path, fields, param, code):
    error = (await asked(path, **fields)).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


async def test_an_image_that_is_none_is_named():
    async with seeing_engine() as engine, served(engine) as server:
        client = await server.connect()
        content = [INPUT_TEXT, INPUT_IMAGE]
        answer = await client.post(RESPONSE, {"input": [{"role": "user", "content": content}]})
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (400, f"input{HOLDER}", WRONG)


async def test_an_error_of_no_field_names_none():
    async with served(FakeEngine()) as server:
        client = await server.connect()
        found = [
            (await client.post(CHAT, b"{")).json()["error"],
            (await client.post("/v1/nothing", {})).json()["error"],
        ]
    assert [(each["param"], each["code"]) for each in found] == [(None, None)] * 2


async def test_what_a_grammar_cannot_do_is_a_wrong_value():
    text = "Input validation error: grammar is not valid: look-around is not supported"
    assert find_code(Problem(422, text, "validation"), "response_format") == WRONG


async def test_every_code_is_documented():
    page = (Path(__file__).parents[3] / "docs/errors.md").read_text(encoding="utf-8")
    table = page.partition("### Codes of OpenAI's APIs")[2].partition("###")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) - {"code"}
    told: set[str | None] = {"context_length_exceeded", *(code for *_, code in TELLING)}
    told |= {find_code(Problem(status, "", ""), None) for status in (401, 429, 424)}
    told |= {"response_not_found"}  # of a path, which names no field
    assert documented == told


# ---- prompts that are too long: agents that recognise it shorten their history -------------------

# What they look for in the text, beside the code, told by their sources.
WORDS = {
    "LiteLLM, aider, OpenHands": "this model's maximum context length is",
    "opencode, pi (OpenRouter's, vLLM's)": r"maximum context length is \d+ tokens",
    "opencode, pi, LangChain (OpenAI's)": "exceeds the context window",
    "opencode, pi, pydantic-ai (Groq's)": "reduce the length of the messages",
    "LangChain, opencode, pi (Anthropic's)": "prompt is too long",
    "Cline, Roo Code": r"\bcontext\s*(?:length|window)\b",
}
SHORT = ServedLimits(max_input_tokens=39, max_total_tokens=40)
LONG = "a" * 50


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (CHAT, {"max_tokens": 39}, "messages"),  # too long for so long an answer
        (CHAT, {"max_completion_tokens": 39}, "messages"),
        (COMPLETION, {"prompt": LONG}, "prompt"),
        (COMPLETION, {"max_tokens": 39}, "prompt"),
        (RESPONSE, {"input": LONG}, "input"),
    ],
)
async def test_a_prompt_that_is_too_long_is_told_as_at_openai(path, fields, param, stream):
    answer = await asked(path, SHORT, stream=stream, **fields)
    if stream and path == RESPONSE:
        # As at OpenAI: SDKs raise at `error`, Codex sees it in the last event alone.
        parts = answer.body.split(b"\n\n")[:-1]
        events = [orjson.loads(part.partition(b"\ndata: ")[2]) for part in parts]
        assert msgspec.convert(events, list[replies.ResponseEvent])
        kinds = [event["type"] for event in events]
        begun = ["response.created", "response.in_progress"]
        assert kinds == [*begun, "error", "response.failed"]
        assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
        assert events[2]["param"] == events[2]["error"]["param"] == param
        assert events[2]["code"] == events[2]["error"]["code"] == "context_length_exceeded"
        assert events[-1]["response"]["status"] == "failed"
        error = events[-1]["response"]["error"]
    else:
        error = answer.json()["error"]
        assert (answer.status, error["param"]) == (400, param)
    assert error["code"] == "context_length_exceeded"
    missed = [who for who, words in WORDS.items() if not re.search(words, error["message"], re.I)]
    assert not missed


@pytest.mark.parametrize(("prompt", "asked", "tokens"), [("Hi", 39, 3), (LONG, 1, 51)])
async def test_tgis_own_api_tells_it_in_its_own_words(prompt, asked, tokens):
    async with served(FakeEngine(limits=SHORT)) as server:
        client = await server.connect()
        body = {"inputs": prompt, "parameters": {"max_new_tokens": asked}}
        answer = await client.post("/generate", body)
    assert answer.status == 422
    assert answer.json() == {
        "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 40. "
        f"Given: {tokens} `inputs` tokens and {asked} `max_new_tokens`",
        "error_type": "validation",
    }
