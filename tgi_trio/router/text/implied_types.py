"""Says the types that JSON schemas leave out: what lists properties is an object.

To JSON Schema `properties` restrict objects alone, so that without a `type` a number is valid, too.
Clients that send the fields of a type mean an object of it, and outlines (with it TGI), xgrammar
and llama.cpp write one; TGI's own documentation has such a schema.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

_OF_OBJECTS: Final = {"additionalProperties", "patternProperties", "properties", "required"}
_OF_ARRAYS: Final = {"items", "maxItems", "minItems", "prefixItems"}
_DECIDED: Final = {"const", "enum", "type"}  # what a value is, is said
_MAPS: Final = ("$defs", "definitions", "patternProperties", "properties")  # name -> schema
_VALUES: Final = ("additionalItems", "additionalProperties", "items", "prefixItems")
_COMPOSED: Final = ("allOf", "anyOf", "oneOf")


def imply_type(schema: Schema) -> str | None:
    """Return the type whose keywords a schema has; None where it has those of none."""
    if not _OF_OBJECTS.isdisjoint(schema):
        return "object"
    return None if _OF_ARRAYS.isdisjoint(schema) else "array"


def say_types(schema: Any, said: bool = False) -> Any:
    """Return `schema` with a `type` wherever its keywords are those of one type and it has none.

    This holds at every depth. Where schemas apply together a type that one of them has is enough:
    `{"type": ["object", "null"], "anyOf": [{"properties": ...}]}` allows null. `said`: one beside
    this has a type. The given schema is not changed. Raises RecursionError.
    """
    if not isinstance(schema, dict):
        return schema
    copy: Schema = {}
    if not said and not _has_type(schema) and (implied := imply_type(schema)):
        copy["type"] = implied
    said = said or _has_type(schema) or _has_type(copy)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            copy[key] = {name: say_types(each) for name, each in value.items()}
        elif key in _VALUES:
            listed = isinstance(value, list)
            copy[key] = [say_types(each) for each in value] if listed else say_types(value)
        elif key in _COMPOSED and isinstance(value, list):
            together = key == "allOf" and any(map(_has_type, value))
            copy[key] = [say_types(each, said or together) for each in value]
        else:
            copy[key] = value
    return copy


def _has_type(schema: Any) -> bool:
    return isinstance(schema, dict) and not _DECIDED.isdisjoint(schema)
