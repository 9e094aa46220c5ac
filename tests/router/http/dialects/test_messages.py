"""Anthropic's Messages: what goes out, in which order, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.http.dialects.anthropic_answers import (
    BODY,
    PATH,
    RAIN,
    THOUGHT,
    TOOLS,
    asked,
    events,
    folded,
    reply,
    used,
    without_ids,
)
from tests.router.http.dialects.conversations import LIMITS, PARIS, ROME, engine
from tests.router.http.served import served
from tests.router.http.thinking import let_think
from tgi_trio.router.http.dialects.anthropic import replies
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio


@pytest.mark.sampled(5)
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "reason"),
    [
        ("It rains.", [RAIN], "end_turn"),
        ("", [], "end_turn"),
        ("<think>Hm, rain.</think>It rains.", [THOUGHT, RAIN], "end_turn"),
        ("<think>Hm, rain.", [THOUGHT], "end_turn"),
        (HERMES.write([ROME]), [used(ROME)], "tool_use"),
        (
            "<think>Hm, rain.</think>It rains." + HERMES.write([ROME, PARIS, ("clock", {})]),
            [THOUGHT, RAIN, used(ROME), used(PARIS), used(("clock", {}))],
            "tool_use",
        ),
    ],
)
async def test_stream_and_body_say_the_same(http, monkeypatch, text, content, reason, step):
    let_think(monkeypatch)
    whole, stream = engine(text), engine(text)
    whole.tokens_per_step = stream.tokens_per_step = step
    message = reply(await asked(whole, http, tools=TOOLS))
    streamed, end, usage = folded(events(await asked(stream, http, tools=TOOLS, stream=True)))
    assert without_ids(message.content) == without_ids(streamed) == content
    assert message.stop_reason == end.stop_reason == reason
    assert message.usage == usage


async def test_the_bytes_of_a_body(http):
    answer = await asked(engine(), http)
    found = answer.json()
    assert found.pop("id").startswith("msg_")
    assert found == {
        "type": "message",
        "role": "assistant",
        "model": "test/model",
        "content": [{"type": "text", "text": "Yes."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("<user>Rain?<end><assistant>"),
            "output_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_the_order_of_events(http, monkeypatch):
    let_think(monkeypatch)
    text = "<think>H</think>R" + HERMES.write([("clock", {})])
    one = engine(text)
    one.tokens_per_step = 1000
    answer = await asked(one, http, tools=TOOLS, stream=True)
    told = [line[7:] for line in answer.body.decode().splitlines() if line.startswith("event: ")]
    assert told == [
        "message_start",
        *("content_block_start", "content_block_delta"),  # a thought
        *("content_block_delta", "content_block_stop"),  # its signature
        *("content_block_start", "content_block_delta", "content_block_stop"),  # a text
        *("content_block_start", "content_block_delta", "content_block_delta"),  # a call: { and }
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "text/event-stream"


async def test_what_is_cached_is_counted_apart(http):
    one = engine()
    one.cached = {0: 9, 1: 9}
    async with served(one, http) as server:
        client = await server.connect()
        message = reply(await client.post(PATH, BODY))
        start, *_, delta, _ = events(await client.post(PATH, {**BODY, "stream": True}))
    prompt = len("<user>Rain?<end><assistant>")
    details = replies.MessageTokensDetails(0)
    expected = replies.MessageUsage(prompt - 9, 5, 0, 9, details)
    assert message.usage == delta.usage == expected
    assert start.message.usage == replies.MessageUsage(prompt, 0)


# ---- how an answer ends --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_reasons(stream):
    async def ended(text: str = "Yes. No.", limits: ServedLimits = LIMITS, **more: Any) -> Any:
        answer = await asked(engine(text, limits=limits), stream=stream, **more)
        if not stream:
            found = reply(answer)
            return found.stop_reason, found.stop_sequence, found.content
        content, end, _ = folded(events(answer))
        return end.stop_reason, end.stop_sequence, content

    whole = [replies.TextContent("Yes. No.")]
    assert await ended() == ("end_turn", None, whole)
    assert await ended(max_tokens=1) == ("max_tokens", None, [replies.TextContent("Y")])
    stops = ["x", "No", "y", "z", "Yes! ", "u"]
    cut = [replies.TextContent("Yes. ")]
    assert await ended(stop_sequences=stops) == ("stop_sequence", "No", cut)
    # There is room for 3 tokens behind the prompt, whatever is asked for.
    small = ServedLimits(max_input_tokens=27, max_total_tokens=30)
    reason = "model_context_window_exceeded"
    assert await ended(limits=small) == (reason, None, [replies.TextContent("Yes")])
    assert (await ended(limits=small, max_tokens=3))[0] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_cut_off(stream):
    answer = await asked(engine(HERMES.write([ROME])), tools=TOOLS, max_tokens=50, stream=stream)
    if stream:
        told = events(answer)
        assert told[-2].delta.stop_reason == "max_tokens"
        assert isinstance(told[1].content_block, replies.ToolUseContent)
        return
    message = reply(answer)
    assert message.stop_reason == "max_tokens"
    (block,) = message.content
    assert isinstance(block, replies.ToolUseContent) and block.input == {}


@pytest.mark.parametrize("said", ["Yes.", "", HERMES.write([ROME])])
async def test_no_tokens_at_all_warm_the_cache(said):
    one = engine(said)
    message = reply(await asked(one, max_tokens=0, tools=TOOLS))
    assert (message.content, message.stop_reason, message.stop_sequence) == ([], "max_tokens", None)
    assert message.usage.output_tokens == 0 < message.usage.input_tokens
    assert one.submitted[0].stopping.max_new_tokens == 1
