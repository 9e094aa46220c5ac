"""All records of a spec, at any depth: a spec is made of dataclasses and tuples of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any


def walk_records(value: Any) -> Iterator[Any]:
    """Yield a record and all records in it, each once; `value`: one of these, or a tuple."""
    found: dict[int, Any] = {}
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, tuple):
            left += value
        elif is_dataclass(value) and id(value) not in found:
            found[id(value)] = value
            left += [getattr(value, field.name) for field in fields(value)]
    yield from found.values()
