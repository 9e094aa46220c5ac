"""Sampled streams that go on where they were cut: the whole server, and the real sampler."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.router.http.told import Told
from tests.system.client import post
from tests.system.server import SECRET, ServerProcess

pytestmark = pytest.mark.system

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate_stream"
USER = [{"role": "user", "content": "Tell me"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": USER, "n": 2}),
    "schema": (CHAT, {"messages": USER, "response_format": SCHEMA}),
    "tools": (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": "required"}),
    "penalties": (TEXT, {"prompt": "The", "frequency_penalty": 0.9, "stop": ["e "], "n": 2}),
    "native": (
        NATIVE,
        {
            "inputs": "The",
            "parameters": {
                "do_sample": True,
                "repetition_penalty": 1.2,
                "max_new_tokens": 24,
                "top_n_tokens": 2,
            },
        },
    ),
}


def asked(url: str, body: dict[str, Any], emitted: str = "") -> Told:
    headers = {"x-tgi-front": SECRET, "x-tgi-seed": "11", "x-tgi-emitted": emitted}
    answer = post(url, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return Told(answer.content)


def said(*parts: bytes) -> dict[int, list[Any]]:
    """Return what each choice consists of: its pieces in order, and how it ended."""
    found: dict[int, list[Any]] = {}
    for event in b"".join(parts).split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data in (b"", b"[DONE]"):
            continue
        decoded = orjson.loads(data)
        if "token" in decoded:
            token = decoded["token"]
            tops = [each["id"] for each in decoded.get("top_tokens", ())]
            place = (decoded["index"], token["id"], token["text"], sorted(tops))
            found.setdefault(0, []).append((place, decoded["generated_text"]))
        for choice in decoded.get("choices", ()):
            piece = (choice.get("text"), choice.get("delta"), choice["finish_reason"])
            found.setdefault(choice["index"], []).append(piece)
    return found


@pytest.mark.parametrize("name", CASES)
def test_sampled_streams_go_on_with_the_same_tokens(demo: ServerProcess, name: str) -> None:
    path, body = CASES[name]
    if path != NATIVE:
        body = {**body, "stream": True, "max_tokens": 24, "temperature": 1.0}
    url = demo.url + path
    whole = asked(url, body)
    count = len(whole.groups)
    assert count > 3
    for cut in {1, 3, count // 2, max(count - 3, 2)}:
        rest = asked(url, body, whole.emitted(cut))
        assert said(whole.client(cut), rest.client()) == said(whole.client()), cut
