"""What the grammar of tool calls allows, held against llguidance and against the parser."""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tests.router.text.tools.test_call_parser import BY_NAME, EVERY, deltas, fold
from tgi_trio.router.text import grammars
from tgi_trio.router.text.answer_grammar import _lines, silent_grammar, tool_grammar
from tgi_trio.router.text.tools.arguments_json import JSON
from tgi_trio.router.text.tools.arguments_python import PythonArguments
from tgi_trio.router.text.tools.call_formats import HERMES, Format
from tgi_trio.router.text.tools.functions import Function, ToolUse

WEATHER = Function.of(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city"],
    },
)
REF = {"$ref": "#/$defs/side"}
TURN = Function.of(
    "get", {"properties": {"to": REF}, "required": ["to"], "$defs": {"side": {"enum": ["l", "r"]}}}
)
STOP = Function.of("stop", None)
ALL = (WEATHER, TURN, STOP)
EOS = 0


def tokenizer_with(added: tuple[str, ...], special: bool) -> tokenizers.Tokenizer:
    """Return a tokenizer with a token per byte, and some that are added as in real ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["</s>", *added, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    backend.add_tokens([tokenizers.AddedToken(text, special=special) for text in added])
    return backend


THOUGHTS = ("<think>", "</think>")
# What is a token of its own in real vocabularies.
MARK = re.compile(r'<\|"\|>|｜DSML｜|</?[^<>="\n｜ ]+>|<｜[^<>｜]+｜>|\[[A-Z_]+\]')


def marks_of(form: Format) -> tuple[str, ...]:
    return tuple(dict.fromkeys(MARK.findall(" ".join(form.texts))))


def forced(form: Format) -> Format:
    """Return the format as it is forced: strings in double quotes, whatever templates write."""
    if isinstance(form.arguments, PythonArguments):
        return replace(form, arguments=PythonArguments())
    return form


class Model:
    """A tokenizer, and what it may write under a grammar."""

    def __init__(self, form: Format, added: str) -> None:
        """`added`: what the marks of the format are: `text`, `tokens` or `special` tokens."""
        names = (*THOUGHTS, *marks_of(form)) if added != "text" else ()
        self.form = form
        self.backend = tokenizer_with(names, added == "special")
        self.tokenizer = LLTokenizer(self.backend.to_str(), eos_token=EOS)
        self.added = {text: i for i, text in enumerate(("</s>", *names))}

    def matcher(
        self, use: ToolUse, otherwise: str | None = None, *, tagged: bool = False
    ) -> LLMatcher:
        grammar = tool_grammar(self.form, use, self.added, otherwise=otherwise, tagged=tagged)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def silent(self) -> LLMatcher:
        """Return what it may write where tools are shown and none may be called."""
        grammar = silent_grammar(self.form, self.added)
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, matcher: LLMatcher, text: str, *, spelled: bool = False) -> bool:
        """`spelled`: the text comes byte by byte, whatever tokens there are for it."""
        matcher.reset()
        pieces = [chr(byte) for byte in text.encode()] if spelled and text.isascii() else [text]
        ids = [id for piece in pieces for id in self.backend.encode(piece).ids]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def write(self, use: ToolUse, seed: int, most: int = 600) -> tuple[str, bool]:
        """Return what a model of random taste writes, and whether it came to an end."""
        return self.write_freely(self.matcher(use), seed, most)

    def write_freely(self, matcher: LLMatcher, seed: int, most: int = 600) -> tuple[str, bool]:
        """Return the same under any grammar."""
        source = random.Random(seed)
        mask = allocate_token_bitmask(1, self.tokenizer.vocab_size)
        ids: list[int] = []
        while len(ids) < most and not matcher.is_stopped():
            fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(source.choice(allowed.tolist()))
            assert matcher.consume_token(token), matcher.get_error()
            if token == EOS:
                break
            ids.append(token)
        ended = matcher.is_accepting() or matcher.is_stopped()
        return self.backend.decode(ids, skip_special_tokens=False), ended


@cache
def model_of(name: str, added: str) -> Model:
    """Return the model of a format as it is forced."""
    return Model(forced(BY_NAME[name]), added)


def use_of(*functions: Function, required: bool = False, most: int = 4) -> ToolUse:
    return ToolUse(functions or ALL, required, most)


MODELS = [
    pytest.param(forced(form), added, id=f"{form.name}-{added}")
    for form in EVERY
    if not form.channels  # tools/test_channels.py
    for added in ("text", "tokens", "special")
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "added"), MODELS)
def test_prose_or_calls(form: Format, added: str) -> None:
    model = model_of(form.name, added)
    auto, required = model.matcher(use_of()), model.matcher(use_of(required=True))
    paris = ("get_weather", {"city": "Paris", "days": 3})
    one, two = form.write([paris]), form.write([paris, ("get", {"to": "l"})])
    for text in (one, form.write([("stop", {})]), *([two] if form.next else [])):
        for spelled in (False, True):
            assert model.accepts(auto, text, spelled=spelled)
            assert model.accepts(required, text, spelled=spelled)
    for prose in ("", "<think>Hm.</think>Well.", 'Hello, {"world"}', "<tool", "naïve 雨"):
        assert model.accepts(auto, prose)
        assert not model.accepts(required, prose)
    assert model.accepts(auto, f"I shall look. {one}")
    assert not model.accepts(required, f"I shall look. {one}")
    assert model.accepts(auto, f"<think>Rain?</think> I shall look. {one}")
    for wrong in (
        form.write([("unknown", {})]),
        form.write([("get_weather", {"city": "Berlin"})]),
        form.write([("get_weather", {"days": 1})]),
        form.write([("get", {"to": "l", "more": 1})]),
        *([form.write([("get", '{"to": "l"}')])] if form.arguments is JSON else []),  # not compact
        one + " and so on",
        one[:-1] if form.closing else one[:-2],
    ):
        for spelled in (False, True):
            assert not model.accepts(auto, wrong, spelled=spelled), wrong
            assert not model.accepts(required, wrong, spelled=spelled), wrong
        if not form.anchored:
            assert not model.accepts(auto, f"<think>Rain?</think> So: {wrong}"), wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "added"), MODELS)
def test_prose_without_calls(form: Format, added: str) -> None:
    model = model_of(form.name, added)
    silent = model.silent()
    for prose in ("", "<think>Hm.</think>Well.", 'Hello, {"world"}', "<tool", "naïve 雨", "[], {}"):
        assert model.accepts(silent, prose), prose
    call = form.write([("get_weather", {"city": "Paris", "days": 3})])
    for text in (call, form.trigger, *([] if form.anchored else [f"So: {call}", f"[<| {call}"])):
        for spelled in (False, True):
            assert not model.accepts(silent, text, spelled=spelled), text
    text, _ = model.write_freely(silent, seed=len(form.name))
    assert fold(deltas(form, list(text), functions=list(ALL))).calls == []


def test_prose_without_calls_of_a_vocabulary_without_added_tokens() -> None:
    model = Model(HERMES, "text")
    model.added = {}
    assert model.accepts(model.silent(), "Well, <tool and so on")
    assert not model.accepts(model.silent(), HERMES.write([("stop", {})]), spelled=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "added"), MODELS)
def test_calls_or_an_answer_of_a_form(form: Format, added: str) -> None:
    model = model_of(form.name, added)
    rain = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    otherwise = grammars.json_schema(rain)
    call = form.write([("get_weather", {"city": "Paris"})])
    free = model.matcher(use_of(), otherwise)
    for text in (call, '{"rain":true}'):
        assert model.accepts(free, text)
    for text in ("It rains.", '{"rain":1}', f"So: {call}", ""):
        assert not model.accepts(free, text)
    # As calls of some families begin.
    named = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    either = model.matcher(use_of(), grammars.json_schema(named))
    for text in (call, '{"name":"Ada"}'):
        assert model.accepts(either, text)
    demanded = model.matcher(use_of(required=True), otherwise)
    assert model.accepts(demanded, call)
    assert not model.accepts(demanded, '{"rain":true}')


class Pieces(json.JSONEncoder):
    """Notes how much is encoded in one call."""

    longest = 0

    def encode(self, o: Any) -> str:
        text = super().encode(o)
        self.longest = max(self.longest, len(text))
        return text


@pytest.mark.parametrize("form", [HERMES, BY_NAME["harmony"]], ids=lambda form: str(form.name))
def test_a_grammar_of_many_tools_is_written_in_pieces(
    form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    awkward = '"\\/\n\t\0\x7f\u2028 naïve 雨 🌧'
    schema = {"properties": {awkward: {"enum": [awkward, 1e16, 2**70, None]}}}
    use = use_of(*(Function.of(f"tool_{i}", schema) for i in range(1000)))
    pieces = Pieces(ensure_ascii=False, separators=(",", ":"))
    monkeypatch.setattr("tgi_trio.router.text.answer_grammar._JSON", pieces)
    grammar = tool_grammar(form, use, {}, otherwise=grammars.json_schema(schema))
    assert grammar == json.dumps(json.loads(grammar), ensure_ascii=False, separators=(",", ":")), (
        "as one call would write it"
    )
    assert len(grammar) > 50_000
    assert 0 < pieces.longest < 10_000, "each call holds the interpreter to its end"


@given(parts=st.lists(st.dictionaries(st.sampled_from("abcd"), st.text("xyz", max_size=3))))
def test_rules_of_one_name_are_as_in_one_dictionary(parts: list[dict[str, str]]) -> None:
    merged: dict[str, str] = {}
    for part in parts:
        merged |= part
    assert list(_lines(parts)) == [f"{name}: {rule}" for name, rule in merged.items()]


def test_as_many_calls_as_allowed() -> None:
    model = Model(HERMES, "text")
    stops: list[Any] = [("stop", {})]
    for most in (1, 2, 4):
        matcher = model.matcher(use_of(required=True, most=most))
        assert model.accepts(matcher, HERMES.write(stops * most))
        assert not model.accepts(matcher, HERMES.write(stops * (most + 1)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("form", "added"), MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_written_under_the_grammar_is_read_as_calls(
    form: Format, added: str, seed: int
) -> None:
    model = model_of(form.name, added)
    text, ended = model.write(use_of(required=True), seed)
    answer = fold(deltas(form, list(text), required=True, functions=list(ALL)))
    assert ended and answer.content == "" and 1 <= len(answer.calls) <= 4
    for call in answer.calls:
        valid(call.name or "", json.loads(call.arguments))


def valid(name: str, arguments: dict[str, Any]) -> None:
    """Check arguments by hand, without the engine that made them."""
    if name == "get_weather":
        assert arguments["city"] in ("Paris", "Rome")
        assert set(arguments) <= {"city", "days"}
        assert 1 <= arguments.get("days", 1) <= 9
    elif name == "get":
        assert arguments in ({"to": "l"}, {"to": "r"})
    else:
        assert (name, arguments) == ("stop", {})


def test_a_name_that_begins_another_is_told_apart() -> None:
    model = Model(BY_NAME["llama-3"], "text")
    short, long = Function.of("get", None), Function.of("get_all", None)
    matcher = model.matcher(ToolUse((short, long), True, 1))
    for name in ("get", "get_all"):
        assert model.accepts(matcher, model.form.write([(name, {})]))
