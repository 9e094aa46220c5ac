"""What clients write about the form of an answer, in every shape, at every endpoint."""

from __future__ import annotations

import pytest

from tests.router.http.served import served
from tgi_trio.errors import ValidationError
from tgi_trio.router.text import grammars

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
JSON = grammars.json_schema(SCHEMA)
CHAT = "/v1/chat/completions"


def body(path: str, form: object) -> dict[str, object]:
    if path == "/generate":
        return {"inputs": "x", "parameters": {"grammar": form}}
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    return {"prompt": "x", "response_format": form}


async def ask(path: str, form: object) -> tuple[int, str, str | None]:
    """Return (status, body, the grammar that was submitted)."""
    async with served() as server:
        server.engine.validator._check_grammar = check
        client = await server.connect()
        answer = await client.post(path, body(path, form))
        submitted = server.engine.submitted
        grammar = submitted[-1].sampling.grammar if submitted else None
        return answer.status, answer.body.decode(), grammar


async def check(grammar: str) -> None:
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
]


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
