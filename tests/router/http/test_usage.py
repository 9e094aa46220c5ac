"""Usage: what a call counts, and where a stream tells it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.openai_answers import engine, usage
from tests.router.http.served import Answer, served
from tgi_trio.router.http.messages import replies

pytestmark = pytest.mark.trio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "Yo"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, TEXT: {"prompt": "Yo"}}
PROMPT = {CHAT: 20, TEXT: 3}  # tokens
EVENTS: dict[str, Any] = {
    CHAT: replies.ChatCompletionChunk,
    TEXT: replies.Chunk | replies.CompletionFinal,
}


async def asked(
    path: str, found: FakeEngine | None = None, options: Any = None, **more: Any
) -> Answer:
    async with served(found or engine()) as server:
        client = await server.connect()
        if options is not None:
            more |= {"stream": True, "stream_options": options}
        return await client.post(path, {**BODIES[path], **more})


def usages(path: str, answer: Answer) -> list[Any]:
    """Return what each event says of usage, checking its shape."""
    *events, done = answer.events()
    assert done == b"[DONE]"
    shape = replies.CompletionFinal if path == TEXT else EVENTS[path]
    found = []
    for event in events:
        decoded = msgspec.json.decode(event)
        last = path == CHAT or decoded["choices"] == [] or decoded["choices"][0]["finish_reason"]
        msgspec.json.decode(event, type=shape if last else replies.Chunk)
        found.append(decoded.get("usage"))
    return found


# ---- cached tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
async def test_cached_tokens_are_told_in_body_and_stream(path):
    for stream in (False, True):
        found = engine()
        found.cached[0] = 2
        answer = await asked(path, found, {"include_usage": True} if stream else None)
        last = usages(path, answer)[-1] if stream else answer.json()["usage"]
        assert last == usage(PROMPT[path], 3, cached=2)


async def test_what_one_answer_had_to_compute_is_not_cached():
    """The prompt is counted once; the second answer may find what the first has computed."""
    for more, cached in (({"n": 2}, [0, 16]), ({"n": 3}, [16, 8, 17])):
        found = engine()
        found.cached.update(enumerate(cached))
        whole = await asked(CHAT, found, **more)
        found = engine()
        found.cached.update(enumerate(cached))
        stream = await asked(CHAT, found, {"include_usage": True}, **more)
        expected = usage(20, 3 * len(cached), cached=min(cached))
        assert whole.json()["usage"] == usages(CHAT, stream)[-1] == expected


async def test_cached_tokens_of_several_prompts_add_up():
    more = {"prompt": ["Yo", "Ho"], "n": 2}
    found = engine()
    found.cached.update({0: 1, 1: 3, 2: 2, 3: 3})
    whole = await asked(TEXT, found, **more)
    found = engine()
    found.cached.update({0: 1, 1: 3, 2: 2, 3: 3})
    stream = await asked(TEXT, found, {"include_usage": True}, **more)
    found_in_stream = usages(TEXT, stream)
    assert whole.json()["usage"] == found_in_stream[-1] == usage(6, 12, cached=3)
    # Each answer's last event tells of its own.
    ends = [each for each in found_in_stream[:-1] if each is not None]
    assert ends == [usage(3, 3, cached=cached) for cached in (1, 3, 2, 3)]


# ---- where a stream tells it -------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("options", "running", "last"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": None}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "continuous_usage_stats": False}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
    ],
)
async def test_where_usage_is_told(path, options, running, last):
    more: dict[str, Any] = {"stream": True} if options is None else {}
    found = usages(path, await asked(path, options=options, **more))
    count = PROMPT[path]
    so_far = [
        {"prompt_tokens": count, "completion_tokens": i, "total_tokens": count + i}
        for i in (1, 2, 3)
    ]
    if path == TEXT:  # TGI's: the last event of an answer has its usage in any case
        so_far[2] = usage(count, 3)
    expected = so_far if running else [None, None, so_far[2] if path == TEXT else None]
    assert found == [*expected, *([usage(count, 3)] if last else [])]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("path", BODIES)
async def test_running_usage_counts_each_answer_by_itself_however_tokens_fall(path, tokens):
    found = engine("Hello")
    found.tokens_per_step = tokens
    answer = await asked(path, found, {"continuous_usage_stats": True}, n=2)
    counts: dict[int, list[int]] = {0: [], 1: []}
    *events, whole, _ = answer.events()
    for event in map(msgspec.json.decode, events):
        (choice,) = event["choices"]
        counts[choice["index"]].append(event["usage"]["completion_tokens"])
    assert counts == {0: [1, 2, 3, 4, 5, 6], 1: [1, 2, 3, 4, 5, 6]}
    assert msgspec.json.decode(whole)["usage"]["completion_tokens"] == 12


async def test_a_stream_that_fails_still_ends_with_its_usage():
    found = engine("Hello")
    found.fail_after = 2
    *_, error, last, done = (await asked(CHAT, found, {"include_usage": True})).events()
    assert b'"error"' in error and done == b"[DONE]"
    assert msgspec.json.decode(last)["usage"] == usage(20, 0)
