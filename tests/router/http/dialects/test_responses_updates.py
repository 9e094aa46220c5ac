"""OpenAI's Responses: items that change what holds for the answers behind them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.http.dialects.conversations import CITY, engine, prompt
from tests.router.http.dialects.responses_answers import (
    BODY,
    CLOCK,
    PATH,
    WEATHER,
    asked,
    error,
    events,
    final,
    plain,
    prompt_of,
    reply,
)
from tests.router.http.served import served
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

USER = {"role": "user", "content": "Rain?"}
PATCH = {"type": "custom", "name": "patch", "description": "Of a file"}
MORE = {"type": "additional_tools", "role": "developer", "tools": [WEATHER]}
FOUND = {"type": "tool_search_output", "call_id": "t", "execution": "client", "tools": [WEATHER]}
FORM = {"type": "json_schema", "name": "city", "schema": CITY}
EFFORT = "{{ reasoning_effort | default('none was said') }}"


@pytest.mark.parametrize("added", [MORE, FOUND])
async def test_more_tools_can_be_called(added: dict[str, Any]) -> None:
    one = engine(HERMES.write([("weather", {"city": "Rome"})]))
    answer = await asked(one, tools=[CLOCK], input=[USER, added])
    (call,) = reply(answer).output
    assert isinstance(call, replies.FunctionCallItem) and call.name == "weather"
    shown = prompt(one, answer)
    names = [each["function"]["name"] for each in json.loads(shown[: shown.index("<user>")])]
    assert names == ["clock", "weather"]
    assert await prompt_of(input=[USER, added], tools=[CLOCK]) == await prompt_of(
        tools=[CLOCK, WEATHER]
    )
    chosen = engine()
    choice = {"type": "function", "name": "weather"}
    assert (await asked(chosen, input=[USER, added], tool_choice=choice)).status == 200
    assert "clock" not in await prompt_of(input=[USER, MORE], tools=[CLOCK], tool_choice="none")


async def test_a_tool_that_is_defined_again_is_the_later_one() -> None:
    again = {**WEATHER, "description": "Of a town"}
    expected = await prompt_of(tools=[again, CLOCK])
    more = {**MORE, "tools": [again]}
    assert await prompt_of(tools=[WEATHER, CLOCK], input=[USER, more]) == expected
    told = error(await asked(engine(), input=[USER, {**MORE, "tools": [CLOCK, CLOCK]}]))
    assert told[0] == 400 and "two tools have the name `clock`" in told[-1]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "low"),
        ([{"reasoning": {"effort": "high"}}], "high"),
        ([{"reasoning": {"effort": "high"}}, {"reasoning": {"effort": "minimal"}}], "minimal"),
        ([{"reasoning": {"effort": "high"}}, {"text": {"format": {"type": "text"}}}], "high"),
        ([{"reasoning": {"effort": None}}], "low"),
    ],
)
async def test_the_last_effort_counts(items: list[dict[str, Any]], said: str) -> None:
    one = engine(template=EFFORT)
    updates = [{"type": "configuration_update", **each} for each in items]
    answer = await asked(one, input=[USER, *updates], reasoning={"effort": "low"})
    assert prompt(one, answer) == said


@pytest.mark.parametrize(
    ("request_form", "item_form", "is_form"),
    [
        ({"type": "text"}, FORM, True),
        (FORM, {"type": "text"}, False),
        ({"type": "json_object"}, FORM, True),
    ],
)
async def test_the_last_form_counts(request_form: Any, item_form: Any, is_form: bool) -> None:
    one = engine('{"city":"Rome"}')
    update = {"type": "configuration_update", "text": {"format": item_form}}
    answer = await asked(one, input=[update, USER], text={"format": request_form})
    assert answer.status == 200, answer.body
    assert ('"city"' in one.submitted[0].sampling.grammar) == is_form


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({**MORE, "tools": [{"name": "x"}]}, "input[1].tools[0].type"),
        ({**MORE, "tools": {"type": "function"}}, "input[1].tools"),
        (
            {"type": "configuration_update", "reasoning": {"effort": "huge"}},
            "input[1].reasoning.effort",
        ),
        (
            {"type": "configuration_update", "text": {"format": {"type": "json_schema"}}},
            "input[1].text.format.schema",
        ),
        ({"type": "function_call", "call_id": "1", "arguments": {}}, "input[1].arguments"),
    ],
)
async def test_what_is_wrong_with_an_item_is_named(item: Any, param: str) -> None:
    answer = await asked(engine(), input=[USER, item])
    assert answer.status == 400 and answer.json()["error"]["param"] == param, answer.body


async def test_they_hold_for_what_goes_on_from_them_and_behind_a_compaction() -> None:
    """Tools that came as items are those of the conversation, not of one request."""
    update = {"type": "configuration_update", "text": {"format": FORM}}
    one = engine("Yes.")
    async with served(one) as server:
        client = await server.connect()
        first = await client.post(PATH, {**BODY, "input": [USER, MORE, update]})
        body = {**BODY, "previous_response_id": first.json()["id"], "input": "So?"}
        assert (await client.post(PATH, body)).status == 200
        compacted = await client.post(f"{PATH}/compact", {"input": [USER, MORE, update]})
        assert compacted.status == 200, compacted.body
        items = [*compacted.json()["output"], {"role": "user", "content": "So?"}]
        assert (await client.post(PATH, {**BODY, "input": items})).status == 200
    for i in (1, 3):
        assert '"weather"' in one.prompts[i]
        assert '"city"' in one.submitted[i].sampling.grammar
    assert "weather" in one.prompts[2]  # the same prefix as before
    assert '"city"' not in one.submitted[2].sampling.grammar  # the summary is no answer


async def test_items_that_are_passed_over_may_have_any_shape() -> None:
    searched = {"type": "tool_search_call", "call_id": "t", "arguments": {"query": "rain"}}
    hosted = {"type": "mcp_call", "id": "m", "arguments": "{}", "name": "x", "server_label": "y"}
    assert await prompt_of(input=[USER, searched, hosted]) == await prompt_of()


async def test_custom_tools_of_a_namespace() -> None:
    space = {"type": "namespace", "name": "git", "description": "", "tools": [PATCH, 1, {}]}
    one = engine(HERMES.write([("git.patch", {"input": "+ x"})]))
    body = await asked(one, tools=[space])
    (call,) = reply(body).output
    told = final(events(await asked(one, tools=[space], stream=True))).output
    expected = replies.CustomToolCallItem("", "completed", "", "patch", "+ x", "git")
    id = call.call_id  # type: ignore[union-attr]
    past = {"type": "custom_tool_call", "call_id": id, **{"name": "patch", "namespace": "git"}}
    result = {"type": "custom_tool_call_output", "call_id": id, "output": "done"}
    assert plain([call]) == plain(told) == [expected]
    shown = await prompt_of(input=[USER, {**past, "input": "+ x"}, result])
    called = json.dumps({"name": "git.patch", "arguments": {"input": "+ x"}})
    assert called in shown and f"<tool>done{id.removeprefix('call_')}git.patch<end>" in shown


@pytest.mark.parametrize("name", [{"call_id": "b"}, {"id": "b"}, {"id": "lsh_1"}])
async def test_the_result_of_a_local_shell_names_its_call(name: dict[str, str]) -> None:
    """OpenAI's types have `id` alone, its agents send `call_id`."""
    action = {"type": "exec", "command": ["ls"]}
    call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "b", "action": action}
    result = {"type": "local_shell_call_output", **name, "output": "files"}
    assert "<tool>filesblocal_shell<end>" in await prompt_of(input=[USER, call, result])
