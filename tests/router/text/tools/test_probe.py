"""How a model writes calls, as its template shows it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.text.families import FAMILIES, template_of
from tests.router.text.template_family import Family
from tests.router.text.test_families import calling
from tests.router.text.tools.test_call_formats import BY_NAME, read_base
from tgi_trio.errors import TemplateError
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.call_formats import HERMES
from tgi_trio.router.text.tools.ids import fit_ids, make_ids
from tgi_trio.router.text.tools.probe import CallStyle, find_call_style
from tgi_trio.router.text.turns import PastCall, Turn

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@EACH
def test_the_row_is_held_against_the_template(family: Family) -> None:
    style = find_call_style(template_of(family.name), family.added)
    base = BY_NAME[read_base(family.format)]
    assert style.format is (base if base.channels else BY_NAME[family.format])
    assert style.problem == ""
    assert style.as_text == (family.arguments == "text")


@pytest.mark.sampled(3)
@EACH
@pytest.mark.parametrize("arguments", [{"x": 1}, {}, "no JSON", [1]], ids=str)
def test_past_calls_are_shown_in_a_shape_that_renders(family: Family, arguments: Any) -> None:
    style = find_call_style(template_of(family.name), family.added)
    try:
        template_of(family.name).render(calling(style.shape(arguments)))
    except TemplateError as error:
        pytest.fail(str(error))


def test_a_template_that_writes_something_else_is_told() -> None:
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}<tool_call>"
        "{{ c.function.name }}: {{ c.function.arguments.key }}</tool_call>{% endfor %}{% endfor %}"
    )
    style = find_call_style(ChatTemplate({"default": source}, {}), ())
    assert style.format is HERMES
    assert "<tool_call>sentinel_first: SENTINEL" in style.problem


def test_templates_that_show_no_calls_are_believed() -> None:
    for source in ("{{ messages }}<tool_call>", "{{ messages[0].content }}"):
        template = ChatTemplate({"default": source}, {})
        assert find_call_style(template, ()).format is HERMES
    silent = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    assert find_call_style(silent, ()).problem == ""
    assert find_call_style(silent, ("<|tool_call_start|>",)).format.name == "lfm2"
    assert find_call_style(None, ()) == CallStyle()


def test_ids_are_counted_where_the_family_counts() -> None:
    new_id = make_ids(BY_NAME["kimi-k2"], past=3)
    assert [new_id("f"), new_id("g")] == ["functions.f:3", "functions.g:4"]
    other = make_ids(HERMES, past=3)
    assert len(other("f")) == 9 and other("f").isalnum() and other("f") != other("f")


def past(*ids: str | None) -> list[Turn]:
    calls = [PastCall("f", {}, id) for id in ids]
    return [
        Turn("user", "?"),
        Turn("assistant", calls=calls),
        *(Turn("tool", "sun", call_id=id) for id in ids),
    ]


def ids_of(turns: list[Turn]) -> tuple[list[str | None], list[str | None]]:
    return [call.id for call in turns[1].calls or ()], [turn.call_id for turn in turns[2:]]


@pytest.mark.parametrize("ids", [("call_abc", "toolu_01XYZ"), ("abcdefgh1", "abcdefgh2")])
def test_ids_of_other_apis_become_such_as_the_template_takes(ids: tuple[str, str]) -> None:
    turns = past(*ids)
    assert fit_ids(turns, HERMES) == turns
    for name, pattern in (("mistral", None), ("kimi-k2", ["functions.f:0", "functions.f:1"])):
        form = BY_NAME[name]
        called, answered = ids_of(fit_ids(turns, form))
        assert called == answered and len(set(called)) == 2
        assert pattern is None or called == pattern
        assert ids_of(fit_ids(turns, form)) == (called, answered)
        longer = [*turns, Turn("assistant", calls=[PastCall("g", {}, "call_new")])]
        assert fit_ids(longer, form)[:4] == fit_ids(turns, form)
    kept = ids_of(fit_ids(past("abcdefgh1", "abcdefgh2"), BY_NAME["mistral"]))[0]
    assert kept == ["abcdefgh1", "abcdefgh2"]
    assert all(len(id or "") == 9 for id in ids_of(fit_ids(past("x", None), BY_NAME["mistral"]))[0])
