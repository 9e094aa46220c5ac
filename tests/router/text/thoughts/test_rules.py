"""A thought before whatever is forced, in one grammar, held against llguidance and the reader."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tests.router.text.test_answer_grammar import ALL, EOS, tokenizer_with, use_of
from tgi_trio.router.delta import Answer
from tgi_trio.router.text import grammars
from tgi_trio.router.text.answer import AnswerParser, CallOpening, fold
from tgi_trio.router.text.answer_grammar import form_grammar, free_grammar, tool_grammar
from tgi_trio.router.text.thoughts.marks import HARMONY, KNOWN, Marks
from tgi_trio.router.text.thoughts.place import Place
from tgi_trio.router.text.thoughts.rules import ThoughtRules, Trigger, Vocabulary
from tgi_trio.router.text.tools.call_formats import FORMATS, HERMES
from tgi_trio.router.text.tools.call_parser import CallParser, TextParser
from tgi_trio.router.text.tools.functions import ToolUse

THINK = Marks("<think>", "</think>")
NAMES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
)
OBJECT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
FORMS = {
    "json_schema": (grammars.json_schema(OBJECT), '{"a":1}', '{"a":3}'),
    "json_object": (grammars.json_object(), '{"b":[]}', "[]"),
    "regex": (grammars.regex("[a-c]{3}"), "abc", "abd"),
    "choice": (grammars.choice(["yes", "<b>no"]), "<b>no", "maybe"),
    "lark": (grammars.lark('start: "x" Y\nY: /y+/'), "xyy", "yx"),
}
PLACES = (Place.INSIDE, Place.MAY_OPEN, Place.CLOSED)
KINDS = ("text", "tokens", "special")


class Model:
    """A tokenizer with a token per byte and some that are added, and what it may write."""

    def __init__(self, kind: str) -> None:
        self.names = NAMES if kind != "text" else ()
        self.special = special = kind == "special"
        self.backend = tokenizer_with(self.names, special)
        self.tokenizer = LLTokenizer(self.backend.to_str(), eos_token=EOS)
        added = {text: i for i, text in enumerate(("</s>", *self.names))}
        self.vocabulary = Vocabulary(added, frozenset(range(len(added)) if special else [EOS]))

    def rules(self, place: Place, marks: Marks = THINK, **more: Any) -> ThoughtRules:
        return ThoughtRules(marks, place, self.vocabulary, **more)

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def ids(self, text: str) -> list[int]:
        either = "|".join(map(re.escape, self.names))
        pieces = re.split(f"({either})", text) if either else [text]
        vocabulary = self.backend.get_vocab()
        found = []
        for piece in pieces:
            whole = piece in self.names
            found += [vocabulary[piece]] if whole else self.backend.encode(piece).ids
        return found

    def thinks_of(self, text: str, budget: int | None) -> bool:
        """Whether a thought can hold a text: not a special token, nor what the mark begins with."""
        if budget is not None:
            return "<" not in text
        return "<tool_call>" not in text or not self.special

    def accepts(self, grammar: str, text: str) -> bool:
        matcher, ids = self.matcher(grammar), self.ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def write(self, grammar: str, seed: int, most: int = 400) -> tuple[str, list[int], bool]:
        """Return what a model of random taste writes, its tokens, and whether it ended."""
        matcher, source = self.matcher(grammar), random.Random(seed)
        mask = allocate_token_bitmask(1, self.tokenizer.vocab_size)
        ids: list[int] = []
        ending = set(self.ids("</think>")) if self.names else set()
        while len(ids) < most and not matcher.is_stopped():
            fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            assert allowed
            marks = [id for id in allowed if id in ending]
            token = marks[0] if marks and source.random() < 0.1 else source.choice(allowed)
            assert matcher.consume_token(token), matcher.get_error()
            if token == EOS:
                return self.backend.decode(ids, skip_special_tokens=False), ids, True
            ids.append(token)
        ended = matcher.is_accepting() or matcher.is_stopped()
        return self.backend.decode(ids, skip_special_tokens=False), ids, ended


def read(text: str, place: Place, use: ToolUse | None = None, marks: Marks = THINK) -> Answer:
    numbers = itertools.count()
    calls: Any = TextParser()
    opening = None
    if use is not None:
        calls = CallParser(HERMES, lambda name: f"id{next(numbers)}", required=use.required)
        names = tuple(function.name + HERMES.middle for function in use.functions)
        opening = CallOpening(HERMES.trigger + HERMES.opening, names)
    parser = AnswerParser(marks, calls, inside=place is Place.INSIDE, opening=opening)
    answer = Answer()
    answer.add(fold([*map(parser.push, text), parser.finish()]))
    return answer


@pytest.fixture(params=KINDS, scope="module")
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_behind_a_thought(model: Model, form: str) -> None:
    grammar, good, bad = FORMS[form]
    for place, budget in itertools.product(PLACES, (None, 40)):
        whole = form_grammar(grammar, model.rules(place, budget=budget))
        begin = "" if place is Place.INSIDE else "<think>"
        thinks = place is not Place.CLOSED
        for thought in ("\nHm, 雨.\n", "", "a < b", "say <tool_call>"):
            if not model.thinks_of(thought, budget):
                continue
            text = f"{begin}{thought}</think>"
            assert model.accepts(whole, text + good) is thinks, (place, budget, text)
            assert model.accepts(whole, f"{text}\n\n{good}") is thinks
            for wrong in (text, text + bad, f"{text}{good} and", f"{text}so {good}"):
                assert not model.accepts(whole, wrong), (place, budget, wrong)
        assert model.accepts(whole, good) is (place is not Place.INSIDE)
        assert not model.accepts(whole, bad)
        assert not model.accepts(whole, f"{begin}Hm.")


def test_without_thoughts_a_form_is_what_it_was() -> None:
    for grammar, _, _ in FORMS.values():
        assert form_grammar(grammar, None) == grammar


def trigger_of() -> Trigger:
    return Trigger(HERMES.trigger, HERMES.opening)


@pytest.mark.parametrize("budget", [None, 30])
def test_calls_that_must_come(model: Model, budget: int | None) -> None:
    use = use_of(required=True)
    call, wrong = HERMES.write([("get", {"to": "l"})]), HERMES.write([("get", {"to": "x"})])
    for place in PLACES:
        rules = model.rules(place, budget=budget, trigger=trigger_of())
        whole = tool_grammar(HERMES, use, model.vocabulary.added, rules)
        begin = "" if place is Place.INSIDE else "<think>"
        thinks = place is not Place.CLOSED
        assert model.accepts(whole, f"{begin}Rain?\n</think>\n\n{call}") is thinks
        assert not model.accepts(whole, f"{begin}Rain?\n</think>\n\n{wrong}")
        assert not model.accepts(whole, f"{begin}Rain?\n</think>\n\nWell: {call}")
        assert model.accepts(whole, call) is (begin != "" or bool(model.names))
        # A call inside the thought is a call: as good as any other.
        assert model.accepts(whole, f"{begin}Rain?\n{call}") is (thinks and bool(model.names))
        assert not model.accepts(whole, f"{begin}Rain?\n{wrong}")
        assert not model.accepts(whole, f"{begin}Rain?")


@pytest.mark.parametrize("budget", [None, 60])
def test_prose_or_calls_behind_a_thought(model: Model, budget: int | None) -> None:
    call, wrong = HERMES.write([("get", {"to": "l"})]), HERMES.write([("get", {"to": "x"})])
    for place in PLACES:
        rules = model.rules(place, budget=budget)
        whole = tool_grammar(HERMES, use_of(), model.vocabulary.added, rules)
        begin = "" if place is Place.INSIDE else "<think>"
        if place is not Place.CLOSED:
            # The model may end as it likes, unless its thought has a budget.
            assert model.accepts(whole, f"{begin}Rain?") is (budget is None)
            assert model.accepts(whole, f"{begin}Rain?</think>Well.")
            assert model.accepts(whole, f"{begin}Rain?</think>\n\n{call}")
            assert model.accepts(whole, f"{begin}Rain?</think>Well.\n{call}")
            assert not model.accepts(whole, f"{begin}Rain?</think>Well.\n{wrong}")
            if model.thinks_of("<tool_call>", budget):  # it thinks of the word, and calls nothing
                assert model.accepts(whole, f"{begin}a <tool_call> b</think>Well.\n{call}")
                assert not model.accepts(whole, f"{begin}a <tool_call> b</think>Well.\n{wrong}")
        if place is not Place.INSIDE:
            assert model.accepts(whole, "Well.") and model.accepts(whole, call)
            assert model.accepts(whole, f"Well.\n{call}")
            assert not model.accepts(whole, wrong)


@pytest.mark.parametrize("place", [Place.INSIDE, Place.MAY_OPEN])
@pytest.mark.parametrize("budget", [1, 8, 40])
def test_a_budget_ends_the_thought(model: Model, place: Place, budget: int) -> None:
    """After so many tokens nothing but the end mark fits; then comes what was asked for."""
    begin = "" if place is Place.INSIDE else "<think>"
    rules = {
        "form": form_grammar(FORMS["json_schema"][0], model.rules(place, budget=budget)),
        "free": free_grammar(model.vocabulary.added, model.rules(place, budget=budget)),
        "calls": tool_grammar(
            HERMES,
            use_of(required=True),
            model.vocabulary.added,
            model.rules(place, budget=budget, trigger=trigger_of()),
        ),
    }
    for name, grammar in rules.items():
        matcher = model.matcher(grammar)
        head = model.ids(begin + "x" * budget)
        assert matcher.try_consume_tokens(head) == len(head), name
        assert not matcher.is_accepting(), name
        more = matcher.deep_copy()
        assert not more.try_consume_tokens(model.ids("x")), name
        for other in NAMES[3:] if model.names else ():  # forced calls may end a thought
            assert not more.try_consume_tokens(model.ids(other)), (name, other)
        end = model.ids("</think>")
        assert matcher.try_consume_tokens(end) == len(end), name
        assert matcher.is_accepting() is (name == "free")
        short = model.ids(f"{begin}{'x' * (budget - 1)}</think>")
        assert model.matcher(grammar).try_consume_tokens(short) == len(short), name


def test_no_budget_at_all_is_no_thought(model: Model) -> None:
    grammar = form_grammar(FORMS["regex"][0], model.rules(Place.INSIDE, budget=0))
    assert model.accepts(grammar, "</think>\nabc")
    assert not model.accepts(grammar, "x</think>abc") and not model.accepts(grammar, "abc")
    grammar = form_grammar(FORMS["regex"][0], model.rules(Place.MAY_OPEN, budget=0))
    assert model.accepts(grammar, "abc") and model.accepts(grammar, "<think></think>abc")
    assert not model.accepts(grammar, "<think>x</think>abc")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("place", PLACES)
def test_what_is_written_is_read_as_thought_and_what_was_forced(
    model: Model, place: Place, seed: int
) -> None:
    budget = 8
    form = form_grammar(FORMS["json_schema"][0], model.rules(place, budget=budget))
    text, _, ended = model.write(form, seed)
    answer = read(text, place)
    assert ended and json.loads(answer.content)["a"] in (1, 2), text
    assert len(answer.thought.encode()) <= budget + sum(len(name) for name in NAMES) * budget
    rules = model.rules(place, budget=budget, trigger=trigger_of())
    use = use_of(required=True)
    text, _, ended = model.write(tool_grammar(HERMES, use, model.vocabulary.added, rules), seed)
    answer = read(text, place, use)
    assert ended and answer.content == "" and 1 <= len(answer.calls) <= 4, text
    for call in answer.calls:
        assert call.name in [each.name for each in ALL]
        assert isinstance(json.loads(call.arguments), dict)


FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|start|>assistant"


def test_harmony_says_where_its_answer_begins(model: Model) -> None:
    """Without tools too: a form comes on its channel, and nothing is told but it."""
    form, thought = FORMS["json_schema"][0], f"{ANALYSIS}Hm.<|end|>"
    preamble = "<|channel|>commentary<|message|>Well.<|end|>"
    for budget in (None, 8):
        grammar = form_grammar(form, model.rules(Place.MAY_OPEN, HARMONY, budget=budget))
        answer = FINAL + '{"a":1}'
        for text in (answer, f"{thought}{NEXT}{answer}"):
            assert model.accepts(grammar, text), text
            assert read(text, Place.MAY_OPEN, marks=HARMONY).content == '{"a":1}'
        # More than one thought is as many as a budget is for.
        twice = f"{thought}{NEXT}{thought}{NEXT}{answer}"
        assert model.accepts(grammar, twice) is (budget is None)
        for wrong in (
            '{"a":1}',
            f'{thought}{{"a":1}}',
            f'{thought}{NEXT}{{"a":1}}',
            thought + answer,
            f"{preamble}{NEXT}{answer}",
            f'{FINAL}{{"a":3}}',
            thought,
        ):
            assert not model.accepts(grammar, wrong), wrong
        # The prompt may have begun a thought, or what is told.
        inside = form_grammar(form, model.rules(Place.INSIDE, HARMONY, budget=budget))
        assert model.accepts(inside, f"Hm.<|end|>{NEXT}{answer}")
        assert not model.accepts(inside, answer)
        begun = form_grammar(form, model.rules(Place.CLOSED, HARMONY, budget=budget))
        assert model.accepts(begun, '{"a":1}') and not model.accepts(begun, answer)


@pytest.mark.parametrize("budget", [0, 1, 8])
def test_harmony_keeps_a_budget_without_tools(model: Model, budget: int) -> None:
    added = model.vocabulary.added
    grammar = free_grammar(added, model.rules(Place.MAY_OPEN, HARMONY, budget=budget))
    whole = f"{ANALYSIS}{'x' * budget}<|end|>{NEXT}"
    for text in (FINAL, f"{whole}{FINAL}Well.", f"<|channel|>commentary<|message|>W<|end|>{NEXT}"):
        ids = model.ids(text)
        assert model.matcher(grammar).try_consume_tokens(ids) == len(ids), text
    for text in (f"{ANALYSIS}{'x' * (budget + 1)}", whole + ANALYSIS, "Well."):
        ids = model.ids(text)
        assert model.matcher(grammar).try_consume_tokens(ids) < len(ids), text


def test_kimi_k3_may_close_an_empty_answer_before_its_calls() -> None:
    model = Model("text")
    form = next(each for each in FORMATS if each.name == "kimi-k3")
    marks = next(each for each in KNOWN if each.start == "<|open|>think<|sep|>")
    trigger = Trigger(form.trigger, form.beginning[len(form.trigger) :])
    rules = model.rules(Place.INSIDE, marks, trigger=trigger)
    grammar = tool_grammar(form, use_of(required=True), model.vocabulary.added, rules)
    thought, call = f"Hm.{marks.end}", form.write([("get", {"to": "l"})])
    for text in (
        thought + call,
        f"{thought}{marks.opening}{marks.closing}{call}",
        f"{thought}{marks.opening}{marks.closing}{call}{marks.closing}{marks.ending}",
    ):
        assert model.accepts(grammar, text), text
    assert not model.accepts(grammar, f"{thought}{marks.opening}Well.{marks.closing}{call}")


def test_a_thought_on_a_real_vocabulary() -> None:
    """Tokens of several characters may reach over the end of a mark; what is read stays right."""
    from tgi_trio.demo import model_path

    described = json.loads((model_path() / "tokenizer.json").read_text())
    # Its marks are tokens of their own; here they are to be spelled.
    described["added_tokens"] = [each for each in described["added_tokens"] if each["special"]]
    tokenizer = LLTokenizer(json.dumps(described))
    vocabulary = Vocabulary({}, frozenset())
    for place, budget in itertools.product((Place.INSIDE, Place.MAY_OPEN), (None, 30)):
        rules = ThoughtRules(THINK, place, vocabulary, budget=budget)
        matcher = LLMatcher(tokenizer, form_grammar(FORMS["json_schema"][0], rules), log_level=0)
        begin = "" if place is Place.INSIDE else "<think>"
        ids = tokenizer.tokenize_str(begin + 'Rain.</think>\n\n{"a":1}')
        assert matcher.try_consume_tokens(ids) == len(ids), (place, budget)
        assert matcher.is_accepting()
