"""Closed schemas, held to `unevaluatedProperties` of another implementation of JSON Schema."""

from __future__ import annotations

import itertools
import json
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict

from tests.router.text.test_grammars import accepts
from tgi_trio.errors import ValidationError
from tgi_trio.router.text import grammars
from tgi_trio.router.text.closing import Schema, close_objects

INTEGER = {"type": "integer"}
A: Schema = {"properties": {"a": INTEGER}, "required": ["a"]}
B: Schema = {"properties": {"b": INTEGER}}
C: Schema = {"properties": {"c": INTEGER}}
SHUT = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, {**A, **SHUT}),
        ({"properties": {}}, {"properties": {}, **SHUT}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "object", "required": ["a"]}, {"type": "object", "required": ["a"]}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "additionalProperties": B}, {**A, "additionalProperties": {**B, **SHUT}}),
        ({"items": A}, {"items": {**A, **SHUT}}),
        ({"prefixItems": [A, True]}, {"prefixItems": [{**A, **SHUT}, True]}),
        ({"properties": {"x": B}}, {"properties": {"x": {**B, **SHUT}}, **SHUT}),
        ({"patternProperties": {"^x": B}}, {"patternProperties": {"^x": {**B, **SHUT}}}),
        ({"anyOf": [B, {"type": "null"}]}, {"anyOf": [{**B, **SHUT}, {"type": "null"}]}),
        ({"oneOf": [B, C]}, {"oneOf": [{**B, **SHUT}, {**C, **SHUT}]}),
        ({"allOf": [B]}, {"allOf": [{**B, **SHUT}]}),
        ({"enum": [{"properties": {}}]}, {"enum": [{"properties": {}}]}),
        ({"const": {"properties": {}}}, {"const": {"properties": {}}}),
        (
            {"$ref": "#/$defs/B", "$defs": {"B": B}, "title": "T"},
            {"$ref": "#/$defs/B", "$defs": {"B": {**B, **SHUT}}, "title": "T"},
        ),
        (  # a required name is one of the object's
            {**A, "required": ["z"]},
            {"properties": {"a": INTEGER, "z": True}, "required": ["z"], **SHUT},
        ),
    ],
)
def test_where_properties_are_listed_there_are_no_others(schema: Schema, closed: Schema) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == closed
    assert json.dumps(schema) == before


BASE = {"$ref": "#/$defs/A"}
DEFS = {"$defs": {"A": A, "B": B, "C": C}}


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"allOf": [BASE, B]}, ['{"a":1}', '{"a":1,"b":2}'], ['{"b":2}', '{"a":1,"c":3}']),
        ({**BASE, **B}, ['{"a":1,"b":2}'], ['{"a":1,"c":3}', '{"b":2}']),
        ({**B, "anyOf": [A, C]}, ['{"b":1,"a":2}', '{"c":3}'], ['{"a":1,"c":2}', '{"a":1,"z":2}']),
        ({"allOf": [B, {"anyOf": [BASE, C]}]}, ['{"b":1,"a":2}'], ['{"b":1,"a":2,"c":3}']),
        (
            {"properties": {"a": INTEGER, "b": INTEGER}, "anyOf": [{"required": ["b"]}, BASE]},
            ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
            ["{}", '{"a":1,"c":1}'],
        ),
        ({"allOf": [B, {**C, "additionalProperties": True}]}, ['{"b":1,"c":2,"z":3}'], []),
        (
            {"allOf": [{"anyOf": [A, B]}, {"anyOf": [BASE, C]}]},
            ['{"a":1,"c":2}'],
            ['{"a":1,"z":2}'],
        ),
        ({**C, "patternProperties": {"^x": INTEGER}}, ['{"c":1,"x1":2}'], ['{"c":1,"y":2}']),
        (
            {"allOf": [C, {"patternProperties": {"^x": INTEGER}}]},
            ['{"c":1,"x1":2}'],
            ['{"c":1,"y":2}', '{"c":1,"x1":"2"}'],
        ),
    ],
)
def test_what_holds_together_lists_together(
    schema: Schema, inside: list[str], outside: list[str]
) -> None:
    """As llguidance reads it, which is what counts in the end."""
    grammar = grammars.json_schema({**schema, **DEFS})
    assert [accepts(grammar, text) for text in inside] == [True] * len(inside)
    assert [accepts(grammar, text) for text in outside] == [False] * len(outside)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    model_config = ConfigDict(extra="allow")


class Tree(BaseModel):
    pet: Cat | Dog
    children: list[Tree] = []
    more: dict[str, int] = {}


def test_a_pydantic_model_has_its_fields_and_no_others() -> None:
    schema = Tree.model_json_schema()
    grammar = grammars.json_schema(schema)
    cat, dog = '"pet":{"kind":"cat","lives":9}', '"pet":{"kind":"dog"}'
    for text in (f"{{{cat}}}", f'{{{dog},"children":[{{{cat},"children":[]}}]}}'):
        Tree.model_validate_json(text)
        assert accepts(grammar, text)
    assert accepts(grammar, f'{{{cat},"more":{{"x":1}}}}')
    assert accepts(grammar, '{"pet":{"kind":"dog","name":"Rex"}}')  # extra="allow" is honoured
    for text in (f'{{{cat},"x":1}}', '{"pet":{"kind":"cat","lives":9,"name":"Tom"}}'):
        assert not accepts(grammar, text)
    assert not accepts(grammar, f'{{{cat},"children":[{{{dog},"x":1}}]}}')


# -- any composition -------------------------------------------------------------------------------

NAMES = ["a", "b", "c", "d"]


def objects(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    listed = st.dictionaries(st.sampled_from(NAMES), values, max_size=2)
    required = st.lists(st.sampled_from(NAMES), max_size=1)
    return st.builds(lambda p, r: {"properties": p, "required": r}, listed, required)


def compositions(schemas: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(schemas, min_size=1, max_size=2)
    keys = st.sampled_from(["allOf", "anyOf"])
    composed = st.builds(lambda own, key, each: {**own, key: each}, objects(leaves), keys, several)
    return st.one_of(
        objects(schemas),
        composed,
        st.builds(lambda key, each: {key: each}, keys, several),
        st.builds(lambda own: {**own, "$ref": "#/$defs/A"}, objects(leaves)),
        schemas.map(lambda each: {**each, "additionalProperties": True}),
    )


leaves = st.sampled_from([INTEGER, BASE, {"$ref": "#/$defs/B"}, {"type": "object"}])
SCHEMAS = st.recursive(leaves, compositions, max_leaves=5).map(lambda s: {**s, **DEFS})
VALUES = st.recursive(
    st.integers(0, 1),
    lambda values: st.dictionaries(st.sampled_from(NAMES), values, max_size=3),
    max_leaves=5,
)


def picks(schema: Any) -> list[Any]:
    """Every schema that one alternative of each `anyOf` leaves."""
    if isinstance(schema, list):
        return [list(each) for each in itertools.product(*map(picks, schema))]
    if not isinstance(schema, dict):
        return [schema]
    rows = []
    for key, value in schema.items():
        if key == "anyOf":
            rows.append([("anyOf", [pick]) for each in value for pick in picks(each)])
        else:
            rows.append([(key, pick) for pick in picks(value)])
    return [dict(row) for row in itertools.product(*rows)]


def strict(schema: Any, alone: bool = True) -> Any:
    """A schema of which everything that stands alone says `unevaluatedProperties: false`."""
    if not isinstance(schema, dict):
        return schema
    out: Schema = {}
    for key, value in schema.items():
        if key == "properties":
            out[key] = {name: strict(each) for name, each in value.items()}
        elif key in ("allOf", "anyOf"):
            out[key] = [strict(each, alone=False) for each in value]
        elif key == "$defs":
            out[key] = {name: strict(each, alone=False) for name, each in value.items()}
        else:
            out[key] = value
    if alone and lists(schema):
        # `unevaluatedProperties` knows `properties` alone: what is required is listed as well.
        out["allOf"] = [
            *out.get("allOf", []),
            {"properties": dict.fromkeys(required(schema), True)},
        ]
        out["unevaluatedProperties"] = False
    return out


def together(schema: Any) -> list[Schema]:
    target = DEFS["$defs"].get(schema.get("$ref", "")[-1:])
    parts = [*schema.get("allOf", []), *schema.get("anyOf", []), *([target] if target else [])]
    return [schema, *(each for part in parts for each in together(part))]


def lists(schema: Schema) -> bool:
    return any("properties" in part for part in together(schema))


def required(schema: Schema) -> list[str]:
    return [name for part in together(schema) for name in part.get("required", [])]


def choices(schema: Any) -> int:
    """How many `anyOf` hold together at most, anywhere in a schema."""
    if isinstance(schema, list):
        return max(map(choices, schema), default=0)
    if not isinstance(schema, dict):
        return 0
    here = sum("anyOf" in part for part in together(schema))
    return max([here, *map(choices, schema.values())])


@given(SCHEMAS, VALUES)
@settings(max_examples=400, deadline=None)
def test_any_composition_is_closed_for_what_one_alternative_of_each_choice_lists(
    schema: Schema, value: Any
) -> None:
    closed = Draft202012Validator(close_objects(schema)).is_valid(value)
    expected = any(Draft202012Validator(strict(pick)).is_valid(value) for pick in picks(schema))
    if expected:
        assert closed
    if closed:
        assert Draft202012Validator(schema).is_valid(value)
        # Where choices hold together, what each alternative lists is allowed beside all others.
        assert expected or choices(schema) > 1


def test_what_grows_without_measure_is_refused() -> None:
    defs: Schema = {f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{i + 1}"}] * 2} for i in range(40)}
    with pytest.raises(ValidationError, match="are too many"):
        close_objects({"$ref": "#/$defs/A0", "properties": {}, "$defs": {**defs, "A40": A}})
    wide: Schema = {
        "properties": {f"p{i}": True for i in range(300)},
        "anyOf": [{"required": [f"p{i}"]} for i in range(300)],
    }
    with pytest.raises(ValidationError, match="are too many"):
        close_objects(wide)


def test_circles_and_references_elsewhere_are_left_to_the_grammar() -> None:
    circle = {"$ref": "#/$defs/X", **B, "$defs": {"X": {"allOf": [{"$ref": "#/$defs/X"}, A]}}}
    assert "#/$defs/X" in json.dumps(close_objects(circle)["allOf"])
    elsewhere = {"$ref": "https://example.org/x", **B}
    assert close_objects(elsewhere) == elsewhere  # it may list anything
    none = ("#/$defs/nothing", "#/properties/0", "#nothing", "#", "#/anyOf/" + "9" * 5000)
    for pointer in none:
        close_objects({**B, "items": {"$ref": pointer, **C}, "$defs": {}, "anyOf": [A]})


@pytest.mark.parametrize("keyword", ["items", "additionalProperties"])
def test_a_schema_that_nests_too_deeply_is_refused(keyword: str) -> None:
    schema: Schema = A
    for _ in range(5000):
        schema = {keyword: schema}
    with pytest.raises(ValidationError, match="nests too deeply"):
        close_objects(schema)
