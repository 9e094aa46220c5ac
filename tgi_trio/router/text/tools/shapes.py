"""Whether a value that is written without quotes may be text, JSON, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tgi_trio.router.text.tools.schemas import (
    Members,
    Schema,
    find_literals,
    find_members,
    find_type,
    list_alternatives,
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What one value may be."""

    plains: tuple[Schema, ...]  # all alternatives
    texts: tuple[Schema, ...]  # those of strings, and those without a type
    values: tuple[Schema, ...]  # those of other types, which are written as JSON
    literals: tuple[Any, ...]
    nullable: bool

    @classmethod
    def of(cls, schema: Any, root: Schema) -> Shape:
        """Return the shape of the values of a schema, a part of `root`. Raises ValidationError."""
        plains = tuple(list_alternatives(schema, root))
        texts: list[Schema] = []
        values: list[Schema] = []
        literals: list[Any] = []
        nullable = False
        for plain in plains:
            listed, kind = find_literals(plain), find_type(plain)
            if listed is not None:
                literals += listed
                nullable = nullable or None in listed
            elif kind in (None, "string"):
                texts.append(plain)
            elif kind == "null":
                nullable = True
            else:
                values.append(plain)
        literals = [each for each in literals if each is not None]
        return cls(plains, tuple(texts), tuple(values), tuple(literals), nullable)

    @property
    def only_text(self) -> bool:
        """Whether the value is always read as a string, null aside."""
        strings = all(isinstance(each, str) for each in self.literals)
        return bool(self.texts) or (bool(self.literals) and strings and not self.values)

    @property
    def has_text(self) -> bool:
        """Whether the value may be a string."""
        return bool(self.texts) or any(isinstance(each, str) for each in self.literals)

    @property
    def has_values(self) -> bool:
        """Whether the value may be anything but a string."""
        return (
            self.nullable
            or bool(self.values)
            or any(not isinstance(each, str) for each in self.literals)
            or any(find_type(each) is None for each in self.texts)
        )


class Shapes:
    """The shapes of a function's parameters, computed on demand."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._members: list[Members] | None = None

    def find(self, key: str) -> Shape:
        """Return the shape of one parameter; an unknown one may be anything."""
        if self._members is None:
            plains = list_alternatives(self._root, self._root) if self._root else []
            self._members = [find_members(plain, self._root) for plain in plains]
        schemas = [each.listed[key] for each in self._members if key in each.listed]
        if not schemas:
            schemas = [each.more for each in self._members if each.more is not False]
        return Shape.of({"anyOf": schemas} if schemas else {}, self._root)
