"""Resolves JSON schemas into plain alternatives, for values that are not written as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tgi_trio.errors import ValidationError
from tgi_trio.router.text.closing import follow_pointer

Schema = dict[str, Any]

_MOST = 200  # most alternatives of one value
_DEEPEST = 50  # most references and compositions that lead to one
_LARGEST = frozenset({"minLength", "minItems", "minimum", "exclusiveMinimum"})
_SMALLEST = frozenset({"maxLength", "maxItems", "maximum", "exclusiveMaximum"})
_OF_OBJECTS = frozenset({"properties", "additionalProperties", "required", "patternProperties"})
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})


def find_target(reference: str, root: Schema) -> Schema:
    """Return the schema to which a reference into the root schema points; {} if there is none."""
    return follow_pointer(root, reference.partition("#")[2]) or {}


def list_alternatives(schema: Any, root: Schema) -> list[Schema]:
    """Return plain schemas; a value fits `schema` if it fits one of them.

    Plain schemas have neither references nor compositions, and at most one `type`; without it, any
    value fits. Raises ValidationError for too many alternatives and for endless references.
    """
    return list(_unfold(schema, root, 0))


def _unfold(schema: Any, root: Schema, depth: int) -> Iterator[Schema]:
    if schema is False:
        return
    if not isinstance(schema, dict):
        yield {}
        return
    if depth > _DEEPEST:
        raise ValidationError("grammar is not valid: references of a schema lead nowhere")
    for i, each in enumerate(_unfold_once(schema, root, depth)):
        if i >= _MOST:
            raise ValidationError(
                f"grammar is not valid: a value has more than {_MOST} alternatives"
            )
        yield each


def _unfold_once(schema: Schema, root: Schema, depth: int) -> Iterator[Schema]:
    rest = {key: value for key, value in schema.items() if key not in ("$ref", "$defs")}
    if "$ref" in schema:
        target = find_target(str(schema["$ref"]), root)
        yield from _unfold(_merge(target, rest), root, depth + 1)
        return
    if isinstance(parts := rest.pop("allOf", None), list):
        for part in parts:
            if isinstance(part, dict) and "$ref" in part:
                part = _merge(
                    find_target(str(part["$ref"]), root),
                    {key: value for key, value in part.items() if key != "$ref"},
                )
            rest = _merge(rest, part)
        yield from _unfold(rest, root, depth + 1)
        return
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := rest.pop(key, None), list):
            for choice in choices:
                if choice is not False:
                    inner = choice if isinstance(choice, dict) else {}
                    if "$ref" in inner:
                        target = find_target(str(inner["$ref"]), root)
                        inner = {**target, **{k: v for k, v in inner.items() if k != "$ref"}}
                    yield from _unfold(_merge(rest, inner), root, depth + 1)
            return
    types = rest.get("type")
    if isinstance(types, list):
        for each in types:
            yield {**rest, "type": each}
        return
    yield rest


def _merge(one: Schema, other: Any) -> Schema:
    """Return a schema for values that fit both."""
    if not isinstance(other, dict):
        return one
    merged = dict(one)
    for key, value in other.items():
        if key not in merged:
            merged[key] = value
        elif key == "properties":
            names = dict(merged[key])
            for name, each in value.items():
                names[name] = {"allOf": [names[name], each]} if name in names else each
            merged[key] = names
        elif key in ("required", "allOf"):
            merged[key] = [*merged[key], *value]
        elif key == "enum":
            merged[key] = [each for each in merged[key] if each in value]
        elif key == "pattern":
            merged[key] = (*_listed(merged[key]), *_listed(value))
        elif key == "type":
            both = [each for each in _listed(merged[key]) if each in _listed(value)]
            merged[key] = both[0] if len(both) == 1 else both or value
        elif key in ("anyOf", "oneOf"):
            merged["allOf"] = [*merged.get("allOf", []), {key: value}]
        elif key in _LARGEST or key in _SMALLEST:
            merged[key] = (max if key in _LARGEST else min)(merged[key], value)
        else:
            merged[key] = value
    return merged


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def find_type(schema: Schema) -> str | None:
    """Return the type of a plain schema's values; None: any."""
    if "type" in schema:
        return str(schema["type"])
    if _OF_OBJECTS & schema.keys():
        return "object"
    return "array" if _OF_ARRAYS & schema.keys() else None


def find_literals(schema: Schema) -> list[Any] | None:
    """Return the values that a plain schema enumerates; None if it does not."""
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    if not isinstance(found, list):
        return None
    wanted = schema.get("type")
    return [each for each in found if wanted is None or name_type(each) in _widen(wanted)]


def _widen(name: str) -> tuple[str, ...]:
    return ("number", "integer") if name == "number" else (name,)


def name_type(value: Any) -> str:
    """Return JSON Schema's name for the type of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    for kind, name in ((float, "number"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def with_definitions(schema: Any, root: Schema) -> Any:
    """Return a part of the root schema with the definitions that it may refer to."""
    if not isinstance(schema, dict):
        return schema
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**schema, **{key: value for key, value in shared.items() if key not in schema}}


@dataclass(frozen=True, slots=True)
class Members:
    """The members that an object may have."""

    listed: dict[str, Any]  # name -> schema, in the schema's order
    required: frozenset[str]
    more: Any  # the schema of members that are not listed; False: not allowed

    @property
    def items(self) -> list[tuple[str, Any, bool]]:
        """Return (name, schema, whether it is required) of each listed member."""
        return [(name, each, name in self.required) for name, each in self.listed.items()]


def find_members(schema: Schema) -> Members:
    """Return the members of a plain schema of objects: its properties; any if it has none."""
    properties = schema.get("properties")
    listed: dict[str, Any] = dict(properties) if isinstance(properties, dict) else {}
    required = [name for name in schema.get("required") or () if isinstance(name, str)]
    listed |= {name: {} for name in required if name not in listed}
    more = schema.get("additionalProperties", "properties" not in schema)
    listed = {name: each for name, each in listed.items() if each is not False}
    return Members(listed, frozenset(required), more)
