"""Arguments of random schemas, forced by the real engine in every style: they validate."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tests.router.text.test_answer_grammar import EOS, forced, marks_of, tokenizer_with
from tests.router.text.tools.test_call_parser import BY_NAME, deltas, fold
from tgi_trio.errors import ValidationError
from tgi_trio.router.text.answer_grammar import tool_grammar
from tgi_trio.router.text.tools.format import Format
from tgi_trio.router.text.tools.functions import Function, ToolUse
from tgi_trio.router.text.tools.schemas import find_items, find_literals

STYLES = [
    forced(BY_NAME[name])
    for name in ("qwen-xml", "glm", "dsml", "kimi-k3", "minimax-m2", "lfm2", "gemma-4")
]
STRINGS = st.one_of(
    st.just({"type": "string"}),
    st.just({"type": "string", "minLength": 1, "maxLength": 4}),
    st.sampled_from([{"pattern": "^[0-9]{2,4}$"}, {"pattern": "a/b|c$"}, {"format": "date"}]).map(
        lambda more: {"type": "string", **more}
    ),
    st.lists(
        st.sampled_from(['"', "a\nb", "2", "true", "", " x ", "</p", "naïve 雨", "'", "null"]),
        min_size=1,
        max_size=3,
        unique=True,
    ).map(lambda found: {"enum": found}),
    st.just({"const": "only\n"}),
)
SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": [1, 2, None, True]},
        {"enum": ["a", 1, None]},
        {"const": 3},
    ]
)
# What several schemas say together, of which one says less than another.
TOGETHER = st.sampled_from(
    [
        {"type": "integer", "anyOf": [{"type": "number", "minimum": 0, "maximum": 9}]},
        {"type": "number", "minimum": 0, "allOf": [{"type": "integer", "maximum": 9}]},
        {"enum": [1, "a", 2.5, None], "type": ["string", "null"]},
        {"allOf": [{"enum": [True, 1, "ab"]}, {"enum": [1.0, "ab"]}], "minLength": 2},
        {"const": "a", "anyOf": [{"type": "null"}, {"type": "string"}]},
        {"$ref": "#/$defs/side", "enum": ["r", 1]},
        {"anyOf": [{"$ref": "#/$defs/side", "type": "integer"}, {"type": "boolean"}]},
        {"anyOf": [{"type": "boolean", "allOf": [False]}, {"const": 7}]},
        {"allOf": [{"$ref": "#/$defs/same"}, {"$ref": "#/$defs/left"}]},
        {"type": "string", "oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    ]
)
# What no value fits.
IMPOSSIBLE: list[dict[str, Any]] = [
    {"$ref": "#/$defs/side", "type": "integer"},
    {"type": "string", "allOf": [{"type": ["integer", "null"]}]},
    {"allOf": [{"const": 1}, {"const": 2}]},
    {"enum": ["a", "b"], "minLength": 2},
    {"anyOf": [False, {"type": "boolean", "enum": [1]}]},
]
SMALL = st.one_of(STRINGS, SCALARS, TOGETHER, st.just({"$ref": "#/$defs/side"}))


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    listed = st.dictionaries(st.sampled_from(["x", "yy", "z_1"]), inner, max_size=3)
    return listed.flatmap(
        lambda found: st.lists(st.sampled_from(sorted(found) or ["x"]), unique=True).map(
            lambda names: {
                "type": "object",
                "properties": found,
                "required": [name for name in names if name in found],
            }
        )
    )


VALUES = st.recursive(
    SMALL,
    lambda inner: st.one_of(
        objects(inner),
        inner.map(lambda each: {"type": "array", "items": each, "minItems": 1, "maxItems": 2}),
        inner.map(lambda each: {"type": "array", "items": each, "minItems": 2}),
        inner.map(
            lambda each: {
                "type": "array",
                "prefixItems": [each, each],
                "items": False,
                "minItems": 1,
            }
        ),
        inner.map(
            lambda each: {"type": "array", "prefixItems": [each], "items": each, "maxItems": 2}
        ),
        inner.map(
            lambda each: {"type": "array", "prefixItems": [each], "items": each, "minItems": 2}
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}),
        st.just({"type": ["string", "null"]}),
        st.just({"type": ["integer", "null"]}),
        st.just({"allOf": [{"type": "string"}, {"minLength": 2}, {"maxLength": 3}]}),
    ),
    max_leaves=4,
)
DEFINITIONS = {
    "side": {"enum": ["l", "r"]},
    "same": {"$ref": "#/$defs/side"},
    "left": {"$ref": "#/$defs/only"},
    "only": {"const": "l"},
}
PARAMETERS = objects(VALUES).map(lambda each: {**each, "$defs": DEFINITIONS})


class Writer:
    """Writes what a model of random taste would."""

    def __init__(self, form: Format, kind: str) -> None:
        names = marks_of(form) if kind != "text" else ()
        self.backend = tokenizer_with(names, kind == "special")
        self.tokenizer = LLTokenizer(self.backend.to_str(), eos_token=EOS)
        self.added = {text: i for i, text in enumerate(("</s>", *names))}
        ids = range(self.tokenizer.vocab_size)
        self.signs = np.array([i <= len(names) + 1 or self._is_sign(i) for i in ids])

    def write(self, grammar: str, seed: int, most: int = 500) -> str | None:
        """Return a text of the grammar; None where it came to no end."""
        matcher, source = LLMatcher(self.tokenizer, grammar, log_level=0), random.Random(seed)
        assert not matcher.is_error(), matcher.get_error()
        mask = allocate_token_bitmask(1, self.tokenizer.vocab_size)
        ids: list[int] = []
        while len(ids) < most and not matcher.is_stopped():
            fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            signs = allowed[self.signs[allowed]]
            # Marks and quotes end what is open: they come more often than other bytes.
            token = int(source.choice(signs if len(signs) and source.random() < 0.5 else allowed))
            assert matcher.consume_token(token), matcher.get_error()
            if token == EOS:
                break
            ids.append(token)
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        whole = matcher.is_accepting() or matcher.is_stopped()
        return text if whole and "\ufffd" not in text else None

    def _is_sign(self, id: int) -> bool:
        return self.backend.id_to_token(id) in tuple('<>"/|')


@cache
def writer_of(name: str, kind: str) -> Writer:
    """Return the writer of a format as it is forced."""
    return Writer(forced(BY_NAME[name]), kind)


@pytest.mark.parametrize("form", STYLES, ids=lambda form: form.name)
@settings(max_examples=40)
@given(
    parameters=PARAMETERS,
    kind=st.sampled_from(["text", "tokens", "special"]),
    seed=st.integers(0, 10**6),
)
def test_forced_arguments_are_valid(
    form: Format, parameters: dict[str, Any], kind: str, seed: int
) -> None:
    writer = writer_of(form.name, kind)
    function = Function.of("f", parameters)
    use = ToolUse((function,), required=True, most=1)
    text = writer.write(tool_grammar(form, use, writer.added), seed)
    if text is None:
        return
    whole = fold(deltas(form, [text], functions=[function]))
    assert fold(deltas(form, list(text), functions=[function])) == whole
    (call,) = whole.calls
    arguments = json.loads(call.arguments)
    # Not `validate`, which first holds the schema itself to another: half of the test's time.
    jsonschema.Draft202012Validator(parameters).validate(arguments)
    assert set(arguments) <= set(parameters["properties"])


@pytest.mark.parametrize("form", STYLES, ids=lambda form: form.name)
@pytest.mark.parametrize("impossible", IMPOSSIBLE, ids=json.dumps)
def test_what_no_value_fits_is_left_out_or_refused(form: Format, impossible: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"x": impossible, "yy": {"type": "boolean"}},
        "required": ["yy"],
        "additionalProperties": impossible,
        "$defs": DEFINITIONS,
    }
    writer = writer_of(form.name, "text")
    function = Function.of("f", parameters)
    text = writer.write(tool_grammar(form, ToolUse((function,), required=True, most=1), {}), 3)
    assert text is not None
    (call,) = fold(deltas(form, [text], functions=[function])).calls
    assert json.loads(call.arguments).keys() == {"yy"}
    needed = Function.of("f", {**parameters, "required": ["x"]})
    with pytest.raises(ValidationError, match="no value fits the schema of `x`, which is required"):
        tool_grammar(form, ToolUse((needed,), required=True, most=1), {})


def test_older_schemas_with_booleans_as_limits_are_read() -> None:
    assert find_literals({"enum": [1, 3], "minimum": 1, "exclusiveMinimum": True}) == [1, 3]


WHOLE, TRUTH = {"type": "integer"}, {"type": "boolean"}
ARRAYS: list[dict[str, Any]] = [
    {},
    {"items": WHOLE, "minItems": 1, "maxItems": 2},
    {"items": WHOLE, "maxItems": 10**12},
    {"items": False},
    {"allOf": [{"items": WHOLE}, {"items": {"enum": [1, 2, True]}, "maxItems": 2}]},
    {"prefixItems": [WHOLE, TRUTH]},
    {"prefixItems": [WHOLE, TRUTH], "items": False},
    {"prefixItems": [WHOLE, TRUTH], "maxItems": 0},
    {"prefixItems": [WHOLE, TRUTH], "maxItems": 1},
    {"prefixItems": [WHOLE, TRUTH], "maxItems": 2},
    {"prefixItems": [WHOLE, TRUTH], "minItems": 1, "maxItems": 3},
    {"prefixItems": [WHOLE], "items": WHOLE, "minItems": 3},
    {"prefixItems": [WHOLE], "items": WHOLE, "minItems": 3, "maxItems": 3},
    {"prefixItems": [WHOLE, False, TRUTH]},
    {"prefixItems": [WHOLE, TRUTH], "items": {"allOf": [{"const": 1}, {"const": 2}]}},
    {"anyOf": [{"items": WHOLE, "minItems": 2, "maxItems": 1}, {"items": TRUTH}]},
]
CANDIDATES = json.loads(
    "[[], [1], [7], [true], [1, 2], [1, true], [1, 7], [1, true, 3], [1, 2, 3], [1, 2, 3, 4]]"
)


@pytest.mark.parametrize("array", ARRAYS, ids=json.dumps)
def test_gemmas_arrays_are_those_that_fit(array: dict[str, Any]) -> None:
    """As many items as JSON may have, and in their places what may be there."""
    form = forced(BY_NAME["gemma-4"])
    writer = writer_of(form.name, "text")
    schema = {"type": "array", **array}
    function = Function.of("f", {"type": "object", "properties": {"x": schema}, "required": ["x"]})
    grammar = tool_grammar(form, ToolUse((function,), required=True, most=1), {})
    for value in CANDIDATES:
        text = f"<|tool_call>call:f{{x:{json.dumps(value, separators=(',', ':'))}}}<tool_call|>"
        matcher = LLMatcher(writer.tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = writer.backend.encode(text, add_special_tokens=False).ids
        taken = matcher.validate_tokens(ids) == len(ids)
        assert taken == jsonschema.Draft202012Validator(schema).is_valid(value), value


@pytest.mark.parametrize("form", STYLES, ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("array", "why"),
    [
        ({"items": WHOLE, "minItems": 3, "maxItems": 2}, "no value fits the schema of `x`"),
        ({"prefixItems": [WHOLE], "items": False, "minItems": 2}, "no value fits the schema"),
        ({"items": WHOLE, "minItems": "2"}, '`minItems` must be a whole number >= 0. Given: "2"'),
        ({"items": WHOLE, "minItems": 2.5}, "`minItems` must be a whole number >= 0. Given: 2.5"),
        ({"items": WHOLE, "maxItems": None}, "`maxItems` must be a whole number >= 0. Given: null"),
        ({"items": WHOLE, "maxItems": -1}, "`maxItems` must be a whole number >= 0. Given: -1"),
        ({"type": "string", "minLength": "a"}, "`minLength` must be a whole number >= 0. Given: "),
        ({"minItems": "2", "allOf": [{"minItems": 3}]}, "`minItems` must be a number"),
    ],
)
def test_arrays_that_cannot_be_are_refused(form: Format, array: dict[str, Any], why: str) -> None:
    schema = {"type": "array", **array}
    function = Function.of("f", {"type": "object", "properties": {"x": schema}, "required": ["x"]})
    with pytest.raises(ValidationError, match=re.escape(why)):
        tool_grammar(form, ToolUse((function,), required=True, most=1), {})


def test_older_schemas_with_lists_of_items_are_read() -> None:
    found = find_items({"items": [WHOLE, TRUTH], "additionalItems": False, "minItems": 1}, {})
    assert (found.first, found.more, found.least, found.most) == ([WHOLE, TRUTH], False, 1, 2)
    with pytest.raises(ValidationError, match="needs 3 items, and cannot have more than 1"):
        find_items({"prefixItems": [WHOLE, {"enum": []}], "minItems": 3}, {})
