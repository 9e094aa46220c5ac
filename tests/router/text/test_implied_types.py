"""Schemas without a `type`: what they mean to those who write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.text.test_grammars import accepts
from tgi_trio.errors import ValidationError
from tgi_trio.router.text import grammars
from tgi_trio.router.text.implied_types import say_types

INTEGER = {"type": "integer"}
FIELDS: dict[str, Any] = {"properties": {"a": INTEGER}, "required": ["a"]}
NULLABLE = {"type": ["object", "null"]}
OBJECT = {"type": "object"}
# of the documentation of TGI's guidance, in its shape
ANIMALS: dict[str, Any] = {
    "properties": {
        "place": {"type": "string"},
        "seen": {"type": "integer", "minimum": 1, "maximum": 5},
        "animals": {"items": {"type": "string"}},
    },
    "required": ["place", "seen", "animals"],
}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (ANIMALS, {"place": "a", "seen": 3, "animals": ["b"]}, [3, "a", [], None, {}, {"seen": 3}]),
        ({"properties": {"x": FIELDS}, "required": ["x"]}, {"x": {"a": 1}}, [{"x": 1}, {"x": {}}]),
        ({"items": FIELDS}, [{"a": 1}], [1, {"a": 1}, [1]]),
        ({"prefixItems": [INTEGER], "items": False, "minItems": 1}, [1], [1, {}, []]),
        ({"$ref": "#/$defs/F", "$defs": {"F": FIELDS}}, {"a": 1}, [1, {}]),
        ({"anyOf": [FIELDS, {"type": "null"}]}, {"a": 1}, [1, "a", {}]),
        ({"allOf": [FIELDS, {"properties": {"b": INTEGER}}]}, {"a": 1, "b": 2}, [1, {"b": 2}]),
        ({"additionalProperties": INTEGER}, {"z": 1}, [1, {"z": "a"}]),
    ],
)  # fmt: skip
def test_an_object_that_is_not_called_one(schema: Any, right: Any, wrong: list[Any]) -> None:
    grammar = grammars.json_schema(schema)
    assert accepts(grammar, json.dumps(right, separators=(",", ":")))
    assert not [each for each in wrong if accepts(grammar, json.dumps(each, separators=(",", ":")))]


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        INTEGER,
        NULLABLE | FIELDS,
        {"type": ["array", "integer"], "items": INTEGER},
        {"enum": [1, {"a": 2}], **FIELDS},
        {"const": 1, "items": INTEGER},
        NULLABLE | {"allOf": [FIELDS]},
        NULLABLE | {"anyOf": [FIELDS, {"required": ["b"]}]},
        {"allOf": [FIELDS, NULLABLE]},
        {"not": FIELDS, "type": "integer"},
        {"minLength": 3},
        {"properties": 5, "type": "object"},
    ],
)
def test_what_has_a_type_keeps_it(schema: Any) -> None:
    assert say_types(schema) == schema


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (FIELDS, OBJECT | FIELDS),
        ({"properties": {"type": FIELDS}}, OBJECT | {"properties": {"type": OBJECT | FIELDS}}),
        (NULLABLE | {"allOf": [{"properties": {"x": FIELDS}}]},
         NULLABLE | {"allOf": [{"properties": {"x": OBJECT | FIELDS}}]}),
        ({"oneOf": [FIELDS, INTEGER]}, {"oneOf": [OBJECT | FIELDS, INTEGER]}),
        ({**FIELDS, "anyOf": [{"required": ["b"]}]},
         {**OBJECT, **FIELDS, "anyOf": [{"required": ["b"]}]}),
        ({"items": [FIELDS]}, {"type": "array", "items": [OBJECT | FIELDS]}),
    ],
)  # fmt: skip
def test_where_a_type_is_said(schema: Any, said: Any) -> None:
    before = json.dumps(schema)
    assert say_types(schema) == said
    assert json.dumps(schema) == before


def test_a_schema_that_nests_too_deeply_is_refused() -> None:
    deep: Any = FIELDS
    for _ in range(5_000):
        deep = {"items": deep}
    with pytest.raises(ValidationError, match="nests too deeply"):
        grammars.json_schema(deep)
