"""Replaces `not` in JSON schemas, which llguidance does not know, by what it leaves.

Values and types can be left out: `const`, `enum`, `type`, and `anyOf` of these. Strings are left
out by a pattern of all other strings, numbers by the ranges between them. What else `not` may say
is refused by its keyword.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tgi_trio.errors import ValidationError

Schema = dict[str, Any]

_TYPES: Final = ("null", "boolean", "string", "integer", "number", "array", "object")
_NAMED: Final = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_DATA: Final = frozenset({"const", "default", "enum", "examples", "required"})
# Keywords that constrain nothing.
_ANNOTATIONS: Final = frozenset(
    {"$comment", "$schema", "default", "deprecated", "description", "examples", "title"}
)
_ANY: Final = "(?s:.)"  # any character
# In JSON, llguidance takes a class with many control characters for one that has these as well.
# Where they are left out, so are control characters but tabs and ends of lines.
_QUOTED: Final = frozenset('"\\')
# Characters of all patterns of a schema: they grow with the squares of its words.
_MOST_PATTERNS: Final = 1 << 15
_CONTROL: Final = r"\x00-\x08\x0b\x0c\x0e-\x1f"
_SERVED: Final = "it can leave out values and types: `const`, `enum`, `type`, or `anyOf` of these"


def replace_exclusions(schema: Any) -> Any:
    """Return a schema in which no `not` is left; the given one is not changed.

    Raises ValidationError for a `not` that cannot be replaced, and RecursionError for a schema that
    nests too deeply.
    """
    return _replace(schema, _Room())


@dataclass(slots=True)
class _Room:
    """What is left of the characters that the patterns of a schema may have."""

    left: int = _MOST_PATTERNS

    def take(self, characters: int) -> None:
        self.left -= characters
        if self.left < 0:
            raise _refused("these texts are too long or too many")


def _replace(schema: Any, room: _Room) -> Any:
    """Do what `replace_exclusions` does for a part of a schema."""
    if isinstance(schema, list):
        return [_replace(each, room) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner: Schema = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            inner[key] = {name: _replace(each, room) for name, each in value.items()}
        else:
            inner[key] = value if key in _DATA or key == "not" else _replace(value, room)
    return _leave_out(inner, _Excluded.of(inner.pop("not")), room) if "not" in inner else inner


@dataclass(slots=True)
class _Excluded:
    """What a schema leaves out: types, whole, and values."""

    types: set[str] = field(default_factory=set)
    values: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, schema: Any) -> _Excluded:
        """Return what is valid for `schema`. Raises ValidationError for what cannot be left out."""
        if schema is False:
            return cls()
        if not isinstance(schema, dict):
            raise _refused(f"`{json.dumps(schema)[:40]}` is beyond that")
        told = schema.keys() - _ANNOTATIONS
        if told == {"anyOf"} and isinstance(schema["anyOf"], list):
            whole = cls()
            for each in map(cls.of, schema["anyOf"]):
                whole.types |= each.types
                whole.values += each.values
            return whole
        if beyond := sorted(told - {"const", "enum", "type"}):
            raise _refused(f"`{beyond[0]}` is beyond that")
        types = _list_types(schema) if "type" in told else set(_TYPES)
        if not told & {"const", "enum"}:
            return cls(types=types)
        lists = [schema["enum"]] if "enum" in told else []
        lists += [[schema["const"]]] if "const" in told else []
        if not all(isinstance(each, list) for each in lists):
            raise _refused("`enum` must be a list")
        first, *more = lists
        others = [set(map(identify_value, each)) for each in more]
        return cls(
            values=[
                value
                for value in first
                if _type(value) in types and all(identify_value(value) in them for them in others)
            ]
        )


def _leave_out(schema: Schema, excluded: _Excluded, room: _Room) -> Schema:
    """Return `schema`, which has no `not`, without the types and values that are excluded."""
    types = _list_types(schema) if "type" in schema else set(_TYPES)
    if "integer" in excluded.types and "number" in types - excluded.types:
        raise _refused("numbers without `integer` are beyond that")
    types -= excluded.types
    values = [value for value in excluded.values if _type(value) in types]
    if None in values:
        types.discard("null")
    if not types:
        raise ValidationError("grammar is not valid: `not` in the schema leaves nothing")
    left: Schema = dict(schema)
    if types != set(_TYPES) and types != _list_types(schema):
        left["type"] = [each for each in _TYPES if each in types and not _is_within(each, types)]
    for key in ("enum", "const"):
        if key in left:
            given = [left[key]] if key == "const" else left[key]
            if not isinstance(given, list):
                raise ValidationError("grammar is not valid: `enum` in the schema is no list")
            gone = set(map(identify_value, values))
            kept = [
                each for each in given if _type(each) in types and identify_value(each) not in gone
            ]
            if not kept:
                raise ValidationError("grammar is not valid: `not` in the schema leaves nothing")
            left.pop(key)
            return {**left, "enum": kept}
    limits = list(_limits(values, types, room))
    if limits:
        before = left.get("allOf")
        left["allOf"] = [*(before if isinstance(before, list) else []), *limits]
    return left


def _limits(values: Sequence[Any], types: set[str], room: _Room) -> Iterable[Schema]:
    """Yield schemas that together leave out values; `types`: those that may still be valid."""
    for value in values:
        if isinstance(value, dict | list):
            raise _refused(f"the value `{json.dumps(value)[:40]}` is beyond that")
    if strings := {value for value in values if isinstance(value, str)}:
        yield {"pattern": _exclude_words(strings, room)}
    booleans = {value for value in values if isinstance(value, bool)}
    if len(booleans) == 2:
        yield {"type": [each for each in _TYPES if each in types - {"boolean"}]}
    elif booleans:
        others = [each for each in _TYPES if each in types - {"boolean"}]
        kept = {"const": not booleans.pop()}
        yield {"anyOf": [{"type": others}, kept]} if others else kept
    numbers = sorted({v for v in values if isinstance(v, int | float) and not isinstance(v, bool)})
    if numbers:
        whole = "number" not in types
        ends = [None, *numbers, None]
        yield {
            "anyOf": [
                {
                    **({} if low is None else {"exclusiveMinimum": low}),
                    **({} if high is None else {"exclusiveMaximum": high}),
                }
                for low, high in itertools.pairwise(ends)
                if low is None or high is None or not (whole and high - low <= 1)
            ]
        }


def _exclude_words(words: Collection[str], room: _Room) -> str:
    """Return a pattern of all texts but `words`; it is as long as the square of their lengths."""
    following: dict[str, set[str]] = {"": set()}
    for word in words:
        for end in range(len(word) + 1):
            prefix = word[:end]
            if prefix not in following:
                room.take(end)
                following[prefix] = set()
            following[prefix].update(word[end : end + 1])
    branches = []
    for prefix, letters in sorted(following.items()):
        others = "".join(map(_in_class, sorted(letters))) + (_CONTROL if letters & _QUOTED else "")
        other = f"[^{others}]" if letters else _ANY
        behind = f"{other}{_ANY}*"
        own = "".join(map(_escape, prefix))
        branches.append(own + (behind if prefix in words else f"(?:{behind})?"))
    return f"^(?:{'|'.join(branches)})$"


def _escape(letter: str) -> str:
    return re.escape(letter) if letter.isascii() and letter.isprintable() else _number(letter)


def _in_class(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else _number(letter)


def _number(letter: str) -> str:
    return f"\\x{{{ord(letter):x}}}"


def _list_types(schema: Schema) -> set[str]:
    """Return the types of a schema, integers among numbers. Raises ValidationError for others."""
    given = schema.get("type", list(_TYPES))
    listed = given if isinstance(given, list) else [given]
    if any(each not in _TYPES for each in listed):
        raise ValidationError(f"grammar is not valid: `type` in the schema is one of {_TYPES}")
    return {*listed, *(["integer"] if "number" in listed else [])}


def _is_within(kind: str, types: set[str]) -> bool:
    """Return whether another type includes this one."""
    return kind == "integer" and "number" in types


def _type(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "integer" if value == int(value) else "number"
        case list():
            return "array"
    return "object"


def identify_value(value: Any) -> Hashable:
    """Return what is the same for values that are the same in JSON: 1 is 1.0, but not `true`."""
    match value:
        case list():
            return "array", tuple(map(identify_value, value))
        case dict():
            return "object", frozenset((key, identify_value(each)) for key, each in value.items())
    return isinstance(value, bool), value


def _refused(why: str) -> ValidationError:
    return ValidationError(f"grammar is not valid: `not` in the schema: {_SERVED}; {why}")
