"""Custom tools of OpenAI's APIs: their input is one text, which a grammar may constrain.

The model sees functions with one argument, `input`. Clients get that text as the call's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from tgi_trio.errors import ToolError, ValidationError
from tgi_trio.router.text import grammars
from tgi_trio.router.text.lark_regex import lark_regex
from tgi_trio.router.text.tools.functions import Function

INPUT: Final = "input"  # the only argument


def custom_function(name: str, form: Any, most: int) -> Function:
    """Return the function that stands for a custom tool.

    `form`: `{"type": "text"}`, `{"type": "grammar", "syntax": ..., "definition": ...}`, or None for
    any text. `most`: bytes that its grammar may have. Raises ToolError.
    """
    pattern = _pattern(name, form, most)
    schema = _text_schema() if pattern is None else _text_schema(pattern=pattern)
    return Function.of(name, schema, "format")


def shown_parameters(form: Any) -> dict[str, Any]:
    """Return a custom tool's parameters as the model sees them, with its grammar."""
    if not isinstance(form, Mapping) or form.get("type") != "grammar":
        return _text_schema()
    return _text_schema(description=f"{form.get('syntax')} grammar:\n{form.get('definition')}")


def read_input(arguments: str) -> str:
    """Return the text of a call from its arguments, JSON; empty if the call was cut off."""
    with suppress(msgspec.DecodeError, RecursionError):
        found = msgspec.json.decode(arguments or "{}")
        if isinstance(found, dict) and isinstance(text := found.get(INPUT), str):
            return text
    return ""


def _text_schema(**more: Any) -> dict[str, Any]:
    """Return the schema of an object whose only member is a text."""
    properties = {INPUT: {"type": "string", **more}}
    return {"type": "object", "properties": properties, "required": [INPUT]}


def _pattern(name: str, form: Any, most: int) -> str | None:
    """Return the regular expression for the text; None: any text. Raises ToolError."""
    if form is None:
        return None
    where = f"the `format` of `{name}`"
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "grammar"):
        raise ToolError(f"{where}: its `type` is neither `text` nor `grammar`")
    if form["type"] == "text":
        return None
    definition = form.get("definition")
    if not isinstance(definition, str):
        raise ToolError(f"{where}: a grammar needs `definition`, a text")
    try:
        grammars.check_size(definition, most)
        match form.get("syntax"):
            case "regex":
                return f"^(?:{definition})$"
            case "lark":
                return f"^(?:{lark_regex(definition, most)})$"
    except ValidationError as error:
        raise ToolError(f"{where}: {error}") from error
    raise ToolError(f"{where}: its `syntax` is neither `lark` nor `regex`")
