"""References to types of the OpenAPI document, for fields that are decoded as plain JSON."""

from __future__ import annotations

from typing import Any

from msgspec import Meta

COMPONENT = "#/components/schemas/{name}"  # where the OpenAPI document keeps its types


def any_of(*names: str) -> Meta:
    """Return metadata for JSON that fits one of several types of the OpenAPI document.

    A name that ends with `[]` stands for a list of that type.
    """
    shapes: list[dict[str, Any]] = []
    for name in names:
        one = {"$ref": COMPONENT.format(name=name.removesuffix("[]"))}
        shapes.append({"type": "array", "items": one} if name.endswith("[]") else one)
    return Meta(extra_json_schema={"anyOf": shapes})
