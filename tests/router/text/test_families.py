"""The table of families is what their templates do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.text.families import FAMILIES, template_of
from tests.router.text.template_family import FOLDER, Family, Fate, Place
from tgi_trio.errors import TemplateError

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
USER = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "I am."}
ARGUMENTS = {"city": "Zürich", "days": 2}


def calling(arguments: Any, *, calls: int = 1, content: str = "") -> list[dict[str, Any]]:
    """Return a conversation with calls and their results, as templates are given it."""
    made = [
        {
            "id": f"abcdefgh{i}",
            "type": "function",
            "function": {"name": f"f{i}", "arguments": arguments},
        }
        for i in range(calls)
    ]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "sun"} for each in made]
    return [USER, {"role": "assistant", "content": content, "tool_calls": made}, *results]


def fate(family: Family, messages: list[dict[str, Any]], text: str = "SENTINEL") -> Fate:
    try:
        shown = template_of(family.name).render(messages)
    except TemplateError:
        return "error"
    return "ok" if shown.count(text) == 1 else "dropped"


def test_every_fixture_has_a_row() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.jinja")) == sorted(
        family.name for family in FAMILIES
    )


@EACH
def test_roles(family: Family) -> None:
    said = {"role": "system", "content": "SENTINEL"}
    first = {"role": "system", "content": "Be kind."}
    assert fate(family, [said, USER, ANSWER, USER]) == "ok"
    assert fate(family, [first, USER, ANSWER, said, USER]) == family.middle
    assert fate(family, [USER, said]) == family.middle
    developer = {"role": "developer", "content": "SENTINEL"}
    assert fate(family, [developer, USER]) == family.developer
    assert fate(family, [USER, {"role": "user", "content": "SENTINEL"}]) == family.users


@EACH
def test_where_an_answer_begins(family: Family) -> None:
    template = template_of(family.name)
    switches: tuple[tuple[Place | None, Any], ...] = (
        (family.default, {}),
        (family.on, family.switch_on),
        (family.off, family.switch_off),
    )
    for place, variables in switches:
        if place is None:
            continue
        assert family.marks is not None
        prompt = template.render([USER, ANSWER, {**USER, "content": "And HERE"}], **variables)
        tail = prompt[prompt.rindex("HERE") :]
        for header in ("<|start|>assistant",):  # harmony's end mark closes the user's turn, too
            tail = tail[tail.rfind(header) + len(header) :] if header in tail else tail
        start, end = (tail.rfind(mark.strip()) for mark in family.marks)
        if family.begun and tail.endswith(family.begun):
            end = len(tail)
        found = "may-open" if start == end == -1 else "inside" if start > end else "closed"
        assert found == place, variables


def told(family: Family, arguments: Any) -> Any:
    """Return the arguments in the shape that the template takes."""
    if family.arguments == "object":
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


@EACH
def test_arguments_of_earlier_calls(family: Family) -> None:
    shown = "dropped" if family.calls == "none" else "ok"
    assert fate(family, calling(told(family, ARGUMENTS)), "Zürich") == shown
    assert fate(family, calling(told(family, {}))) != "error"
    if family.arguments == "text":
        assert fate(family, calling(ARGUMENTS)) == "error"


@EACH
def test_two_calls_in_one_turn(family: Family) -> None:
    messages = calling(told(family, ARGUMENTS), calls=2)
    if family.calls == "error":
        with pytest.raises(TemplateError):
            template_of(family.name).render(messages)
        return
    shown = template_of(family.name).render(messages).count("Zürich")
    assert shown == {"many": 2, "first": 1, "none": 0}[family.calls]
