"""The values of a field that lists or bounds them; msgspec's error names one of them alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Final

from msgspec import inspect

_STEP: Final = re.compile(r"\.(?P<field>\w+)|\[(?P<index>[^]]*)\]")  # of a path such as `$.a[0].b`
_WRONG: Final = "Invalid enum value "  # how msgspec begins
_BELOW: Final = "Expected `int` >= "


def say_allowed(what: str, shape: Any, path: str) -> str:
    """Return the error `what` at `path` below `shape`, with the values that are allowed there.

    `path`: msgspec's, without its `$`. An error of another kind stays as it is.
    """
    if what.startswith(_BELOW):
        most = _most(shape, path)
        return what if most is None else f"{what} and <= {most}"
    if not what.startswith(_WRONG):
        return what
    values = allowed_values(shape, path)
    return (
        f"{what}, expected one of {', '.join(f'`{each}`' for each in values)}" if values else what
    )


def allowed_values(shape: Any, path: str) -> list[Any]:
    """Return the literals at a path below a type; none where the type does not say."""
    return [
        value
        for each in _flatten(_types(shape, path))
        if isinstance(each, inspect.LiteralType)
        for value in each.values
    ]


def _most(shape: Any, path: str) -> int | None:
    """Return the largest number at a path that its type names and msgspec, for which it is too
    large, does not check; None: it names none."""
    for each in _types(shape, path):
        for one in each.types if isinstance(each, inspect.UnionType) else (each,):
            if isinstance(one, inspect.Metadata) and "maximum" in (one.extra_json_schema or {}):
                return int((one.extra_json_schema or {})["maximum"])
    return None


def _types(shape: Any, path: str) -> list[inspect.Type]:
    """Return the types at a path below a type."""
    types: list[inspect.Type] = [_type_info(shape)]
    for step in _STEP.finditer(path):
        types = [inner for each in _flatten(types) for inner in _inner(each, step["field"])]
    return types


@cache
def _type_info(shape: Any) -> inspect.Type:
    return inspect.type_info(shape)


def _flatten(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield types without unions and metadata around them."""
    for each in types:
        if isinstance(each, inspect.UnionType):
            yield from _flatten(each.types)
        elif isinstance(each, inspect.Metadata):
            yield from _flatten([each.type])
        else:
            yield each


def _inner(outer: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """Yield the types of a struct's field, or of the items of a list or mapping."""
    if field is not None and isinstance(outer, inspect.StructType):
        yield from (each.type for each in outer.fields if each.encode_name == field)
    elif field is None and isinstance(outer, inspect.ListType):
        yield outer.item_type
    elif field is None and isinstance(outer, inspect.DictType):
        yield outer.value_type
