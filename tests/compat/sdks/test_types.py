"""Answers have all that the SDKs' types call required, and no value that they do not list.

The SDKs themselves read answers without looking at that.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
import pydantic
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from tests.compat.sdks.conftest import TOOL
from tests.compat.sdks.test_openai import PARAMETERS
from tests.system.server import ServerProcess

anthropic = pytest.importorskip("anthropic.types", reason="pip install -e '.[sdks]'")
pytestmark = pytest.mark.system

USER = [{"role": "user", "content": "What is 12 times 7?"}]
CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 60}
CALL = {"type": "function", "name": TOOL, "parameters": PARAMETERS}
FUNCTION = {"type": "function", "function": {"name": TOOL, "parameters": PARAMETERS}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}"}
RESPONSE: dict[str, Any] = {"input": "What is 12 times 7?", "max_output_tokens": 60}
MESSAGE: dict[str, Any] = {"model": "tgi", **CHAT}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT),
    ("chat/completions", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", {**CHAT, "n": 2, "tools": [FUNCTION], "tool_choice": "required"}),
    ("chat/completions", {**CHAT, "response_format": FORM}),
    ("completions", {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2}),
    ("responses", RESPONSE),
    ("responses", {**RESPONSE, "max_output_tokens": 2, "top_logprobs": 2}),
    ("responses", {**RESPONSE, "tools": [CALL], "tool_choice": "required"}),
    ("responses", {**RESPONSE, "text": {"format": {**FORM, "name": "x", "schema": SCHEMA}}}),
    (
        "responses",
        {**RESPONSE, "tools": [{"type": "custom", "name": "c", "format": REGEX}]}
        | {"tool_choice": "required"},
    ),
    ("messages", MESSAGE),
    ("messages", {**MESSAGE, "max_tokens": 2, "stop_sequences": ["zzz"]}),
    (
        "messages",
        {**MESSAGE, "tools": [{"name": TOOL, "input_schema": PARAMETERS}]}
        | {"tool_choice": {"type": "any"}},
    ),
]
TYPES: dict[str, tuple[Any, Any]] = {
    "chat/completions": (ChatCompletion, ChatCompletionChunk),
    "completions": (Completion, None),  # OpenAI's own chunks do not fit the type either
    "responses": (Response, ResponseStreamEvent),
    "messages": (anthropic.Message, anthropic.RawMessageStreamEvent),
}


@cache
def fitting(shape: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(shape)


@pytest.mark.parametrize(("route", "body"), ASKED)
def test_answers_fit_the_types(served: ServerProcess, route: str, body: dict[str, Any]) -> None:
    whole, event = TYPES[route]
    url = f"{served.url}/v1/{route}"
    answer = httpx.post(url, json=body, timeout=60).raise_for_status()
    fitting(whole).validate_python(answer.json())
    if event is None:
        return
    stream = httpx.post(url, json={**body, "stream": True}, timeout=60).raise_for_status()
    lines = [line[5:] for line in stream.text.split("\n") if line.startswith("data:")]
    events = [json.loads(line) for line in lines if line.strip() != "[DONE]"]
    assert events
    for each in events:
        fitting(event).validate_python(each)
