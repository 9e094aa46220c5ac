"""Resolves JSON schemas into plain alternatives, for values that are not written as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tgi_trio.errors import ValidationError
from tgi_trio.router.text.closing import follow_pointer
from tgi_trio.router.text.exclusions import identify_value
from tgi_trio.router.text.implied_types import imply_type

Schema = dict[str, Any]

_MOST = 200  # most alternatives of one value
_DEEPEST = 50  # most references and compositions that lead to one
_LARGEST = frozenset({"minLength", "minItems", "minimum", "exclusiveMinimum"})
_SMALLEST = frozenset({"maxLength", "maxItems", "maximum", "exclusiveMaximum"})
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_UNBOUNDED = 1 << 31  # items: no text of any model has so many
_COMPOSED = frozenset({"$ref", "anyOf", "oneOf"})


def find_target(reference: str, root: Schema) -> Schema:
    """Return the schema to which a reference into the root schema points; {} if there is none."""
    return follow_pointer(root, reference.partition("#")[2]) or {}


def list_alternatives(schema: Any, root: Schema) -> list[Schema]:
    """Return plain schemas; a value fits `schema` if it fits one of them. Without any, none does.

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
    rest = {key: value for key, value in _resolve(schema, root).items() if key != "$defs"}
    if "$ref" in rest:
        yield from _unfold(rest, root, depth + 1)
        return
    if isinstance(parts := rest.pop("allOf", None), list):
        if any(part is False for part in parts):
            return
        for part in parts:
            rest = _merge(rest, _resolve(part, root))
        yield from _unfold(rest, root, depth + 1)
        return
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := rest.pop(key, None), list):
            for choice in choices:
                if choice is not False:
                    yield from _unfold(_merge(rest, _resolve(choice, root)), root, depth + 1)
            return
    types = rest.get("type")
    for each in types if isinstance(types, list) else [types]:
        plain = rest if each is None else {**rest, "type": each}
        if find_literals(plain) != [] and not _is_overfull(plain):
            yield plain


def _resolve(schema: Any, root: Schema) -> Any:
    """Return a schema with the target of its reference, if it has one, in place of that.

    The target may be a reference, too.
    """
    if not isinstance(schema, dict) or "$ref" not in schema:
        return _enumerate(schema)
    target = find_target(str(schema["$ref"]), root)
    rest = {key: value for key, value in schema.items() if key != "$ref"}
    return _merge(_enumerate(target), _enumerate(rest))


def _enumerate(schema: Any) -> Any:
    """Return a schema with an enumeration in place of `const`."""
    if not isinstance(schema, dict) or "const" not in schema:
        return schema
    rest = {key: value for key, value in schema.items() if key != "const"}
    return _merge(rest, {"enum": [schema["const"]]})


def _merge(one: Schema, other: Any) -> Schema:
    """Return a schema for values that fit both."""
    if not isinstance(other, dict):
        return one
    merged = dict(one)
    for key, value in other.items():
        merged[key] = _merge_values(key, merged[key], value) if key in merged else value
        if key in _COMPOSED and merged[key] != value:  # both are there, as parts of an `allOf`
            merged["allOf"] = [*merged.get("allOf", []), {key: value}]
    return merged


def _merge_values(key: str, one: Any, other: Any) -> Any:
    """Return what a keyword says if both values of it hold; the first, if it is in `_COMPOSED`."""
    if key in _COMPOSED:
        return one
    if key == "properties":
        both = {name: {"allOf": [one[name], other[name]]} for name in one if name in other}
        return {**one, **other, **both}
    if key in ("required", "allOf"):
        return [*one, *other]
    if key == "enum":
        known = set(map(identify_value, other))
        return [each for each in one if identify_value(each) in known]
    if key == "pattern":
        return (*_listed(one), *_listed(other))
    if key == "type":
        both_types = _common_types(_listed(one), _listed(other))
        return both_types[0] if len(both_types) == 1 else both_types
    if key in _LARGEST or key in _SMALLEST:
        if not isinstance(one, int | float) or not isinstance(other, int | float):
            raise ValidationError(f"grammar is not valid: `{key}` must be a number")
        return (max if key in _LARGEST else min)(one, other)
    if key == "items" and not isinstance(one, list) and not isinstance(other, list):
        return {"allOf": [one, other]}
    return other


def _common_types(one: tuple[Any, ...], other: tuple[Any, ...]) -> list[Any]:
    """Return the types of values that have one of each."""
    found = [each for each in one if _is_within(each, other)]
    return list(dict.fromkeys(found + [each for each in other if _is_within(each, one)]))


def _is_within(kind: Any, kinds: tuple[Any, ...]) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def find_type(schema: Schema) -> str | None:
    """Return the type of a plain schema's values; None: any."""
    return str(schema["type"]) if "type" in schema else imply_type(schema)


def find_literals(schema: Schema) -> list[Any] | None:
    """Return the values that a plain schema enumerates and allows; None if it enumerates none."""
    found = schema.get("enum")
    return [each for each in found if _fits(each, schema)] if isinstance(found, list) else None


def _fits(value: Any, plain: Schema) -> bool:
    """Return whether a value has a plain schema's type, size and length."""
    wanted, kind = plain.get("type"), name_type(value)
    if kind == "number" and float(value).is_integer():
        kind = "integer"
    if wanted is not None and not _is_within(kind, (wanted,)):
        return False
    if kind == "string":
        most = _read_limit(plain, "maxLength", math.inf)
        return _read_limit(plain, "minLength", 0) <= len(value) <= most
    if kind not in ("integer", "number"):
        return True
    least, most = _read_limit(plain, "minimum", -math.inf), _read_limit(plain, "maximum", math.inf)
    above = _read_limit(plain, "exclusiveMinimum", -math.inf)
    below = _read_limit(plain, "exclusiveMaximum", math.inf)
    return bool(least <= value <= most and above < value < below)


def _read_limit(plain: Schema, key: str, default: float) -> float:
    """Return a limit, or the default for what is no number: older schemas have booleans there."""
    found = plain.get(key)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else default


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


def find_members(schema: Schema, root: Schema) -> Members:
    """Return the members of a plain schema of objects: its properties; any if it has none.

    Raises ValidationError for one that must be there and that no value fits.
    """
    properties = schema.get("properties")
    listed: dict[str, Any] = dict(properties) if isinstance(properties, dict) else {}
    required = [name for name in schema.get("required") or () if isinstance(name, str)]
    more = schema.get("additionalProperties", "properties" not in schema)
    listed |= {name: more or {} for name in required if name not in listed}
    for name in [name for name, each in listed.items() if not is_possible(each, root)]:
        del listed[name]
        if name in required:
            raise ValidationError(
                f"grammar is not valid: no value fits the schema of `{name}`, which is required"
            )
    return Members(listed, frozenset(required), more if is_possible(more, root) else False)


@dataclass(frozen=True, slots=True)
class Items:
    """The items that an array may have."""

    first: list[Any]  # schemas, each of the item in its place
    more: Any  # the schema of all that follow; False: none do
    least: int
    most: int | None  # None: any number


def find_items(schema: Schema, root: Schema) -> Items:
    """Return the items of a plain schema of arrays.

    Raises ValidationError for one that needs more of them than can be.
    """
    first, more = _split_items(schema)
    possible = [is_possible(each, root) for each in first]
    if False in possible:
        first, more = first[: possible.index(False)], False
    if not is_possible(more, root):
        more = False
    least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
    if more is False:
        most = len(first) if most is None else min(most, len(first))
    if most is not None and least > most:
        raise ValidationError(
            f"grammar is not valid: an array needs {least} items, and cannot have more than {most}"
        )
    return Items(first[:most], more, least, None if most is None or most >= _UNBOUNDED else most)


def _split_items(schema: Schema) -> tuple[list[Any], Any]:
    """Return the schemas of the first items, and that of all others; older ones have a list."""
    first, more = schema.get("prefixItems"), schema.get("items", {})
    if isinstance(more, list):
        first, more = more, schema.get("additionalItems", {})
    return (list(first) if isinstance(first, list) else []), more


def _is_overfull(plain: Schema) -> bool:
    """Return whether a schema is of arrays that need more items than they may have.

    Raises ValidationError for a count that is none.
    """
    counts = {key: _count(plain, key) for key in _COUNTS}
    if find_type(plain) != "array":
        return False
    first, more = _split_items(plain)
    bounds = [counts["maxItems"], len(first) if more is False else None]
    most = min((each for each in bounds if each is not None), default=None)
    return most is not None and (counts["minItems"] or 0) > most


def _count(plain: Schema, key: str) -> int | None:
    """Return a limit of items or characters; None: there is none. Raises ValidationError."""
    found = plain.get(key, 0)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ValidationError(
            f"grammar is not valid: `{key}` must be a whole number >= 0. "
            f"Given: {json.dumps(found)[:60]}"
        )
    return found if key in plain else None


def is_possible(schema: Any, root: Schema) -> bool:
    """Return whether a value may fit a schema. Raises ValidationError for endless references."""
    return next(_unfold(schema, root, 0), None) is not None
