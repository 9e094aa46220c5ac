"""`not` in schemas: what is left out cannot be written, and everything else can."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from tgi_trio.errors import ValidationError
from tgi_trio.router.text.grammars import json_schema

LETTERS = 'ab\n"\\é'
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 1.5, 10),
    *("", "a", "ab", "abc", "b", "\n", 'say "a"', "\\", "é", "^[a]-z"),
    *([], [1], {}, {"a": 1}),
]
SCHEMAS: list[dict[str, Any]] = [
    {"type": "string", "not": {"const": "ab"}},
    {"type": "string", "not": {"enum": ["", "a", "abc", 'say "a"', "\\", "^[a]-z", "\n", "é"]}},
    {"type": "string", "minLength": 1, "not": {"const": "a"}},
    {"type": "string", "pattern": "^a", "not": {"enum": ["a", 1, None]}},
    {"type": "integer", "not": {"enum": [0, 1, 10]}},
    {"type": "number", "minimum": 0, "not": {"const": 1}},
    {"type": ["string", "null", "boolean"], "not": {"enum": [None, True, "a"]}},
    {"type": ["boolean", "null"], "not": {"type": "boolean"}},
    {"not": {"type": ["string", "number", "object"], "description": "no text"}},
    {"not": {"anyOf": [{"type": ["array", "object"]}, {"const": "a"}, {"enum": [1, None]}]}},
    {"enum": ["a", "b", 1, True], "not": {"enum": ["a", 1.0]}},
    {"anyOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}], "not": {"const": "b"}},
    {"type": "string", "not": {"type": "integer", "const": "a"}},
    {"type": "string", "not": False},
    {"enum": [[1], 2], "not": {"enum": [[True], 2.0]}},
]


def takes(schema: dict[str, Any], value: Any) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), json_schema(schema), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_what_is_written_is_what_is_valid(schema: dict[str, Any]) -> None:
    validator, before = Draft202012Validator(schema), json.dumps(schema)
    for value in VALUES:
        assert takes(schema, value) == validator.is_valid(value), value
    assert json.dumps(schema) == before


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.text('ab\n"é', max_size=3), min_size=1, max_size=5), st.text('ab\n"é', max_size=4)
)
def test_any_words_can_be_left_out(words: set[str], text: str) -> None:
    assert takes({"type": "string", "not": {"enum": sorted(words)}}, text) == (text not in words)


def test_a_property_may_have_the_name() -> None:
    nested = {"type": "object", "properties": {"not": {"type": "string", "not": {"const": "a"}}}}
    assert takes(nested, {"not": "b"}) and not takes(nested, {"not": "a"})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"required": ["a"]}}, "`required` is beyond that"),
        ({"type": "string", "not": {"pattern": "a"}}, "`pattern` is beyond that"),
        ({"not": {"const": [1]}}, r"the value `\[1\]` is beyond that"),
        ({"not": {"type": "integer"}}, "numbers without `integer` are beyond that"),
        ({"not": True}, "`true` is beyond that"),
        ({"not": {"type": [{}]}}, "`type` in the schema is one of"),
        ({"type": {}, "not": {"const": 1}}, "`type` in the schema is one of"),
        ({"not": {"type": [["string"]]}}, "`type` in the schema is one of"),
        ({"not": {}}, "leaves nothing"),
        ({"type": "string", "not": {"type": "string"}}, "leaves nothing"),
        ({"const": 1, "not": {"const": 1.0}}, "leaves nothing"),
        # Patterns of 2 GB, and of 10 MB: every stream would wait for it, minutes or a second.
        ({"type": "string", "not": {"const": "a" * 60_000}}, "texts are too long or too many"),
        ({"allOf": [{"not": {"const": "a" * 400}}] * 100}, "texts are too long or too many"),
    ],
)
def test_what_cannot_be_left_out_is_named(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        json_schema(schema)
