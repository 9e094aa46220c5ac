"""Which way to write calls a template speaks of."""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

import json

import pytest

from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.call_formats import FORMATS, HERMES, Format, format_of

# How templates of the families write a call of an earlier turn: of every one the line that says it.
LINES = {
    "hermes": (
        '{{- \'<tool_call>\\n{"name": "\' }}{{- call.name }}{{- \'", "arguments": \' }}'
        "{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    ),
    "mistral": (
        "{{- '[TOOL_CALLS][' }}{{- '{\"name\": \"' + call.name + '\", \"arguments\": ' }}"
        "{{- call.arguments | tojson }}{{- '}]' }}"
    ),
    "mistral-args": "{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments | tojson }}",
    "granite": (
        '{{- \'<|tool_call|>[{"name": "\' + call.name + \'", "arguments": \' }}'
        "{{- call.arguments | tojson }}{{- '}]' }}"
    ),
    "llama-3": (
        "{#- <|start_header_id|> #}{{- '{\"name\": \"' + call.name + '\", ' }}"
        "{{- '\"parameters\": ' }}{{- call.arguments | tojson }}{{- '}' }}"
    ),
    "deepseek-v3": (
        "{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.name }}"
        "{{- '\\n```json\\n' + call.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}"
        "{{- '<｜tool▁calls▁end｜>' }}"
    ),
    "deepseek-v3.1": (
        "{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.name + '<｜tool▁sep｜>' }}"
        "{{- call.arguments | tojson + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
    ),
}


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_call_is_written_as_the_template_of_its_family_writes_it(form: Format) -> None:
    source = LINES[form.name]
    assert format_of(source) is form
    call = {"name": "weather", "arguments": {"city": "Rom"}}
    shown = ChatTemplate({"default": source}, {}).render([{"role": "user"}], call=call)
    assert form.write([("weather", json.dumps({"city": "Rom"}))]) == shown


def test_every_format_is_found_before_one_whose_signs_are_fewer() -> None:
    assert {form.name for form in FORMATS} == set(LINES)
    assert format_of("") is format_of("{{ messages }}") is HERMES


def test_llamas_template_is_seen_to_read_tools_although_it_may_set_them() -> None:
    source = (
        "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
        "{%- if tools is not none %}{{ tools | length }}{%- endif %}"
    )
    template = ChatTemplate({"default": source}, {})
    assert template.uses("tools")
    assert template.render([{"role": "user"}], tools=[{}, {}]) == "2"
