"""Draws values of the types that SDKs have for requests: TypedDicts, unions, lists, literals."""

from __future__ import annotations

import random
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
)

import typing_extensions

_UNIONS: Final = (Union, types.UnionType)
_WRAPPERS: Final = (Annotated, Required, NotRequired)
_LISTS: Final = (list, Iterable, Sequence)
_DEEP: Final = 6  # below, only what is required is drawn
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
# What a field must be beyond its type, by its name.
TEXTS: Final[Mapping[str, tuple[str, ...]]] = {
    "name": ("f", "g"),
    "arguments": ("{}", '{"a":"é"}'),
    "definition": ('start: "a"',),  # of Lark, and a regular expression as well
    "url": ("data:image/png;base64,AAAA",),
    "image_url": ("data:image/png;base64,AAAA",),
    "stop": (".",),
}
DICTS: Final[Mapping[str, Any]] = {
    "logit_bias": {"5": 1},
    "tools": {"type": "function", "name": "f", "function": {"name": "f"}},
    "metadata": {"a": "b"},
    "arguments": {"query": "x"},
}


def origin(shape: Any) -> Any:
    """Return what a type is an instance of, such as `list`."""
    return get_origin(shape)


def unwrap(shape: Any) -> Any:
    """Return a type without what is said about it as a field."""
    while True:
        if origin(shape) in _WRAPPERS:
            shape = get_args(shape)[0]
        elif isinstance(shape, typing_extensions.TypeAliasType):
            shape = shape.__value__
        else:
            return shape


def alternatives(shape: Any) -> list[Any]:
    """Return the types of a union, of unions in it as well."""
    shape = unwrap(shape)
    if origin(shape) not in _UNIONS:
        return [shape]
    return [each for part in get_args(shape) for each in alternatives(part)]


@cache
def fields(shape: Any) -> Mapping[str, tuple[Any, bool]]:
    """Return the fields of a TypedDict: name -> type, and whether it is required."""
    hints = typing_extensions.get_type_hints(shape, include_extras=True)
    # `__required_keys__` knows nothing of annotations that are written as texts.
    return {name: (hint, origin(hint) is Required) for name, hint in hints.items()}


def kind(shape: Any) -> str | None:
    """Return the `type` that a TypedDict or a model has."""
    if not typing_extensions.is_typeddict(shape) or "type" not in fields(shape):
        return None
    literal = unwrap(fields(shape)["type"][0])
    return str(get_args(literal)[0]) if origin(literal) is Literal else None


def draw(shape: Any, source: random.Random, name: str = "", depth: int = 0) -> Any:
    """Return a value of a type; `name`: of the field that gets it."""
    shape = unwrap(shape)
    if origin(shape) in _UNIONS:
        # Clients may also send what they got, objects of classes: these are the same in JSON.
        found = [each for each in alternatives(shape) if not hasattr(each, "model_fields")]
        return draw(source.choice(found), source, name, depth) if found else None
    if typing_extensions.is_typeddict(shape):
        likely = 0.25 if depth < _DEEP else 0.0
        return {
            key: draw(hint, source, key, depth + 1)
            for key, (hint, required) in fields(shape).items()
            if required or source.random() < likely
        }
    if origin(shape) in _LISTS or getattr(origin(shape), "__name__", "") == "SequenceNotStr":
        count = source.choice((1, 1, 2, 3)) if depth < _DEEP else 1
        return [draw(get_args(shape)[0], source, name, depth + 1) for _ in range(count)]
    if origin(shape) is Literal:
        return source.choice(get_args(shape))
    return _draw_plain(shape, source, name)


def _draw_plain(shape: Any, source: random.Random, name: str) -> Any:
    if shape is type(None):
        return None
    if shape is bool:
        return source.random() < 0.5
    if shape is int:
        return source.choice((1, 2, 20))
    if shape is float:
        return source.choice((0.25, 1.0))
    if shape is str:
        return source.choice(TEXTS.get(name, ("x", "Rain?", "é😀")))
    if origin(shape) in (dict, Mapping) or shape in (dict, object, Any):
        return SCHEMA if "schema" in name or name == "parameters" else DICTS.get(name, {"a": "b"})
    return "x"  # a file or a path, which a client reads
