"""Anthropic's Messages: what messages say of their conversation beside their words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.router.http.dialects.anthropic_answers import (
    ASKED,
    COUNT,
    TOOLS,
    asked,
    error,
    prompt_of,
    reply,
)
from tests.router.http.dialects.conversations import engine, prompt
from tgi_trio.router.http.dialects.anthropic import replies, schema
from tgi_trio.router.http.dialects.anthropic.updates import read_updates
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

WEATHER, CLOCK = TOOLS
LATE = {"role": "system", "content": "It is late."}
EFFORT = "{{ reasoning_effort | default('none was said') }}"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def added(tool: Any) -> dict[str, Any]:
    return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}


def changed(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "tool": {"type": "tool_reference", "name": name}}


SUMMARY = {"type": "compaction", "content": "We spoke of rain.", "encrypted_content": "x"}
TOLD = "Summary of what was said and done until here:\n\nWe spoke of rain."


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        # What a summary stands for may still be there, or not.
        ([said("assistant", SUMMARY), *ASKED], f"<assistant>{TOLD}<end><user>Rain?<end>"),
        (
            [*ASKED, said("assistant", text("a"), SUMMARY, text("b")), said("user", text("c"))],
            f"<assistant>{TOLD}\n\nb<end><user>c<end>",
        ),
        (
            [said("assistant", {**SUMMARY, "content": "old"}), said("assistant", SUMMARY), *ASKED],
            f"<assistant>{TOLD}<end><user>Rain?<end>",
        ),
        ([said("user", SUMMARY, text("c"))], f"<user>{TOLD}\n\nc<end>"),
        # One that failed stands for nothing.
        (
            [*ASKED, said("assistant", text("a"), {**SUMMARY, "content": None}), *ASKED],
            "<user>Rain?<end><assistant>a<end><user>Rain?<end>",
        ),
    ],
)
async def test_a_summary_takes_the_place_of_what_it_tells(messages: Any, shown: str) -> None:
    assert (await prompt_of(messages=messages)).removeprefix("<user><end>") == f"{shown}<assistant>"


@pytest.mark.parametrize("content", ["", 1, [text("x")]])
async def test_a_summary_that_cannot_be_read_is_refused(content: Any) -> None:
    """Most of the conversation would be missing."""
    answer = await asked(
        engine(), messages=[said("assistant", {**SUMMARY, "content": content}), *ASKED]
    )
    status, _, message = error(answer)
    assert status == 400 and "messages[0].content[0].content: expected a text" in message


async def test_a_tool_that_comes_later_can_be_called() -> None:
    one = engine(HERMES.write([("weather", {"city": "Rome"})]))
    messages = [*ASKED, said("system", added(WEATHER))]
    answer = await asked(one, messages=messages, tools=[CLOCK])
    (call,) = reply(answer).content
    assert isinstance(call, replies.ToolUseContent) and call.name == "weather"
    assert prompt(one, answer) == await prompt_of(tools=[CLOCK, WEATHER])
    again = {**CLOCK, "description": "Of a town"}
    assert await prompt_of(
        messages=[*ASKED, said("system", added(again))], tools=TOOLS
    ) == await prompt_of(tools=[WEATHER, again])
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    assert await prompt_of(messages=[*ASKED, said("system", added(hosted))]) == await prompt_of()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([changed("tool_removal", "weather")], {"clock"}),
        ([changed("tool_removal", "weather"), changed("tool_addition", "weather")], None),
        ([changed("tool_removal", "weather"), added(WEATHER)], None),
        ([changed("tool_removal", "other")], None),
        ([added(WEATHER), changed("tool_removal", "weather")], {"clock"}),
    ],
)
async def test_a_tool_that_is_withdrawn_is_not_called(changes: Any, names: Any) -> None:
    one = engine("Prose.")
    answer = await asked(one, messages=[*ASKED, said("system", *changes)], tools=TOOLS)
    assert prompt(one, answer) == await prompt_of(tools=TOOLS)  # it is found cached
    grammar = one.submitted[0].sampling.grammar
    assert {name for name in ("weather", "clock") if name in grammar} == (
        names or {"weather", "clock"}
    )


async def test_no_call_can_be_demanded_where_all_tools_are_withdrawn() -> None:
    gone = said("system", changed("tool_removal", "clock"))
    options: dict[str, Any] = {"messages": [*ASKED, gone], "tools": [CLOCK]}
    assert error(await asked(engine(), tool_choice={"type": "any"}, **options))[0] == 400
    named = error(await asked(engine(), tool_choice={"type": "tool", "name": "clock"}, **options))
    assert named[0] == 400 and "clock" in named[2]
    assert (await asked(engine(), **options)).status == 200


async def test_changes_of_tools_that_a_summary_has_told() -> None:
    changes = [added(WEATHER), changed("tool_removal", "clock")]
    summary = said("assistant", {**SUMMARY, "tool_changes": changes})
    one = engine("Prose.")
    shown = prompt(one, await asked(one, messages=[summary, *ASKED], tools=[CLOCK]))
    names = [each["function"]["name"] for each in json.loads(shown[: shown.index("<")])]
    assert names == ["clock", "weather"] and "clock" not in one.submitted[0].sampling.grammar


@pytest.mark.parametrize(
    ("messages", "effort"),
    [
        (ASKED, "low"),
        ([*ASKED, {"role": "system", "output_config": {"effort": "high"}}], "high"),
        ([{**LATE, "output_config": {"effort": "max"}}, *ASKED, LATE], "max"),
        ([*ASKED, {**LATE, "output_config": {}}], "low"),
    ],
)
async def test_the_last_effort_counts(messages: Any, effort: str) -> None:
    one = engine(template=EFFORT)
    answer = await asked(one, messages=messages, output_config={"effort": "low"})
    assert prompt(one, answer) == effort


async def test_messages_of_the_system_for_one_turn() -> None:
    passing = {**LATE, "clear_at": "next_user_message"}
    shown = "<user>Rain?<end><system>It is late.<end>"
    assert await prompt_of(messages=[*ASKED, passing]) == f"{shown}<assistant>"
    assert await prompt_of(messages=[*ASKED, passing, *ASKED]) == await prompt_of(
        messages=[*ASKED, *ASKED]
    )
    staying = {**LATE, "clear_at": "never"}
    assert shown in await prompt_of(messages=[*ASKED, staying, *ASKED])


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
async def test_a_message_of_nothing_is_refused(role: str) -> None:
    status, _, message = error(await asked(engine(), messages=[*ASKED, {"role": role}]))
    assert status == 400 and "messages[1]: missing field `content`" in message


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"type": "tool_addition"}, "messages[1].content[0].tool"),
        (
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {}}},
            "messages[1].content[0].tool.definition",
        ),
        (changed("tool_removal", 1), "messages[1].content[0].tool.name"),  # type: ignore[arg-type]
    ],
)
async def test_a_change_that_cannot_be_read_is_refused(change: Any, place: str) -> None:
    status, _, message = error(await asked(engine(), messages=[*ASKED, said("system", change)]))
    assert status == 400 and f"{place}: " in message


@pytest.mark.parametrize(
    "field",
    [
        {"thread": {"type": "continue", "previous_message_id": "msg_1"}},
        {"compaction": {"type": "summarize"}},
    ],
)
async def test_what_would_be_another_answer_is_refused(field: dict[str, Any]) -> None:
    """A thread's messages are its last ones: the answer would know nothing of the others."""
    (name,) = field
    status, _, message = error(await asked(engine(), **field))
    assert status == 400 and f"`{name}` is not supported" in message
    nothing: dict[str, Any] = {name: None}
    assert (await asked(engine(), **nothing)).status == 200
    count = await asked(engine(), path=COUNT, max_tokens=..., **field)
    assert count.status == (400 if name == "thread" else 200)  # as Anthropic's: it is ignored there


async def test_thoughts_that_are_told_of_are_shown_whole() -> None:
    thinking = {"type": "adaptive", "display": "updates"}
    assert (await asked(engine(), thinking=thinking)).status == 200


class Compared(str):
    """A name that counts how often any is compared with another text."""

    times = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)


async def test_tools_that_come_later_are_not_each_compared_with_all() -> None:
    """Twenty thousand of them took six seconds of the processor."""
    many = 100
    tools = [schema.ToolDefinition(Compared(f"first_{i}")) for i in range(many)]
    later = [added({"name": f"later_{i}", "input_schema": {}}) for i in range(many)]
    asked = msgspec.convert([*ASKED, said("system", *later)], list[schema.InputMessage])
    request = schema.CountTokensRequest(model="tgi", messages=asked, tools=tools)
    assert len(read_updates(request).tools) == 2 * many
    assert Compared.times <= many
