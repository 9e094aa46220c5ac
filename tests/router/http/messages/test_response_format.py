"""What clients write about the form of an answer, in every shape, at every endpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.errors import ValidationError
from tgi_trio.router.text import grammars
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.gbnf_lark import gbnf

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = grammars.json_schema(SCHEMA)
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GBNF = 'root ::= "a" | "b" root'
LARK = 'start: "a"'


def body(path: str, form: object) -> dict[str, object]:
    if path == "/generate":
        return {"inputs": "x", "parameters": {"grammar": form}}
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    return {"prompt": "x", "response_format": form}


async def ask(path: str, form: object) -> tuple[int, str, str | None]:
    """Return (status, body, the grammar that was submitted)."""
    return await send(path, body(path, form))


async def send(path: str, content: dict[str, object]) -> tuple[int, str, str | None]:
    async with served() as server:
        server.engine.validator._check_grammar = check
        client = await server.connect()
        answer = await client.post(path, content)
        submitted = server.engine.submitted
        grammar = submitted[-1].sampling.grammar if submitted else None
        return answer.status, answer.body.decode(), grammar


async def check(grammar: str, tokenizer: Path | None) -> None:
    if "objekt" in grammar:
        raise ValidationError("grammar is not valid: Invalid type: objekt")


TGI_SHAPES = [
    ({"type": "json", "value": SCHEMA}, JSON),
    ({"type": "json_object", "value": SCHEMA}, JSON),
    (
        {"type": "json", "value": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
        JSON,
    ),
    ({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA, "strict": True}}, JSON),
    ({"type": "regex", "value": "[a-z]+"}, grammars.regex("[a-z]+")),
    ({"type": "lark", "value": 'start: "a"'}, grammars.lark('start: "a"')),
    ({"type": "choice", "value": ["yes", "no"]}, grammars.choice(["yes", "no"])),
]
OPENAI_SHAPES = [
    ({"type": "text"}, ""),
    ({"type": "json_object"}, grammars.json_object()),
    (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        JSON,
    ),
    # llama.cpp's, and others' who serve with it.
    ({"type": "json_object", "schema": SCHEMA}, JSON),
    ({"type": "json_schema", "schema": SCHEMA}, JSON),
]
# By the names of vLLM, SGLang and llama.cpp.
FIELDS = [
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": json.dumps(SCHEMA)}, JSON),
    ({"guided_regex": "[a-z]+"}, grammars.regex("[a-z]+")),
    ({"guided_choice": ["yes", "no"]}, grammars.choice(["yes", "no"])),
    ({"guided_grammar": GBNF}, gbnf(GBNF)),
    ({"guided_grammar": LARK}, grammars.lark(LARK)),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
    ({"structured_outputs": {"regex": "[a-z]+"}}, grammars.regex("[a-z]+")),
    ({"structured_outputs": {"choice": ["yes"]}}, grammars.choice(["yes"])),
    ({"structured_outputs": {"grammar": GBNF, "regex": None}}, gbnf(GBNF)),
    ({"structured_outputs": {"grammar": LARK, "json_object": False}}, grammars.lark(LARK)),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        grammars.json_object(),
    ),
    ({"json_schema": json.dumps(SCHEMA)}, JSON),
    ({"json_schema": SCHEMA}, JSON),
    ({"regex": "[a-z]+", "guided_decoding_backend": "xgrammar"}, grammars.regex("[a-z]+")),
    ({"ebnf": GBNF}, gbnf(GBNF)),
    ({"grammar": GBNF}, gbnf(GBNF)),
    ({"grammar": ""}, ""),
    ({"regex": None, "guided_json": None, "structured_outputs": None, "grammar": None}, ""),
    ({"regex": "a", "response_format": {"type": "text"}}, grammars.regex("a")),
]


@pytest.mark.trio
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "grammar"), FIELDS)
async def test_the_names_of_other_servers_work_at_openais_endpoints(path, fields, grammar):
    form = {"type": "text"}
    assert (await send(path, {**body(path, form), **fields}))[::2] == (200, grammar)


@pytest.mark.trio
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"regex": "a", "guided_json": {}}, ["`guided_json`", "`regex`", "give one of them"]),
        ({"grammar": GBNF, "response_format": {"type": "json_object"}}, ["`response_format`"]),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            ["`structured_outputs.regex` and `structured_outputs.choice`"],
        ),
        ({"structured_outputs": {}}, ["`structured_outputs` needs"]),
        ({"structured_outputs": {"yaml": 1}}, ["structured_outputs", "unknown field `yaml`"]),
        ({"structured_outputs": {"structural_tag": "{}"}}, ["neither `format` nor `structures`"]),
        ({"structural_tag": "{"}, ["the structural tag is no JSON"]),
        ({"response_format": {"type": "structural_tag"}}, ["neither `format` nor"]),
        ({"structural_tag": {"format": {"type": "exclude_token"}}}, ["cannot be `exclude_token`"]),
        ({"structural_tag": {"format": {"type": "token"}}}, ["`format.token` must be one of the"]),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, ["has no whitespace"]),
        ({"guided_choice": []}, ["at least one option"]),
        ({"guided_json": "{"}, ["grammar is not valid: "]),
        ({"json_schema": {"type": "objekt"}}, ["Invalid type: objekt"]),
        ({"regex": 1}, ["regex: Expected `str"]),
        ({"grammar": LARK}, ["line 1, column 6: unexpected `:`"]),
        ({"ebnf": 'root ::= "a" other'}, ["line 1, column 14: there is no rule `other`"]),
        ({"response_format": {"type": "json_schema", "schema": {}, "value": {}}}, ["exclude"]),
        ({"response_format": {"type": "regex", "schema": {}}}, ["`regex` takes no `schema`"]),
    ],
)
async def test_what_contradicts_itself_or_is_not_served_is_422(path, fields, texts):
    status, answer, grammar = await send(path, {**body(path, None), **fields})
    assert (status, grammar) == (422, None)
    assert [text for text in texts if text not in answer] == [], answer


@pytest.mark.trio
@pytest.mark.parametrize("fields", [fields for fields, grammar in FIELDS if grammar])
async def test_tools_exclude_every_form(fields):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    content = {**body(CHAT, {"type": "text"}), **fields, "tools": tools}
    status, answer, grammar = await send(CHAT, content)
    assert (status, grammar) == (422, None)
    assert f"`{next(iter(fields))}" in answer and "`tools`" in answer
    # Without the tools it is served again.
    assert (await send(CHAT, {**content, "tool_choice": "none"}))[0] == 200


@pytest.mark.trio
@pytest.mark.parametrize("path", ["/generate", CHAT, "/v1/completions"])
@pytest.mark.parametrize(("form", "grammar"), TGI_SHAPES)
async def test_tgis_shapes_work_everywhere(path, form, grammar):
    assert (await ask(path, form))[::2] == (200, grammar)


@pytest.mark.trio
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(("form", "grammar"), OPENAI_SHAPES)
async def test_openais_shapes_work_at_openais_endpoints(path, form, grammar):
    assert (await ask(path, form))[::2] == (200, grammar)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("path", "form", "text"),
    [
        ("/generate", {"type": "json", "value": {"type": "objekt"}}, "Invalid type: objekt"),
        ("/generate", {"type": "json", "value": "{"}, "grammar is not valid: "),
        ("/generate", {"type": "json", "value": "[1]"}, "an object or a boolean"),
        ("/generate", {"type": "json", "value": [1]}, "grammar is not supported"),
        ("/generate", {"type": "json", "value": True}, "grammar is not supported"),
        ("/generate", {"type": "json_schema", "value": {}}, "missing field `schema`"),
        ("/generate", {"type": "json_schema", "value": {"schema": 1}}, "is not supported"),
        ("/generate", {"type": "json"}, "value"),
        ("/generate", {"type": "regex", "value": 1}, "parameters.grammar.value: Expected `str`"),
        ("/generate", {"type": "choice", "value": []}, "at least one option"),
        ("/generate", {"type": "choice", "value": "a"}, "parameters.grammar.value"),
        ("/generate", {"type": "ebnf", "value": "a"}, "Invalid enum value 'ebnf'"),
        (CHAT, {"type": "json_schema"}, "missing field `json_schema`"),
        (CHAT, {"type": "regex"}, "missing field `value`"),
        (CHAT, {"type": "json_schema", "json_schema": {"name": "n"}}, "missing field `schema`"),
    ],
)
async def test_wrong_shapes_are_422_and_say_what_is_wrong(path, form, text):
    status, body, grammar = await ask(path, form)
    assert (status, grammar) == (422, None) and text in body, body


@pytest.mark.trio
async def test_without_grammar_support_the_words_are_tgis():
    async with served() as server:
        server.engine.validator._check_grammar = None
        client = await server.connect()
        answer = await client.post("/generate", body("/generate", TGI_SHAPES[0][0]))
    assert answer.status == 422
    assert answer.json()["error"] == "Input validation error: grammar is not supported"


LARGE = "x" * 2**16
LARGE_SCHEMA = {"type": "object", "properties": {LARGE: {"type": "integer"}}}
TOO_LARGE = [
    ("/generate", {"parameters": {"grammar": {"type": "json", "value": LARGE_SCHEMA}}}),
    ("/generate", {"parameters": {"grammar": {"type": "json", "value": json.dumps(LARGE_SCHEMA)}}}),
    ("/generate", {"parameters": {"grammar": {"type": "regex", "value": LARGE + "y"}}}),
    ("/generate", {"parameters": {"grammar": {"type": "choice", "value": [LARGE]}}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE_SCHEMA}}}),
    (CHAT, {"response_format": {"type": "json_object", "schema": LARGE_SCHEMA}}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": f"f{i}", "parameters": {
        "properties": {LARGE[: 2**15]: {}}}}} for i in range(2)]}),
    (TEXT, {"structured_outputs": {"choice": ["a" * 2**13] * 9}}),
    (TEXT, {"guided_grammar": "start: /" + LARGE + "/"}),
]  # fmt: skip


@pytest.mark.trio
@pytest.mark.parametrize(("path", "fields"), TOO_LARGE)
async def test_what_is_too_large_is_refused_before_anything_is_made_of_it(
    path, fields, monkeypatch
):
    def made(*given):
        pytest.fail("a grammar is being made of it")

    for builder in ("close_objects", "literal", "lark", "regex"):
        monkeypatch.setattr(grammars, builder, made)
    status, answer, grammar = await send(path, {**body(path, None), **fields, "inputs": "x"})
    assert (status, grammar) == (422, None)
    assert "65536 are allowed (--max-grammar-bytes)" in answer


@pytest.mark.trio
async def test_whitespace_in_a_schema_and_words_about_a_tool_do_not_count():
    text = json.dumps(SCHEMA, indent=10_000)
    assert len(text) > 2**16
    assert (await ask("/generate", {"type": "json", "value": text}))[::2] == (200, JSON)
    function = {"name": "f", "parameters": {"description": LARGE, **SCHEMA}}
    tools = [{"type": "function", "function": function}]
    engine = FakeEngine()
    engine.chat_template = ChatTemplate({"default": "{{ tools | length }}"}, {})
    async with served(engine) as server:
        client = await server.connect()
        answer = await client.post(CHAT, {**body(CHAT, {"type": "text"}), "tools": tools})
    assert answer.status == 200, answer.text
