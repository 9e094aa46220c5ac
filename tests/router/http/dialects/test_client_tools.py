"""Anthropic's Messages: tools that Anthropic defines and clients run."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.router.http.dialects.anthropic_answers import (
    ASKED,
    asked,
    error,
    events,
    folded,
    prompt_of,
    reply,
    used,
    without_ids,
)
from tests.router.http.dialects.conversations import TEMPLATE, engine
from tests.router.text.families import BY_NAME, template_of
from tests.router.text.test_answer_grammar import model_of, use_of
from tgi_trio.router.http.dialects.anthropic.client_tools import find_client_tool
from tgi_trio.router.text.tools.call_formats import HERMES
from tgi_trio.router.text.tools.functions import Function
from tgi_trio.router.text.tools.probe import find_call_style

BASH = {"type": "bash_20250124", "name": "bash"}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
MEMORY = {"type": "memory_20250818", "name": "memory"}
VIEW = {"command": "view", "path": "/a.txt", "view_range": [1, -1]}


@pytest.mark.trio
async def test_a_model_is_shown_all_parameters() -> None:
    prompt = await prompt_of(tools=[BASH, EDITOR, MEMORY])
    shown = [each["function"] for each in json.loads(prompt[: prompt.index("<user>")])]
    assert [each["name"] for each in shown] == [BASH["name"], EDITOR["name"], MEMORY["name"]]
    bash, editor, memory = (each["parameters"]["properties"] for each in shown)
    assert list(bash) == ["command", "restart"]
    assert editor["command"]["enum"] == ["view", "create", "str_replace", "insert"]
    assert memory["command"]["enum"][-2:] == ["delete", "rename"]
    assert {"view_range", "file_text", "insert_text"} <= editor.keys() < memory.keys()
    assert all(each["description"] for each in shown)


@pytest.mark.trio
async def test_a_call_and_its_form() -> None:
    name = str(EDITOR["name"])
    text = HERMES.write([(name, VIEW)])
    one = engine(text)
    content = without_ids(reply(await asked(one, tools=[EDITOR])).content)
    told, end, _ = folded(events(await asked(engine(text), tools=[EDITOR], stream=True)))
    assert content == without_ids(told) == [used((name, VIEW))]
    assert end.stop_reason == "tool_use"
    grammar = one.submitted[0].sampling.grammar
    assert all(word in grammar for word in ("str_replace", "insert_line", "view_range"))
    assert "undo_edit" not in grammar
    chosen = engine(text)
    choice = {"type": "tool", "name": name}
    assert (await asked(chosen, tools=[BASH, EDITOR], tool_choice=choice)).status == 200
    assert "restart" not in chosen.submitted[0].sampling.grammar


@pytest.mark.trio
@pytest.mark.parametrize("family", ["qwen3-coder", "gemma-4", "lfm2.5", "deepseek-v3.2"])
async def test_what_families_write_is_of_the_right_types(family: str) -> None:
    """Numbers and lists are no texts, though each command has fields of its own."""
    form = find_call_style(template_of(family), BY_NAME[family].added).format
    one = engine(form.write([(str(EDITOR["name"]), VIEW)]), TEMPLATE)
    one.chat_template = template_of(family)
    options: dict[str, Any] = {"thinking": {"type": "disabled"}, "max_tokens": 900}
    (call,) = without_ids(reply(await asked(one, tools=[EDITOR], **options)).content)
    assert call == used((str(EDITOR["name"]), VIEW))


@pytest.mark.trio
async def test_a_tool_without_its_name_is_refused() -> None:
    status, _, message = error(await asked(engine(), tools=[{"type": "bash_20250124"}]))
    assert status == 400 and "tools[0]: missing field `name`" in message


@pytest.mark.trio
@pytest.mark.parametrize("kind", ["computer_20251124", "web_search_20250305", "bash", "bash_x", ""])
async def test_others_are_ignored(kind: str) -> None:
    tool = {"type": kind, "name": "bash"}
    assert await prompt_of(tools=[tool]) == await prompt_of(messages=ASKED)


FITTING: list[tuple[str, dict[str, Any]]] = [
    ("bash_20241022", {"command": "ls"}),
    ("bash_20250124", {"restart": True}),
    ("text_editor_20241022", {"command": "undo_edit", "path": "/a"}),
    (
        "text_editor_20250429",
        {"command": "insert", "path": "/a", "insert_line": 0, "new_str": "x"},
    ),
    ("text_editor_20250728", VIEW),
    ("text_editor_20250728", {"command": "create", "path": "/a", "file_text": ""}),
]
UNFIT: list[tuple[str, dict[str, Any]]] = [
    ("bash_20250124", {}),
    ("bash_20250124", {"restart": False}),
    ("text_editor_20250728", {"command": "view"}),
    ("text_editor_20250728", {"command": "undo_edit", "path": "/a"}),
    ("text_editor_20250728", {**VIEW, "file_text": "x"}),
    ("memory_20250818", {"command": "rename", "path": "/a"}),
]


@pytest.mark.parametrize(("kind", "arguments"), FITTING)
def test_arguments_that_fit(kind: str, arguments: dict[str, Any]) -> None:
    tool = find_client_tool(kind)
    assert tool is not None
    jsonschema.validate(arguments, tool.accepted)
    jsonschema.validate(arguments, tool.shown)


@pytest.mark.parametrize(("kind", "arguments"), UNFIT)
def test_arguments_that_do_not(kind: str, arguments: dict[str, Any]) -> None:
    tool = find_client_tool(kind)
    assert tool is not None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(arguments, tool.accepted)


def test_the_commands_of_a_memory_are_those_of_the_sdk() -> None:
    beta = pytest.importorskip("anthropic.types.beta", reason="pip install -e '.[sdks]'")
    models = [
        getattr(beta, name)
        for name in dir(beta)
        if name.startswith("BetaMemoryTool20250818") and name.endswith("Command")
    ]
    models = [each for each in models if hasattr(each, "model_fields")]
    tool = find_client_tool("memory_20250818")
    assert tool is not None and len(models) == len(tool.accepted["anyOf"]) == 6
    for model in models:
        fields = model.model_fields
        (command,) = fields["command"].annotation.__args__
        (mine,) = [
            each
            for each in tool.accepted["anyOf"]
            if each["properties"]["command"]["enum"] == [command]
        ]
        assert mine["properties"].keys() == fields.keys()
        needed = {name for name, field in fields.items() if field.is_required()}
        assert set(mine["required"]) == needed


@pytest.mark.parametrize("form", ["hermes", "qwen-xml", "gemma-4", "lfm2", "dsml-v3.2", "glm"])
def test_a_model_is_held_to_one_command(form: str) -> None:
    model = model_of(form, "tokens")
    for kind, arguments, fits in [
        *((*each, True) for each in FITTING),
        *((*each, False) for each in UNFIT),
    ]:
        tool = find_client_tool(kind)
        assert tool is not None
        use = use_of(Function.of("f", tool.accepted), required=True)
        text = model.form.write([("f", arguments)])
        assert model.accepts(model.matcher(use), text) is fits, (kind, text)
