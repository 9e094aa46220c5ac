"""Grammar texts, held to what they accept by the engine that will read them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

import tgi_trio.demo
from tgi_trio.errors import ValidationError
from tgi_trio.router.text import grammars

TOKENIZER = LLTokenizer(
    (Path(tgi_trio.demo.__file__).parent / "model" / "tokenizer.json").read_text()
)


def accepts(grammar: str, text: str) -> bool:
    """Whether `text` as a whole is in the grammar; AssertionError for one that is broken."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.tokenize_str(text)
    if matcher.validate_tokens(ids) < len(ids):
        return False
    return (not ids or matcher.consume_tokens(ids)) and matcher.is_accepting()


PERSON: grammars.Schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_json_is_compact_and_in_the_schemas_order() -> None:
    grammar = grammars.json_schema(PERSON)
    assert accepts(grammar, '{"name":"Ada","age":36}')
    assert not accepts(grammar, '{"name": "Ada", "age": 36}')
    assert not accepts(grammar, '{"age":36,"name":"Ada"}')
    assert not accepts(grammar, '{"name":"Ada"}')


def test_any_object_is_an_object() -> None:
    assert accepts(grammars.json_object(), '{"a":[1,{"b":null}]}')
    assert not accepts(grammars.json_object(), "[1]")


def test_the_schema_true_is_any_value_and_false_is_refused() -> None:
    assert accepts(grammars.json_schema(True), "[1]")
    with pytest.raises(ValidationError, match="allows nothing"):
        grammars.json_schema(False)


def test_schemas_are_not_changed() -> None:
    before = json.dumps(PERSON)
    grammars.json_schema(PERSON)
    grammars.embed_schema(PERSON)
    assert json.dumps(PERSON) == before


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        (r"\d{1,3}(\.\d{1,3}){3}", ["1.2.3.4", "127.0.0.1"], ["1.2.3", "a.b.c.d"]),
        ("^a|b$", ["a", "b"], ["ab", ""]),
        ("a/b\n", ["a/b\n"], ["a/b"]),
        (r"\$", ["$"], [""]),
        ("", [""], ["x"]),
    ],
)
def test_a_regex_matches_the_whole_text(
    pattern: str, matches: list[str], others: list[str]
) -> None:
    grammar = grammars.regex(pattern)
    assert [accepts(grammar, text) for text in matches] == [True] * len(matches)
    assert [accepts(grammar, text) for text in others] == [False] * len(others)


@given(st.text(max_size=8))
def test_an_escaped_text_matches_itself(text: str) -> None:
    assert accepts(grammars.regex(re.escape(text)), text)


@given(st.lists(st.text(max_size=6), min_size=1, max_size=4), st.text(max_size=6))
def test_a_choice_is_exactly_its_options(options: list[str], other: str) -> None:
    grammar = grammars.choice(options)
    assert all(accepts(grammar, option) for option in options)
    assert accepts(grammar, other) == (other in options)


def test_a_choice_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="at least one option"):
        grammars.choice([])


def test_lark_with_embedded_json_and_literals() -> None:
    person = grammars.embed_schema(PERSON)
    call = f"{grammars.literal('<call>')} {person} {grammars.literal('</call>')}"
    grammar = grammars.lark(f"start: call+\ncall: {call}")
    assert accepts(grammar, '<call>{"name":"Ada","age":36}</call>')
    assert not accepts(grammar, '<call>{"name": "Ada","age":36}</call>')


def test_a_schema_that_nests_without_end_is_refused() -> None:
    schema: grammars.Schema = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ValidationError, match="nests too deeply"):
        grammars.json_schema(schema)
