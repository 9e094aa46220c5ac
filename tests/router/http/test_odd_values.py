"""Any place of a body may have any JSON value: it is served or refused, and no fault of ours."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.router.http.fake_engine import GAP_MARKS, FakeEngine, byte_tokenizer
from tests.router.http.served import served

pytestmark = pytest.mark.trio

# What cannot be looked up, what is too large, and what is of another kind.
ODD: list[Any] = [
    *({}, [], [{}], {"type": None}, [None], {"": None}),
    *(None, True, 0, -1, 1.5, 2**64, -(2**70), 1e308),
    *("", "x", "é", "\0", "9" * 5000, "tgi-trio:é", "#/$defs/" + "9" * 5000, "data:,"),
]
STEP = 4  # a place gets every so many of them, and the next place the next ones
CHAT, USER = "/v1/chat/completions", {"role": "user", "content": "Rain?"}
OBJECT = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}}
FUNCTION = {"type": "function", "function": {"name": "f", "strict": True, "parameters": OBJECT}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TAG = {"begin": "<a>", "content": {"type": "json_schema", "json_schema": OBJECT}, "end": ["</a>"]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        CHAT,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "", "reasoning": "Hm", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "t"}]},
            ],
            "tools": [FUNCTION, {"type": "custom", "custom": {"name": "c", "format": LARK}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stop": ["x"],
            "logit_bias": {"5": 1},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "chat_template_kwargs": {"a": 1},
        },
    ),
    "schema": (
        CHAT,
        {
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "n",
                    "schema": {
                        "$defs": {"q": {"allOf": [OBJECT, {"required": ["a"]}]}},
                        "$ref": "#/$defs/q",
                        "anyOf": [{"not": {"anyOf": [{"enum": [1, "a"]}, {"type": "null"}]}}],
                        "patternProperties": {"^x": {}},
                    },
                },
            },
        },
    ),
    "tag": (
        CHAT,
        {
            "messages": [USER],
            "response_format": {
                "type": "structural_tag",
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "v"},
                        {"type": "any_text", "excludes": ["y"]},
                        {"type": "tag", **TAG},
                        {"type": "repeat", "min": 1, "max": 2, "content": {"type": "token"}},
                        {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]},
                    ],
                },
            },
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "s"}],
                    "encrypted_content": "tgi-trio:AA==",
                },
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": [{"type": "x"}]},
                {"type": "local_shell_call", "call_id": "2", "action": {"command": ["ls"]}},
            ],
            "tools": [
                {"type": "function", "name": "f", "parameters": OBJECT},
                {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex"}},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "h"}]},
            ],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": OBJECT}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
            "previous_response_id": None,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "model": "tgi",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "", "signature": "tgi-trio:AA=="},
                        {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i"}]},
            ],
            "tools": [{"name": "f", "input_schema": OBJECT}],
            "tool_choice": {"type": "tool", "name": "f"},
            "output_config": {"format": {"type": "json_schema", "schema": OBJECT}},
        },
    ),
    "native": (
        "/generate",
        {
            "inputs": "a",
            "parameters": {
                "grammar": {"type": "json", "value": OBJECT},
                "stop": ["x"],
                "stop_regex": ["a+b{1,2}"],
                "top_n_tokens": 2,
                "logit_bias": {"5": 1},
            },
        },
    ),
    "completions": (
        "/v1/completions",
        {"prompt": ["a"], "suffix": "b", "input_extra": [{"text": "a", "filename": "f"}]},
    ),
    "infill": (
        "/infill",
        {
            "input_prefix": "a",
            "input_suffix": "b",
            "input_extra": [{"text": "<|fim_middle|>", "filename": "f", "time": [1]}],
            "samplers": ["top_k", "infill"],
            "response_fields": ["timings/prompt_n"],
            "n_indent": 1,
        },
    ),
    "tokens": ("/tokenize", {"messages": [USER], "tools": [FUNCTION]}),
    "ids": ("/detokenize", {"tokens": [1, 2]}),
    "vertex": ("/vertex", {"instances": [{"inputs": "a", "parameters": {"seed": 1}}]}),
}
Place = tuple[str | int, ...]


def list_places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the place of each value in a JSON value."""
    yield place
    items: Any = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else items:
        yield from list_places(each, (*place, key))


def put(whole: Any, place: Place, value: Any) -> Any:
    """Return a copy of a JSON value that has `value` at a place."""
    if not place:
        return value
    whole = copy.deepcopy(whole)
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return whole


@pytest.mark.parametrize("name", BODIES)
async def test_any_value_is_served_or_refused(name: str) -> None:
    path, body = BODIES[name]
    engine = FakeEngine(tokenizer=byte_tokenizer(GAP_MARKS))
    async with served(engine) as server:
        assert (await (await server.connect()).post(path, body)).status < 500
        for number, place in enumerate(list_places(body)):
            for value in ODD[number % STEP :: STEP]:
                data = json.dumps(put(body, place, value)).encode()
                client = await server.connect()
                answer = await client.post(path, data)
                await client.stream.aclose()
                assert answer.status < 500, (place, value, answer.body)
