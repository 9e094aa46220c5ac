"""Which way to write calls a template speaks of, and that it is the template's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.text.families import FAMILIES, WRITING, template_of
from tests.router.text.template_family import Family
from tests.router.text.test_families import ARGUMENTS, calling, told
from tests.router.text.tools.test_call_parser import EVERY, find_reader, fold, functions_of, said
from tgi_trio.errors import TemplateError
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.arguments_json import JSON
from tgi_trio.router.text.tools.call_formats import FORMATS, HERMES, find_format
from tgi_trio.router.text.tools.format import Format

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
EACH_WRITING = pytest.mark.parametrize("family", WRITING, ids=lambda family: family.name)
BY_NAME = {form.name: form for form in EVERY}
# Values that look like markup are written by templates as they are.
SAMPLES: list[dict[str, Any]] = [
    ARGUMENTS,
    {},
    {"text": "naïve 雨 🌧"},
    {"list": [1], "x": "line\nline\n"},
    {"a": ["two", {"three": 3}], "flag": True, "none": None},
]


def written(family: Family, arguments: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return what the template writes for calls with these arguments, and their ids."""
    messages = calling({}, calls=len(arguments))
    calls = messages[1]["tool_calls"]
    for i, (call, each) in enumerate(zip(calls, arguments, strict=True)):
        call["function"]["arguments"] = told(family, each)
        if family.ids == "kimi":
            call["id"] = f"functions.f{i}:{i}"
    return template_of(family.name).render(messages), [call["id"] for call in calls]


@EACH
def test_the_format_is_known_by_its_signs(family: Family) -> None:
    assert find_format(family.source, family.added).name == read_base(family.format)


def read_base(name: str) -> str:
    """Return the row whose variant this is."""
    for form in FORMATS:
        if name in (form.name, *(each.name for each in form.variants)):
            return form.name
    raise KeyError(name)


def test_every_format_is_held_to_a_template() -> None:
    assert {read_base(family.format) for family in WRITING} == {form.name for form in FORMATS}


def test_every_format_is_found_before_one_whose_signs_are_fewer() -> None:
    for i, form in enumerate(FORMATS):
        for later in FORMATS[i + 1 :]:
            assert not later.signs or set(form.signs) != set(later.signs), (form.name, later.name)
            assert not set(form.signs) < set(later.signs), (form.name, later.name)
    assert find_format("") is find_format("{{ messages }}") is HERMES


@pytest.mark.sampled(3)
@EACH_WRITING
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("arguments", SAMPLES[:4], ids=str)
def test_the_row_writes_what_the_template_writes(
    family: Family, arguments: dict[str, Any], calls: int
) -> None:
    if calls == 2 and family.calls != "many":
        return
    form = BY_NAME[family.format]
    shown, ids = written(family, [arguments] * calls)
    whole = form.write([(f"f{i}", as_written(form, arguments)) for i in range(calls)], ids)
    assert whole in shown


def as_written(form: Format, arguments: dict[str, Any]) -> Any:
    """Return arguments as the format takes them: templates write JSON with spaces."""
    if form.arguments is JSON:
        return json.dumps(arguments, ensure_ascii=False)
    return arguments


@pytest.mark.sampled(3)
@EACH_WRITING
@pytest.mark.parametrize("arguments", SAMPLES, ids=str)
def test_what_the_template_writes_is_read(family: Family, arguments: dict[str, Any]) -> None:
    form = BY_NAME[family.format]
    shown, _ = written(family, [arguments])
    start = shown.rindex(form.trigger)
    reader = find_reader(form, functions_of([("f0", arguments)]))
    answer = fold([reader.push(character) for character in shown[start:]] + [reader.finish()])
    (name, text), *_ = said(answer)[1]
    assert (name, json.loads(text)) == ("f0", arguments)
    assert reader.complete


@EACH_WRITING
def test_a_value_that_has_the_suffix_in_it_is_written_as_it_is(family: Family) -> None:
    form = BY_NAME[family.format]
    for end in filter(None, (text.strip() for text in (*form.arguments.texts[-1:], form.closing))):
        arguments = {"x": f"a{end}b"}
        try:
            shown, ids = written(family, [arguments])
        except TemplateError:
            pytest.fail("a template refuses a value")
        assert form.write([("f0", as_written(form, arguments))], ids) in shown


def test_llamas_template_is_seen_to_read_tools_although_it_may_set_them() -> None:
    source = (
        "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
        "{%- if tools is not none %}{{ tools | length }}{%- endif %}"
    )
    template = ChatTemplate({"default": source}, {})
    assert template.uses("tools")
    assert template.render([{"role": "user"}], tools=[{}, {}]) == "2"
