"""An error about a value that is none of those listed says which are."""

from __future__ import annotations

import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served

pytestmark = pytest.mark.trio

USER = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": USER}
MESSAGE = {"model": "tgi", "max_tokens": 4, "messages": USER}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (
            "/generate",
            {"inputs": "Hi", "parameters": {"grammar": {"type": "x", "value": 1}}},
            "parameters.grammar.type: Invalid enum value 'x', expected one of `choice`, `json`, "
            "`json_object`, `json_schema`, `lark`, `regex`",
        ),
        (
            "/v1/messages",
            {**MESSAGE, "thinking": {"type": "x"}},
            "thinking.type: Invalid enum value 'x', expected one of `adaptive`, `between_tools`, "
            "`disabled`, `enabled`",
        ),
        (
            "/v1/messages",
            {**MESSAGE, "tool_choice": {"type": "x"}},
            "tool_choice.type: Invalid enum value 'x', expected one of `any`, `auto`, `none`, ",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "x"}},
            "response_format.type: Invalid enum value 'x', expected one of `choice`, `json`, ",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "stream": "x"},
            "stream: Expected `bool | null`, got `str`",
        ),
    ],
)
async def test_the_allowed_values_are_said(path, body, text):
    async with served(FakeEngine(lambda prompt: "Hi")) as server:
        answer = await (await server.connect()).post(path, body)
    assert answer.status in (400, 422) and text in answer.body.decode()
