"""Reads the fields of structural tags (`structural_tags.py`), and says which of them is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tgi_trio.errors import ValidationError


def read_older(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the older notation as the newer one."""
    tags = []
    for place, each in enumerate(read_list(whole, "structures", "")):
        at = f"structures[{place}]"
        tag = read_object(each, at)
        schema = tag.get("schema")
        if isinstance(schema, str):
            try:
                schema = orjson.loads(schema)
            except orjson.JSONDecodeError as error:
                raise ValidationError(f"`{at}.schema` is no JSON: {error}") from error
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": tag.get("begin"), "content": content, "end": tag.get("end", "")})
    return {"type": "triggered_tags", "triggers": whole.get("triggers"), "tags": tags}


def check_triggers(triggers: Sequence[str], path: str) -> None:
    """Raise ValidationError for triggers that are not there, or of which one contains another."""
    if not triggers or not all(triggers):
        raise ValidationError(f"`{path or 'the structural tag'}` needs triggers that are not empty")
    for one in triggers:
        for other in triggers:
            if one != other and one in other:
                raise ValidationError(
                    f"the trigger `{one}` is a part of `{other}`, which would never be complete"
                )


def read_object(given: Any, path: str) -> Mapping[str, Any]:
    """Return a value that must be an object. Raises ValidationError."""
    if not isinstance(given, dict):
        raise ValidationError(f"`{path}` must be an object")
    return given


def read_text(form: Mapping[str, Any], name: str, path: str) -> str:
    """Return a field that must be a text. Raises ValidationError."""
    value = form.get(name)
    if not isinstance(value, str):
        raise ValidationError(f"`{below(path, name)}` must be a text")
    return value


def read_texts(form: Mapping[str, Any], name: str, path: str) -> list[str]:
    """Return a field that may be a list of texts; absent, it is empty. Raises ValidationError."""
    value = form.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValidationError(f"`{below(path, name)}` must be a list of texts")
    return value


def read_list(form: Mapping[str, Any], name: str, path: str) -> list[Any]:
    """Return a field that must be a list with something in it. Raises ValidationError."""
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise ValidationError(f"`{below(path, name)}` must be a list that is not empty")
    return value


def number_places(values: Sequence[Any], path: str, name: str) -> list[tuple[Any, str]]:
    """Return the values of a list, each with its place."""
    return [(value, f"{below(path, name)}[{i}]") for i, value in enumerate(values)]


def refuse_fields(form: Mapping[str, Any], path: str, names: Sequence[str]) -> None:
    """Raise ValidationError for a field that is not served and not at its default."""
    for name in names:
        if form.get(name) not in (None, False, []):
            raise ValidationError(f"`{below(path, name)}` is not supported: leave it out")


def below(path: str, name: str) -> str:
    """Return the place of a field of what is at `path`."""
    return f"{path}.{name}" if path else name
