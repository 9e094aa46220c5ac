"""What ends an answer, and what its client is told of it: the same in stream and body."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served

pytestmark = pytest.mark.trio

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
}
SAYS = "one two 3 three"
ENDINGS: list[tuple[dict[str, Any], str, str, Any, Any]] = [
    # fields, text, finish_reason, stop_reason, matched_stop
    ({}, SAYS, "stop", None, 1),
    ({"max_tokens": 3}, "one", "length", None, None),
    ({"stop": ["zz", "two"]}, "one ", "stop", "two", "two"),
    ({"stop_regex": r"\d\s*t"}, "one two ", "stop", r"\d\s*t", r"\d\s*t"),
    ({"stop_regex": ["x", "(?i)TW."]}, "one ", "stop", "(?i)TW.", "(?i)TW."),
    ({"stop_regex": "e.*w", "stop": "two"}, "on", "stop", "e.*w", "e.*w"),
    ({"stop_regex": "3 t.*z", "stop": "q"}, SAYS, "stop", None, 1),
    ({"stop_token_ids": ["w"]}, "one t", "stop", "w", "w"),  # the id of that token
    # As in vLLM: not before so many tokens, however they come.
    ({"stop_token_ids": ["t"], "min_tokens": 4}, "one ", "stop", "t", "t"),
    ({"stop_token_ids": ["t"], "min_tokens": 5}, "one two 3 ", "stop", "t", "t"),
    ({"stop": ["one", "tw", "ee"], "min_tokens": 6}, "one two 3 thr", "stop", "ee", "ee"),
    ({"stop": ["one", "tw"], "min_tokens": 5}, "one ", "stop", "tw", "tw"),  # begun before
    ({"stop_regex": "t.", "min_tokens": 6}, "one two 3 ", "stop", "t.", "t."),
    ({"stop": "e", "min_tokens": 3}, "one two 3 thr", "stop", "e", "e"),
    ({"stop": "e", "min_tokens": 3, "max_tokens": 3}, "one", "length", None, None),
    ({"stop_regex": "w", "include_stop_str_in_output": True}, "one tw", "stop", "w", "w"),
    ({"stop": "w", "no_stop_trim": True}, "one tw", "stop", "w", "w"),
]


def text_of(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta", {}))["content"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize(("fields", "text", "finish", "stop", "matched"), ENDINGS)
async def test_body_and_stream_say_what_ended_them(
    path, per_step, fields, text, finish, stop, matched
):
    engine = FakeEngine(lambda prompt: SAYS)
    engine.tokens_per_step = per_step
    if "stop_token_ids" in fields:
        stop = matched = engine.tokenizer.token_id(fields["stop_token_ids"][0])
        fields = {**fields, "stop_token_ids": [stop]}
    body = {**BODIES[path], **fields}
    async with served(engine) as server:
        client = await server.connect()
        whole = (await client.post(path, body)).json()["choices"][0]
        stream = await client.post(path, {**body, "stream": True})
    assert text_of(whole) == text
    ending = (finish, stop, matched)
    names = ("finish_reason", "stop_reason", "matched_stop")
    assert tuple(whole[name] for name in names) == ending
    *chunks, last = [orjson.loads(event)["choices"][0] for event in stream.events()[:-1]]
    assert "".join(map(text_of, [*chunks, last])) == text
    assert tuple(last[name] for name in names) == ending
    assert {tuple(chunk[name] for name in names) for chunk in chunks} <= {(None, None, None)}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"stop_regex": "a*"}, "matches the empty text"),
        ({"stop_regex": ["ok", "(a"]}, "at character 1: this `(` is never closed"),
        ({"stop_regex": r"(a)\1"}, r"`\1` is not served"),
        ({"stop_regex": ["a"] * 5}, "`stop` and `stop_regex` support up to 4"),
        ({"stop_regex": ["a"] * 3, "stop": ["b"] * 2}, "`stop` and `stop_regex` support up to 4"),
        ({"stop_regex": 1}, "stop_regex: Expected `str | array"),
        ({"stop_token_ids": [10**6]}, "`stop_token_ids` must hold token ids >= 0 and <"),
        ({"stop_token_ids": [-1]}, "`stop_token_ids` must hold token ids >= 0 and <"),
    ],
)
async def test_what_cannot_end_an_answer_is_422(path, fields, problem):
    async with served() as server:
        client = await server.connect()
        answer = await client.post(path, {**BODIES[path], **fields})
    assert answer.status == 422
    assert problem in answer.json()["error"]["message"]
