"""Closes JSON schemas: an object may have its listed properties and no others.

JSON Schema leaves every object open (`additionalProperties` defaults to true), so a model that is
constrained by such a schema may write further properties until its length limit. Clients that send
the schema of a type mean its fields; outlines, and with it TGI, writes exactly those.

`additionalProperties` closes one schema object and ignores the schemas beside it. If several apply
together (`allOf`, `$ref` with siblings, `anyOf` below `properties`), each would forbid what the
others list. So one of them is closed for what all of them list, and the others stay open. A `$ref`
among them is replaced by its target, since the target itself is closed where it is used alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import unquote

from tgi_trio.errors import ValidationError

Schema = dict[str, Any]

_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})  # name -> schema
_VALUES = frozenset({"additionalItems", "additionalProperties", "items", "prefixItems"})
_OWN = frozenset({"additionalProperties", "patternProperties", "properties", "required"})
_CHOICES = ("anyOf", "oneOf")
_COMPOSED = frozenset({"$ref", "allOf", *_CHOICES})
_INNER = _MAPS | _VALUES | _COMPOSED | _OWN  # a schema without any of these needs no change
_ROOT_ONLY = frozenset({"$anchor", "$defs", "$id", "$schema", "definitions"})
_INDEX = re.compile("[0-9]{1,9}")  # Python reads no number of thousands of digits
_MOST_WORK = 20_000  # schemas copied and names added; real schemas need some dozens


def close_objects(schema: Schema) -> Schema:
    """Return `schema` with `additionalProperties: false` wherever `properties` are listed.

    This holds at every depth, behind `$ref` and through `allOf`, `anyOf` and `oneOf`. An explicit
    `additionalProperties` is kept, an object without `properties` stays open, and the order of
    properties is kept. The given schema is not changed. Raises ValidationError for a schema that
    nests too deeply, or whose compositions would grow without bound.
    """
    try:
        closed: Schema = _Closer(schema).close(schema)
    except RecursionError as error:
        raise ValidationError("grammar is not valid: the schema nests too deeply") from error
    return closed


def follow_pointer(root: Schema, pointer: str) -> Schema | None:
    """Return the schema at a JSON pointer, percent-encoded as in references, or None."""
    found: Any = root
    for step in unquote(pointer).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and _INDEX.fullmatch(step) and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True)
class _Listed:
    """What schemas that apply together list, in order."""

    names: dict[str, None] = field(default_factory=dict)  # names in `properties`, and in `required`
    patterns: dict[str, None] = field(default_factory=dict)
    closes: bool = False  # at least one has `properties`

    def include(self, parts: Iterable[Schema]) -> Self:
        """Return this extended by what the parts list."""
        parts = list(parts)
        names = [name for part in parts for name in _names(part, "properties")]
        names += [name for part in parts for name in _list_required(part)]
        patterns = [name for part in parts for name in _names(part, "patternProperties")]
        return type(self)(
            self.names | dict.fromkeys(names),
            self.patterns | dict.fromkeys(patterns),
            self.closes or any("properties" in part for part in parts),
        )


def _names(schema: Schema, key: str) -> Iterable[str]:
    found = schema.get(key)
    return found if isinstance(found, dict) else ()


def _list_required(schema: Schema) -> Iterable[str]:
    found = schema.get("required")
    return (each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


class _Closer:
    """Closes one schema: `close` is for values, `_keep_open` for what applies beside others."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._inlined: list[str] = []  # references being replaced; they may be circular
        self._work = 0

    def close(self, schema: Any, beside: _Listed | None = None) -> Any:
        """Return a schema closed; `beside`: what schemas list that apply together with it."""
        if self._inlined:  # part of a copy, which may contain further copies
            self._count(1)
        if schema is True and beside is not None:
            schema = {}
        if not isinstance(schema, dict) or (beside is None and _INNER.isdisjoint(schema)):
            return schema
        if beside is not None or self._sources(schema) > 1:
            return self._close_group(schema, beside or _Listed())
        closed = self._close_nested(schema)
        for key in _COMPOSED & schema.keys() - {"$ref"}:
            if isinstance(schema[key], list):
                closed[key] = [self.close(each) for each in schema[key]]
        if "properties" in schema and "additionalProperties" not in schema:
            self._shut(closed, _Listed(names=dict.fromkeys(_list_required(schema))))
        return closed

    def _close_group(self, schema: Schema, beside: _Listed) -> Schema:
        """Return a schema closed for all that it and its compositions list."""
        parts = list(self._parts(schema))
        decided = any("additionalProperties" in part or self._leads_away(part) for part in parts)
        one_choice = sum(key in part for part in parts for key in _CHOICES) == 1
        closing = beside.include(parts) if one_choice and not decided else None
        opened: Schema = self._keep_open(schema, closing)
        if decided or one_choice:
            return opened
        every = list(self._parts(schema, deep=True))
        listed = beside.include(every)
        if listed.closes and not any(part.get("additionalProperties", False) for part in every):
            self._shut(opened, listed)
        return opened

    def _shut(self, schema: Schema, listed: _Listed) -> None:
        """Close an object for what is listed."""
        for key, names in (("properties", listed.names), ("patternProperties", listed.patterns)):
            existing = schema.get(key, {})
            if isinstance(existing, dict) and not names.keys() <= existing.keys():
                self._count(len(names))
                schema[key] = existing | {name: True for name in names if name not in existing}
        schema["additionalProperties"] = False

    def _keep_open(self, schema: Any, listed: _Listed | None) -> Any:
        """Return a schema that stays open, since another one closes what they describe together.

        `listed`: if not None, each alternative of the only choice among them is closed for that.
        """
        self._count(1)
        if not isinstance(schema, dict):
            return schema
        opened = self._close_nested(schema)
        if isinstance(schema.get("allOf"), list):
            opened["allOf"] = [self._keep_open(each, listed) for each in schema["allOf"]]
        for key in _CHOICES:
            if isinstance(schema.get(key), list):
                opened[key] = [
                    self._keep_open(each, None) if listed is None else self.close(each, listed)
                    for each in schema[key]
                ]
        reference = str(schema.get("$ref"))
        target = self._target(reference)
        if target is None or reference in self._inlined:
            return opened
        self._inlined.append(reference)
        body = {key: value for key, value in target.items() if key not in _ROOT_ONLY}
        inlined = [self._keep_open(body, listed), *opened.pop("allOf", [])]
        self._inlined.pop()
        # In place of the reference: the order of keywords is that of properties.
        return {
            "allOf" if key == "$ref" else key: inlined if key == "$ref" else value
            for key, value in opened.items()
        }

    def _close_nested(self, schema: Schema) -> Schema:
        """Return a copy in which the schemas of nested values are closed."""
        copy = dict(schema)
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                copy[key] = {name: self.close(each) for name, each in value.items()}
            elif key in _VALUES:
                listed = isinstance(value, list)
                copy[key] = [self.close(e) for e in value] if listed else self.close(value)
        return copy

    def _sources(self, schema: Any) -> int:
        """Return how many schemas list properties together here; a reference counts as one."""
        if not isinstance(schema, dict):
            return 0
        count = 0 if _OWN.isdisjoint(schema) else 1
        if _COMPOSED.isdisjoint(schema):
            return count
        count += sum(key in schema for key in ("$ref", *_CHOICES))
        branches = schema.get("allOf")
        return count + sum(map(self._sources, branches if isinstance(branches, list) else []))

    def _parts(self, schema: Schema, deep: bool = False) -> Iterator[Schema]:
        """Yield the schemas that apply together with this one; `deep`: also their alternatives."""
        followed: set[str] = set()
        waiting: list[Any] = [schema]
        keys = ("allOf", *_CHOICES) if deep else ("allOf",)
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict):
                continue
            self._count(1)
            yield part
            reference = str(part["$ref"]) if "$ref" in part else None
            more = [each for key in keys if isinstance(part.get(key), list) for each in part[key]]
            if reference is not None and reference not in followed:
                followed.add(reference)
                more.insert(0, self._target(reference))
            waiting += reversed(more)

    def _leads_away(self, schema: Schema) -> bool:
        """Return whether a schema refers to another document, whose properties are unknown."""
        return "$ref" in schema and self._target(str(schema["$ref"])) is None

    def _target(self, reference: str) -> Schema | None:
        """Return the target of a reference into this document; None for others."""
        document, hash, pointer = reference.partition("#")
        if not hash or document not in ("", self._root.get("$id")):
            return None
        return follow_pointer(self._root, pointer) if pointer[:1] in ("", "/") else None

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > _MOST_WORK:
            raise ValidationError(
                "grammar is not valid: the compositions of the schema (allOf, anyOf, oneOf, $ref "
                "with neighbours) are too many; say `additionalProperties` where objects are listed"
            )
