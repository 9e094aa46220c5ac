"""Finds a model's call format by signs in its template, and compares it with what that renders.

The template is rendered with one call and with two. The first of a row and its variants that writes
the same is used, so that the grammar forces the white space of the template. If none does, the row
may be wrong for this model: it is used all the same, and the difference is reported.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_trio.errors import TemplateError
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.arguments_json import JSON, write_json
from tgi_trio.router.text.tools.call_formats import HERMES, find_format
from tgi_trio.router.text.tools.format import Format

_NAMES = ("sentinel_first", "sentinel_other")
_VALUE = "SENTINEL"
_ARGUMENTS = {"key": _VALUE}
_SHOWN = 160  # characters of a rendered template that are displayed


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How the calls of one model are written, in answers and in its template."""

    format: Format = HERMES
    as_text: bool = False  # the template accepts the arguments of past calls only as JSON text
    as_objects: bool = False  # and here only as objects
    problem: str = ""  # what the template writes instead; "" if it writes the same

    def shape(self, arguments: Any) -> Any:
        """Return the arguments of a past call in the form that the template accepts."""
        if isinstance(arguments, dict):
            return write_json(arguments) if self.as_text else arguments
        if self.as_objects:
            return {"arguments": arguments}  # not an object: what the model wrote
        return arguments if isinstance(arguments, str) else write_json(arguments)


def find_call_style(template: ChatTemplate | None, tokens: Collection[str]) -> CallStyle:
    """Return how the model of a template writes calls.

    `tokens`: the tokenizer's added tokens.
    """
    if template is None:
        return CallStyle()
    form = find_format(template.source(tools=True), tokens)
    shown = {each: _render(template, form, 1, each) for each in (False, True)}
    as_text = shown[False] is None and shown[True] is not None
    as_objects = shown[True] is None and shown[False] is not None
    writings = [_render(template, form, calls, as_text) for calls in (2, 1)]
    known = [text for text in writings if text is not None and _VALUE in text]
    for each in (form, *form.variants):
        if known and all(_writes(each, text) for text in known):
            # Whichever variant of harmony matches, both are read, and the row's is forced.
            return CallStyle(form if form.channels else each, as_text, as_objects)
    problem = "" if not known else f"the chat template writes {_excerpt(known[-1])!r}"
    return CallStyle(form, as_text, as_objects, problem)


def _render(template: ChatTemplate, form: Format, calls: int, as_text: bool) -> str | None:
    """Return a rendered conversation with calls; None if the template refuses it."""
    made = [
        {
            "id": id,
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(_ARGUMENTS) if as_text else dict(_ARGUMENTS),
            },
        }
        for name, id in zip(_NAMES[:calls], _ids(form), strict=False)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": made},
        *({"role": "tool", "tool_call_id": each["id"], "content": "."} for each in made),
        {"role": "user", "content": "?"},
    ]
    try:
        return template.render(messages)
    except TemplateError:
        return None


def _ids(form: Format) -> Sequence[str]:
    if form.ids == "counted":
        return [f"functions.{name}:{form.first + i}" for i, name in enumerate(_NAMES)]
    return ["sentinel0", "sentinel1"]


def _writes(form: Format, shown: str) -> bool:
    """Return whether the format writes the calls in `shown` as they are written there.

    If the template has rendered one of two calls, only that one is compared.
    """
    names = [name for name in _NAMES if name in shown]
    ways: list[Any] = [_ARGUMENTS]
    if form.arguments is JSON:
        ways = [json.dumps(_ARGUMENTS), write_json(_ARGUMENTS)]
    return any(form.write([(name, way) for name in names], _ids(form)) in shown for way in ways)


def _excerpt(shown: str) -> str:
    """Return the part of a rendered conversation around its first call."""
    at = shown.find(_NAMES[0])
    return shown[max(0, at - _SHOWN // 2) : at + _SHOWN // 2]
