"""Structural tags: which texts they hold, as xgrammar says it, tokens of tags, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.router.http.fake_engine import byte_tokenizer
from tgi_trio.errors import ValidationError
from tgi_trio.grammars.compiler import compile_grammar, load_tokenizer
from tgi_trio.router.text.structural_tags import structural_tag
from tgi_trio.router.text.tokenizer import Tokenizer

# Of each tag, texts that the matcher of xgrammar 0.2.9 takes as a whole, and others that it does
# not, drawn from what such texts are made of. `marked`: where marks are tokens of the tokenizer.
CASES = json.loads((Path(__file__).parent / "structural_tag_cases.json").read_text())
MARKS = ("<call>", "</call>", "<|end|>")
EOS = 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(byte_tokenizer(), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(byte_tokenizer(MARKS), tmp_path_factory.mktemp("marked"))


class Reader:
    """Reads texts by grammars, token by token."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        self.tokenizer = tokenizer
        file = folder / "tokenizer.json"
        tokenizer._backend.save(str(file))
        self.tokens: LLTokenizer = load_tokenizer(file, [EOS], tokenizer.vocab_size)

    def begin(self, tag: Any) -> LLMatcher:
        return compile_grammar(structural_tag(tag, self.tokenizer.added_tokens), self.tokens)

    def takes(self, matcher: LLMatcher, text: str) -> bool:
        """Return whether a text fits; marks in it are tokens."""
        ids = self.tokenizer.encode_ids(text, add_special_tokens=False).tolist()
        return matcher.try_consume_tokens(ids) == len(ids)

    def fits(self, tag: Any, text: str) -> bool:
        """Return whether a text fits as a whole."""
        matcher = self.begin(tag)
        return self.takes(matcher, text) and matcher.is_accepting()

    def allowed(self, matcher: LLMatcher) -> set[str]:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        ids = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        return set(self.tokenizer.written(ids[ids < self.tokenizer.vocab_size].tolist()))


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_texts_fit_that_fit_at_xgrammar(
    plain: Reader, marked: Reader, case: dict[str, Any]
) -> None:
    assert case["fits"] and case["fits_not"]
    reader = marked if case.get("marked") else plain
    start = reader.begin(case["tag"])
    for wanted, texts in ((True, case["fits"]), (False, case["fits_not"])):
        for text in texts:
            matcher = start.deep_copy()
            found = reader.takes(matcher, text) and matcher.is_accepting()
            assert found is wanted, text


CALL: dict[str, Any] = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "regex", "pattern": "[a-z]+"},
    "end": "</call>",
}
CALLS = {"format": {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]}}


def test_a_tag_may_be_written_as_a_token(marked: Reader) -> None:
    """Both as one and letter by letter, where the letters are no token of the tokenizer."""
    assert marked.fits(CALLS, "hi <call>abc</call> and <call>x</call> bye<|end|>!")
    assert not marked.fits(CALLS, "hi <call>abc")
    matcher = marked.begin(CALLS)
    assert marked.takes(matcher, "hi ")
    assert {"<call>", "<|end|>", "</s>", "a"} <= marked.allowed(matcher)
    assert marked.takes(matcher, "<call>")
    assert marked.allowed(matcher) == set("abcdefghijklmnopqrstuvwxyz")
    assert marked.takes(matcher, "ab")
    assert {"</call>", "<", "c"} <= marked.allowed(matcher)
    assert not {"</s>", "<|end|>", "<call>"} & marked.allowed(matcher)
    spelled = marked.begin(CALLS)
    for letter in "so <call>a</call>.":
        ids = marked.tokenizer.encode_ids(letter, add_special_tokens=False).tolist()
        assert spelled.try_consume_tokens(ids) == 1, letter
    assert spelled.is_accepting()


def test_no_token_ends_a_text_inside_a_tag(marked: Reader) -> None:
    free = {**CALL, "content": {"type": "any_text"}}
    matcher = marked.begin({"format": free})
    assert marked.allowed(matcher) == {"<call>", "<"}
    assert marked.takes(matcher, "<call>what ever")
    assert "</call>" in marked.allowed(matcher) and "!" in marked.allowed(matcher)
    assert not {"</s>", "<|end|>"} & marked.allowed(matcher)
    assert marked.takes(matcher, "</call>") and matcher.is_accepting()
    assert marked.allowed(matcher) <= {"</s>"}


def test_a_token_that_is_left_out_is_not_allowed(marked: Reader) -> None:
    given = {"format": {"type": "any_text", "excludes": ["<|end|>"]}}
    allowed = marked.allowed(marked.begin(given))
    assert "<call>" in allowed and "<|end|>" not in allowed


@pytest.mark.parametrize("by_id", [True, False])
def test_a_token_is_that_token_and_not_its_text(marked: Reader, by_id: bool) -> None:
    """As xgrammar's `TokenFormat` has it: by id, or by text."""
    added = marked.tokenizer.added_tokens
    call = added["<call>"] if by_id else "<call>"
    elements = [{"type": "token", "token": call}, {"type": "const_string", "value": "x"}]
    matcher = marked.begin({"format": {"type": "sequence", "elements": elements}})
    assert marked.allowed(matcher) == {"<call>"}
    assert marked.takes(matcher, "<call>x") and matcher.is_accepting()


TEXT = {"type": "any_text"}
WORD = {"type": "const_string", "value": "x"}


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ("{", "the structural tag is no JSON"),
        ('{"format": {"type": "any_text", "max": NaN}}', "the structural tag is no JSON"),
        # half of a pair, which was a status of 500
        ('{"format": {"type": "const_string", "value": "\\ud83d"}}', "structural tag is no JSON"),
        (
            {"structures": [{"begin": "a", "schema": '{"const": "\\ud83d"}'}], "triggers": ["a"]},
            "`structures[0].schema` is no JSON",
        ),
        ([], "`the structural tag` must be an object"),
        ({}, "neither `format` nor `structures`"),
        ({"format": {"type": "xml"}}, "`format.type` must be one of `const_string`"),
        (
            {"format": {"type": "sequence", "elements": [{"type": {}}, {"type": []}]}},
            "`format.elements[0].type` must be one of `const_string`",
        ),
        ({"format": {"type": "token", "token": 5}}, "one of the tokenizer's added tokens"),
        ({"format": {"type": "token", "token": True}}, "one of the tokenizer's added tokens"),
        ({"format": {"type": "token", "token": "x"}}, "one of the tokenizer's added tokens"),
        ({"format": {"type": "exclude_token", "token": 5}}, "cannot be `exclude_token`"),
        (
            {"format": {"type": "any_tokens", "exclude_tokens": ["x"]}},
            "`format.exclude_tokens[0]` must be one of the tokenizer's added tokens",
        ),
        (
            {"format": {"type": "any_tokens", "max_tokens": 5}},
            "`format.max_tokens` is not supported",
        ),
        (
            {"format": {"type": "any_tokens", "exclude_tokens": 5}},
            "`format.exclude_tokens` must be a list of tokens",
        ),
        ({"format": {"type": "token_dispatch", "rules": [["a"]]}}, "a token and a format"),
        (
            {"format": {"type": "token_triggered_tags", "trigger_tokens": [True], "tags": [CALL]}},
            "`format.trigger_tokens[0]` must be one of the",
        ),
        (
            {"format": {**CALL, "begin": {"type": "token", "token": 7}}},
            "`format.begin.token` must be one of the",
        ),
        ({"format": {"type": "const_string"}}, "`format.value` must be a text"),
        ({"format": {"type": "json_schema", "json_schema": 5}}, "must be a schema"),
        (
            {"format": {"type": "json_schema", "json_schema": {}, "style": "cohere_xml"}},
            "`format.style` must be one of `json`, `qwen_xml`",
        ),
        (
            {"format": {"type": "qwen_xml_parameter", "json_schema": {"type": "integer"}}},
            "must be a JSON schema of type `object`",
        ),
        ({"format": {**CALL, "end": 5}}, "`format.end` must be a text or a list of texts"),
        ({"format": {"type": "sequence", "elements": []}}, "`format.elements` must be a list"),
        ({"format": {"type": "sequence", "elements": [TEXT, TEXT]}}, "nothing that is known"),
        (
            {"format": {"type": "sequence", "elements": [WORD, {"type": ["tag"]}]}},
            "`format.elements[1].type` must be one of",
        ),
        (
            {"format": {"type": "or", "elements": [{"type": {"a": 1}}, WORD]}},
            "`format.elements[0].type` must be one of",
        ),
        ({"format": {"type": "star", "content": TEXT}}, "`format.content` is free text"),
        ({"format": {**TEXT, "max_tokens": 5}}, "`format.max_tokens` is not supported"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": WORD}}, ">= `min`"),
        (
            {"format": {"type": "repeat", "min": True, "max": 2, "content": WORD}},
            "must be integers",
        ),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}]}, "needs triggers"),
        (
            {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]},
            "`tags[0].begin` begins with none of the triggers",
        ),
        (
            {"structures": [{"begin": "ab", "schema": "{", "end": ""}], "triggers": ["a"]},
            "`structures[0].schema` is no JSON",
        ),
        (
            {
                "structures": [{"begin": "ab", "schema": '{"not": {"const": 1e999}}'}],
                "triggers": ["a"],
            },
            "`structures[0].schema` is no JSON",
        ),
        (
            {"format": {"type": "triggered_tags", "triggers": ["a", "ab"], "tags": [CALL]}},
            "the trigger `a` is a part of `ab`",
        ),
        ({"format": {"type": "dispatch", "rules": [["a"]]}}, "a pattern and a format"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tag: Any, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        structural_tag(tag, {})
    assert text in str(caught.value)


def test_a_tag_that_nests_too_deeply_is_refused() -> None:
    given: Any = WORD
    for _ in range(100):
        given = {"type": "optional", "content": given}
    with pytest.raises(ValidationError, match="nests deeper than 64"):
        structural_tag({"format": given}, {})


def test_a_trigger_that_is_a_part_of_a_token_is_not_passed_over(marked: Reader) -> None:
    """A model that writes the whole of it as one token has begun the tag as well."""
    given = {"format": {"type": "triggered_tags", "triggers": ["<ca"], "tags": [CALL]}}
    assert marked.fits(given, "so <call>abc</call>!")
    assert not marked.fits(given, "so <call>!")
    assert not marked.fits(given, "so <call>")


@pytest.mark.parametrize("kind", ["qwen_xml_parameter", "json_schema"])
def test_the_older_name_of_a_style_is_the_same(plain: Reader, kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    given = {"format": {"type": kind, "json_schema": schema, "style": "qwen_xml"}}
    assert plain.fits(given, "<parameter=a>5</parameter>")
    assert not plain.fits(given, "<parameter=a>x</parameter>")


@pytest.mark.parametrize("style", ["json", "gemma", "qwen_xml", "glm_xml"])
@pytest.mark.parametrize("key", ["uniqueItems", "contains", "propertyNames", "if"])
def test_what_no_grammar_holds_to_is_refused_in_every_style(
    plain: Reader, style: str, key: str
) -> None:
    """A property may have such a name, and a value."""
    sound = {"properties": {key: {"type": "array", "items": {"enum": [1, {key: 1}]}}}}
    tag = {"type": "json_schema", "style": style, "json_schema": sound}
    plain.begin({"format": tag})
    tag["json_schema"] = {"properties": {"x": {"type": "array", "items": {}, key: True}}}
    with pytest.raises((ValidationError, ValueError), match=key):
        plain.begin({"format": tag})
