"""OpenAI's Responses: what goes out, in which order, and how it ends."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.router.http.dialects.conversations import PARIS, ROME, TEMPLATE, engine, prompt
from tests.router.http.dialects.responses_answers import TOOLS, asked, events, final, plain, reply
from tests.router.http.thinking import let_think
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.http.dialects.thought_codec import decode_thought
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

DONE: replies.ItemStatus = "completed"
THOUGHT = replies.ReasoningItem("", DONE, [replies.ReasoningTextPart("Hm, rain.")])
RAIN = replies.MessageItem("", DONE, [replies.OutputTextPart("It rains.")])


def called(name: str, arguments: dict[str, Any], **more: Any) -> replies.FunctionCallItem:
    text = json.dumps(arguments, separators=(",", ":"))
    return replies.FunctionCallItem("", DONE, "", name, text, **more)


UPDATE = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}
ACTION = {"command": ["ls", "-l"], "timeout_ms": 5}
SPOKEN = [
    ("It rains.", [RAIN]),
    ("", []),
    ("<think>Hm, rain.</think>It rains.", [THOUGHT, RAIN]),
    (HERMES.write([ROME, PARIS]), [called(*ROME), called(*PARIS)]),
    (
        "<think>Hm, rain.</think>It rains." + HERMES.write([("mcp.now", {}), ("clock", {})]),
        [THOUGHT, RAIN, called("now", {}, namespace="mcp"), called("clock", {})],
    ),
    (
        HERMES.write([("patch", {"input": 'a "b"\n'}), ("local_shell", ACTION)]),
        [
            replies.CustomToolCallItem("", DONE, "", "patch", 'a "b"\n'),
            replies.LocalShellCallItem(
                "", DONE, "", replies.ShellAction(["ls", "-l"], timeout_ms=5)
            ),
        ],
    ),
    (
        HERMES.write([("shell", {"commands": ["ls", "pwd"]}), ("apply_patch", UPDATE)]),
        [
            replies.ShellCallItem("", DONE, "", replies.ShellCommands(["ls", "pwd"])),
            replies.ApplyPatchCallItem(
                "", "completed", "", replies.UpdateFile("a.py", "@@\n-a\n+b")
            ),
        ],
    ),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("text", "output"), SPOKEN)
async def test_stream_and_body_say_the_same(http, monkeypatch, text, output, step):
    let_think(monkeypatch)
    whole, stream = engine(text), engine(text)
    whole.tokens_per_step = stream.tokens_per_step = step
    body = reply(await asked(whole, http, tools=TOOLS))
    streamed = final(events(await asked(stream, http, tools=TOOLS, stream=True)))
    assert plain(body.output) == plain(streamed.output) == output
    assert body.status == streamed.status == "completed"
    assert body.usage is not None and body.usage == streamed.usage
    assert body.usage.total_tokens == body.usage.input_tokens + body.usage.output_tokens


async def test_the_order_of_events(http, monkeypatch):
    let_think(monkeypatch)
    calls = HERMES.write([("clock", {}), ("patch", {"input": "x"}), ("local_shell", ACTION)])
    one = engine("<think>H</think>R" + calls)
    one.tokens_per_step = 1000
    told = events(await asked(one, http, tools=TOOLS, stream=True))
    assert [event.type.removeprefix("response.") for event in told] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta"),
        *("custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "output_item.done"),
        "completed",
    ]


async def test_what_a_response_repeats(http):
    more = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "k",
        "store": True,
        "truncation": "auto",
        "service_tier": "flex",
        "temperature": 0.5,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "max_output_tokens": 100,
    }
    found = (await asked(engine(), http, **more)).json()
    assert found["id"].startswith("resp_") and found["object"] == "response"
    assert found["completed_at"] >= found["created_at"]
    for name in (
        "instructions",
        "metadata",
        "user",
        "prompt_cache_key",
        "temperature",
        "reasoning",
    ):
        assert found[name] == more[name]
    assert found["tools"] == TOOLS and found["parallel_tool_calls"] is False
    assert found["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (found["store"], found["truncation"], found["service_tier"]) == (
        True,
        "disabled",
        "default",
    )
    for name in ("error", "incomplete_details", "previous_response_id"):
        assert found[name] is None
    assert found["output"][0].pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
    assert found["output"] == [
        {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
    ]


@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_thoughts_are_their_own_summary_for_clients_that_ask_for_one(monkeypatch, step):
    let_think(monkeypatch)
    whole, stream = (engine("<think>Hm, rain.</think>It rains.") for _ in range(2))
    stream.tokens_per_step = step
    more = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    body = reply(await asked(whole, **more))
    streamed = events(await asked(stream, stream=True, **more))
    kinds = list(dict.fromkeys(event.type for event in streamed if event.output_index == 0))
    assert kinds == [
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
    ]
    assert {event.summary_index for event in streamed[3:6] if event.output_index == 0} == {0}
    last = final(streamed)
    for found in (body, last):
        thought = found.output[0]
        assert isinstance(thought, replies.ReasoningItem) and thought.content == []
        assert [part.text for part in thought.summary] == ["Hm, rain."]
        assert thought.encrypted_content is not msgspec.UNSET
        assert decode_thought(thought.encrypted_content) == "Hm, rain."
    # Sent back, it is what was thought.
    again = engine(template=TEMPLATE)
    sent = [{"role": "user", "content": "Rain?"}, *msgspec.to_builtins(body.output)]
    sent[1].pop("encrypted_content")
    assert "Hm, rain." in prompt(again, await asked(again, input=[*sent, sent[0]]))


async def test_usage(http):
    one = engine()
    one.cached = {0: 9}
    usage = reply(await asked(one, http)).usage
    prompt = len("<user>Rain?<end><assistant>")
    assert msgspec.to_builtins(usage) == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 9, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 5,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off(stream):
    async def ended(text: str, **more: Any) -> replies.ResponseReply:
        answer = await asked(engine(text), stream=stream, **more)
        found = final(events(answer)) if stream else reply(answer)
        assert found.status == "incomplete"
        assert found.incomplete_details == replies.IncompleteDetails("max_output_tokens")
        return found

    one = await ended("It rains.", max_output_tokens=1)
    assert [(item.status, item.content[0].text) for item in one.output] == [("incomplete", "I")]  # type: ignore[union-attr]
    (call,) = (await ended(HERMES.write([ROME]), max_output_tokens=50, tools=TOOLS)).output
    assert isinstance(call, replies.FunctionCallItem) and call.status == "incomplete"
    small = ServedLimits(max_input_tokens=27, max_total_tokens=30)
    answer = await asked(engine("It rains.", limits=small), max_output_tokens=500)
    assert reply(answer).status == "incomplete"
