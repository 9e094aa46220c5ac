"""What clients write about the form of an answer, in TGI's shapes and OpenAI's, as one grammar.

| type | native `grammar`, and `response_format` | OpenAI's `response_format` |
|---|---|---|
| `json`, `json_object` | `value`: a schema, or JSON text of one | nothing more: any object |
| `json_schema` | `value`: `{"name", "schema"}` | `json_schema`: `{"name", "schema", "strict"}` |
| `regex`, `lark` | `value`: text | |
| `choice` | `value`: texts | |
| `text` | | anything |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from tgi_trio.errors import ValidationError
from tgi_trio.router.http import schema
from tgi_trio.router.text import grammars

_UNSUPPORTED = "grammar is not supported"  # TGI's words for a value of another kind


def native_grammar(given: schema.GrammarType | None) -> str | None:
    """Return the grammar of `parameters.grammar`; raises ValidationError and BodyRejected."""
    if given is None:
        return None
    return _BUILDERS[given.type]("parameters.grammar.value", given.value)


def response_grammar(given: schema.ResponseFormat | None) -> str | None:
    """Return the grammar of `response_format`; raises ValidationError and BodyRejected."""
    if given is None or given.type == "text":
        return None
    if given.json_schema is not None:
        return _named_schema("response_format.json_schema", given.json_schema)
    if given.type == "json_object" and given.value is None:
        return grammars.json_object()
    if given.value is None:
        wanted = "json_schema" if given.type == "json_schema" else "value"
        raise schema.invalid("response_format", f"missing field `{wanted}`")
    return _BUILDERS[given.type]("response_format.value", given.value)


def _schema(path: str, value: Any) -> str:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValidationError(f"grammar is not valid: {error}") from error
        if not isinstance(value, dict | bool):
            raise ValidationError("grammar is not valid: a schema is an object or a boolean")
    elif not isinstance(value, dict):
        raise ValidationError(_UNSUPPORTED)
    return grammars.json_schema(value)


def _named_schema(path: str, value: Any) -> str:
    if not isinstance(value, dict) or "schema" not in value:
        raise schema.invalid(path, "missing field `schema`")
    wanted = value["schema"]
    if not isinstance(wanted, dict | bool):
        raise ValidationError(_UNSUPPORTED)
    return grammars.json_schema(wanted)


def _text(build: Callable[[str], str]) -> Callable[[str, Any], str]:
    return lambda path, value: build(schema.converted(value, str, path))


def _choice(path: str, value: Any) -> str:
    return grammars.choice(schema.converted(value, list[str], path))


_BUILDERS: Mapping[str, Callable[[str, Any], str]] = {
    "json": _schema,
    "json_object": _schema,
    "json_schema": _named_schema,
    "regex": _text(grammars.regex),
    "lark": _text(grammars.lark),
    "choice": _choice,
}
