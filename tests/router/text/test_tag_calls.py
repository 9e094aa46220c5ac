"""Structural tags beside tools: calls come in the model's own form, and the tags hold."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher

from tests.router.text.test_answer_grammar import MODELS, Model, model_of, use_of
from tests.router.text.tools.test_call_parser import BY_NAME, deltas, fold
from tgi_trio.router.text.structural_tags import structural_tag
from tgi_trio.router.text.tag_calls import CallPlace, ends_open
from tgi_trio.router.text.tools.call_formats import HERMES, Format

NUMBER = {"type": "regex", "pattern": "[0-9]+"}
SUM: dict[str, Any] = {"type": "tag", "begin": "<sum>", "content": NUMBER, "end": "</sum>"}
FREE: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<sum>"], "tags": [SUM]}
PARIS = ("get_weather", {"city": "Paris", "days": 3})


def begin(model: Model, given: dict[str, Any], *, required: bool = False) -> LLMatcher:
    """Return a matcher for an answer with tools and a tag."""
    tags = structural_tag({"format": given}, model.added, CallPlace.of(model.form))
    return model.matcher(use_of(required=required), tags, tagged=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "added"), MODELS)
def test_calls_come_beside_tags_in_free_text(form: Format, added: str) -> None:
    model = model_of(form.name, added)
    matcher = begin(model, FREE)
    call, wrong = form.write([PARIS]), form.write([("get_weather", {"city": "Berlin"})])
    fit = ["", "hi", call, "a <sum>12</sum> b <sum>3</sum>"]
    unfit = ["<sum>x</sum>", "<sum>", wrong, call + " and so on"]
    # Where calls begin an answer, or do not come, nothing comes before them.
    (unfit if form.anchored else fit).append(f"so <sum>12</sum> then {call}")
    unfit += [f"so <sum>x</sum> {call}", f"<sum>12{call}</sum>"]
    if not form.anchored:
        unfit.append(f"so <sum>1</sum> {wrong}")
    for spelled in (False, True):
        for text in fit:
            assert model.accepts(matcher, text, spelled=spelled), text
        for text in unfit:
            assert not model.accepts(matcher, text, spelled=spelled), text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "added"), MODELS)
def test_a_form_without_free_text_at_its_end_is_the_answer_or_calls_are(
    form: Format, added: str
) -> None:
    model = model_of(form.name, added)
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    matcher = begin(model, {"type": "json_schema", "json_schema": schema})
    call = form.write([PARIS])
    for text in (call, '{"name":"Ada"}'):
        assert model.accepts(matcher, text), text
    for text in ("hi", f"hi {call}", f'{{"name":"Ada"}}{call}', ""):
        assert not model.accepts(matcher, text), text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("form", "added"), MODELS)
def test_where_a_call_must_come_the_answer_is_calls(form: Format, added: str) -> None:
    model = model_of(form.name, added)
    matcher = begin(model, FREE, required=True)
    assert model.accepts(matcher, form.write([PARIS]))
    assert not model.accepts(matcher, "<sum>12</sum>")
    assert not model.accepts(matcher, f"<sum>12</sum>{form.write([PARIS])}")


OWN = {"type": "tag", "begin": "<tool_call>", "content": NUMBER, "end": "</tool_call>"}


@pytest.mark.parametrize("added", ["text", "tokens", "special"])
@pytest.mark.parametrize("trigger", ["<tool", "<tool_call>"])
def test_a_tag_that_begins_like_calls_says_alone_what_follows(added: str, trigger: str) -> None:
    model = model_of("hermes", added)
    given = {"type": "triggered_tags", "triggers": [trigger], "tags": [OWN]}
    matcher = begin(model, given)
    assert model.accepts(matcher, "so <tool_call>12</tool_call>.")
    assert not model.accepts(matcher, HERMES.write([PARIS]))
    alone = begin(model, OWN)
    assert model.accepts(alone, "<tool_call>12</tool_call>")
    assert not model.accepts(alone, HERMES.write([PARIS]))


@pytest.mark.parametrize("added", ["text", "tokens"])
def test_free_text_inside_a_tag_begins_no_call(added: str) -> None:
    model = model_of("hermes", added)
    inside = {**SUM, "content": {"type": "any_text"}}
    for given in ({**FREE, "tags": [inside]}, inside):
        matcher = begin(model, given)
        assert model.accepts(matcher, "<sum>any <b> text</sum>")
        assert not model.accepts(matcher, f"<sum>any {HERMES.write([PARIS])}</sum>")


def test_calls_follow_what_must_come_first() -> None:
    """A thought of the client's own, as a tag, then text or calls."""
    model = model_of("hermes", "tokens")
    thought = {"type": "tag", "begin": "<plan>", "content": {"type": "any_text"}, "end": "</plan>"}
    matcher = begin(model, {"type": "sequence", "elements": [thought, {"type": "any_text"}]})
    call = HERMES.write([PARIS])
    for text in ("<plan>x</plan>", "<plan>x</plan>hi", f"<plan>x</plan>hi {call}"):
        assert model.accepts(matcher, text), text
    for text in ("hi", call, f"<plan>x</plan>{call}!"):
        assert not model.accepts(matcher, text), text


def test_which_forms_end_with_free_text() -> None:
    text, word = {"type": "any_text"}, {"type": "const_string", "value": "x"}
    for given in (
        *(text, FREE, {"type": "dispatch", "rules": []}),
        {"type": "sequence", "elements": [word, text]},
        {"type": "or", "elements": [word, FREE]},
        {"type": "tag", "begin": "x", "content": text, "end": ""},
    ):
        assert ends_open(given), given
    for other in (word, SUM, {"type": "sequence", "elements": [text, word]}, None):
        assert not ends_open(other), other


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen-xml", "llama-3"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_under_both_is_read_as_text_and_calls(name: str, seed: int) -> None:
    """Written at random: text with whole tags, then calls of the functions that there are."""
    form = BY_NAME[name]
    model, source = model_of(name, "text"), random.Random(seed)
    matcher = begin(model, FREE)
    said = "".join(source.choice([" ", "ab", "<sum>4</sum>", "<", "é"]) for _ in range(9))
    said = "" if form.anchored else f"{said}."
    called = [("get_weather", {"city": source.choice(["Paris", "Rome"]), "days": 2})]
    text = said + form.write(called)
    assert model.accepts(matcher, text)
    answer = fold(deltas(form, list(text), functions=list(use_of().functions)))
    assert (answer.content or "").strip() == said.strip()
    assert [(each.name, json.loads(each.arguments)) for each in answer.calls] == called
