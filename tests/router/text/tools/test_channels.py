"""Harmony's messages: which channel is a thought, which is content, and what is a call."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tests.router.text.test_answer_grammar import ALL, tokenizer_with, use_of, valid
from tests.router.text.tools.test_call_parser import PLACES, cut, fold
from tgi_trio.router.delta import Answer
from tgi_trio.router.text import grammars
from tgi_trio.router.text.tools.channels import ChannelReader, channel_rules
from tgi_trio.router.text.tools.formats_harmony import MARKS
from tgi_trio.router.text.tools.functions import ToolUse

THOUGHT = "<|channel|>analysis<|message|>Rain?<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>It rains."
PREAMBLE = "<|channel|>commentary<|message|>Let me look.<|end|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x":1}'
LAST = ' to=functions.f<|channel|>commentary json<|message|>{"x":1}'
F = [("f", '{"x":1}')]


def read(pieces: Any, *, required: bool = False) -> tuple[Answer, ChannelReader]:
    numbers = itertools.count()
    reader = ChannelReader(lambda name: f"{name}{next(numbers)}", required=required)
    return fold([*map(reader.push, pieces), reader.finish()]), reader


def said(pieces: Any, **how: bool) -> tuple[str, str, list[tuple[str | None, str]], bool]:
    answer, reader = read(pieces, **how)
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.thought, answer.content, calls, reader.complete


@pytest.mark.parametrize(
    ("text", "thought", "content", "calls"),
    [
        (FINAL, "", "It rains.", []),
        (FINAL + "<|return|>", "", "It rains.", []),
        (FINAL + "\n<|return|>", "", "It rains.\n", []),
        (f"{THOUGHT}{NEXT}{FINAL}<|return|>", "Rain?", "It rains.", []),
        (f"{THOUGHT}{NEXT}{CALL}<|call|>", "Rain?", "", F),
        (f"{THOUGHT}{NEXT}{CALL}", "Rain?", "", F),
        (f"{THOUGHT}{NEXT}{LAST}<|call|>", "Rain?", "", F),
        (LAST.lstrip() + "<|call|>", "", "", F),
        (f"{THOUGHT}{NEXT}{PREAMBLE}{NEXT}{CALL}<|call|>", "Rain?", "Let me look.", F),
        (f"{PREAMBLE}{NEXT}{THOUGHT}{NEXT}{FINAL}", "Rain?", "Let me look.\n\nIt rains.", []),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}", "Rain?\n\nRain?", "It rains.", []),
        (f"{CALL}<|call|>{NEXT}{CALL}<|call|>", "", "", F * 2),
        # A recipient counts on any channel.
        (CALL.replace("commentary", "analysis"), "", "", F),
        # What somebody else has read the header of, and what has none.
        ("It rains.", "", "It rains.", []),
        ("to be or not", "", "to be or not", []),
        ("It rains.<|end|>" + NEXT + CALL, "", "It rains.", F),
        # Doubled and missing marks.
        ("<|channel|>analysis" + THOUGHT + NEXT + NEXT + FINAL, "Rain?", "It rains.", []),
        (THOUGHT + "<|end|>" + NEXT + FINAL, "Rain?", "It rains.", []),
        (THOUGHT + FINAL, "Rain?", "It rains.", []),
        ("<|channel|>final<|channel|>final<|message|>It rains.", "", "It rains.", []),
        # Channels that nobody knows are for people.
        ("<|channel|>comment<|message|>It rains.", "", "It rains.", []),
        (f"<|channel|>{'x' * 500}", "", "x" * 500, []),
    ],
)
def test_every_cut_reads_the_same(text: str, thought: str, content: str, calls: Any) -> None:
    whole = (thought, content, calls, bool(calls))
    for at in range(len(text) + 1):
        assert said([text[:at], text[at:]]) == whole
    assert said(list(text)) == whole
    assert said(list(text), required=True) == (thought, "", calls, bool(calls))


@pytest.mark.parametrize(
    ("text", "thought", "content", "calls"),
    [
        ("<|channel|>analysis<|message|>Ra", "Ra", "", []),
        ("<|channel|>analysis<|mess", "", "", []),
        (CALL[:-1], "", "", [("f", '{"x":1')]),
        ("<|channel|>commentary to=functions.f", "", "", []),
        (FINAL + "<|retu", "", "It rains.<|retu", []),
        ("<|chan", "", "<|chan", []),
    ],
)
def test_an_answer_that_is_cut_off(text: str, thought: str, content: str, calls: Any) -> None:
    assert said(list(text)) == said([text]) == (thought, content, calls, False)


WORDS = st.lists(
    st.sampled_from(
        [*MARKS, "analysis", "final", "commentary", " to=functions.f", "{", '"', "}", "a "]
    )
).map("".join)


@given(text=WORDS, places=PLACES)
def test_a_broken_answer_reads_the_same_in_all_pieces(text: str, places: list[int]) -> None:
    assert said(cut(text, places)) == said([text]) == said(list(text))


# ---- what may be written -----------------------------------------------------------------------

CALL_END, RETURN, EOS = 6, 7, 0


class Model:
    """A tokenizer with harmony's marks, and what it may write."""

    def __init__(self, kind: str, eos: list[int]) -> None:
        names = MARKS if kind != "text" else ()
        self.backend = tokenizer_with(names, kind == "special")
        self.added = {text: i for i, text in enumerate(("</s>", *names))}
        self.tokenizer = LLTokenizer(self.backend.to_str(), eos_token=eos)
        self.eos = eos

    def matcher(self, use: ToolUse, **how: Any) -> LLMatcher:
        made = channel_rules(use, self.added, **how)
        text = "\n".join(f"{name}: {rule}" for name, rule in made.rules.items())
        whole = json.dumps(
            {"grammars": [json.loads(grammars.lark(text))["grammars"][0], *made.subs]}
        )
        matcher = LLMatcher(self.tokenizer, whole, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, use: ToolUse, text: str, **how: Any) -> bool:
        matcher, ids = self.matcher(use, **how), self.backend.encode(text).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def write(self, use: ToolUse, seed: int, **how: Any) -> tuple[str, int, bool]:
        """Return what a model of random taste writes, with its thought's tokens."""
        matcher, source = self.matcher(use, **how), random.Random(seed)
        mask = allocate_token_bitmask(1, self.tokenizer.vocab_size)
        ids: list[int] = []
        while len(ids) < 900 and not matcher.is_stopped():
            fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(source.choice(allowed.tolist()))
            assert matcher.consume_token(token), matcher.get_error()
            if token in self.eos:
                break
            ids.append(token)
        ended = matcher.is_accepting() or matcher.is_stopped()
        text = self.backend.decode(ids, skip_special_tokens=False)
        end = ids.index(self.added["<|end|>"]) if self.added.get("<|end|>") in ids else len(ids)
        return text, end, ended


KINDS = pytest.mark.parametrize("kind", ["text", "tokens", "special"])
WEATHER = '{"city":"Paris","days":3}'


@KINDS
@pytest.mark.parametrize("ends", [[EOS], [EOS, CALL_END, RETURN]])
def test_thoughts_preambles_calls_and_answers(kind: str, ends: list[int]) -> None:
    model = Model(kind, [EOS] if kind == "text" else ends)
    auto, required = use_of(), use_of(required=True)
    call = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}"
    last = f" to=functions.get_weather<|channel|>commentary json<|message|>{WEATHER}"
    for made in (call, last):
        for before in ("", THOUGHT + NEXT, PREAMBLE + NEXT, THOUGHT + NEXT + PREAMBLE + NEXT):
            assert model.accepts(auto, before + made)
            assert model.accepts(required, before + made)
            assert model.accepts(required, f"{before}{made}<|call|>")
    ended = [] if kind == "text" else [FINAL + "<|return|>"]
    for text in (FINAL, THOUGHT + NEXT + FINAL, *ended):
        assert model.accepts(auto, text)
        assert not model.accepts(required, text)
    for wrong in (
        "It rains.",
        call.replace("get_weather", "unknown"),
        call.replace("Paris", "Berlin"),
        call[:-1],
        THOUGHT + FINAL,
        THOUGHT,
    ):
        assert not model.accepts(auto, wrong), wrong
        assert not model.accepts(required, wrong), wrong
    for use in (auto, required):  # a message that the prompt has begun is gone on with
        assert model.accepts(use, f"Rain?<|end|>{NEXT}{call}", begun="thought")
        assert not model.accepts(use, call, begun="thought")
    assert model.accepts(auto, "It rains.", begun="answer")
    assert model.accepts(required, f"It rains.<|end|>{NEXT}{call}", begun="answer")
    assert not model.accepts(required, "It rains.", begun="answer")


@KINDS
def test_a_form_is_all_that_is_told(kind: str) -> None:
    """What is told before a call would not fit it, so it stands there alone."""
    model = Model(kind, [EOS])
    call = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{WEATHER}"
    final = "<|channel|>final<|message|>yes"
    for text, fits in (
        (THOUGHT + NEXT + final, True),
        (final, True),
        (PREAMBLE + NEXT + call, True),
        (PREAMBLE + NEXT + final, False),
        (f"{PREAMBLE}{NEXT}{THOUGHT}{NEXT}{final}", False),
        (FINAL, False),
    ):
        assert model.accepts(use_of(), text, final='"yes"') is fits, text


@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_written_under_the_grammar_is_read_as_calls(kind: str, seed: int) -> None:
    model = Model(kind, [EOS])
    text, _, ended = model.write(use_of(required=True), seed)
    answer, reader = read(list(text))
    assert ended == reader.complete or not ended
    for call in answer.calls if ended else ():
        valid(call.name or "", json.loads(call.arguments))
        assert call.name in {function.name for function in ALL}


@pytest.mark.parametrize("budget", [0, 1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_a_thought_has_no_more_tokens_than_its_budget(budget: int, seed: int) -> None:
    model = Model("special", [EOS])
    begun = model.backend.encode("<|channel|>analysis<|message|>").ids
    matcher = model.matcher(use_of(required=True), budget=budget)
    assert matcher.try_consume_tokens(begun) == len(begun)
    words = model.backend.encode("x" * (budget + 4)).ids
    assert matcher.try_consume_tokens(words) == budget
    again = model.backend.encode(f"<|end|>{NEXT}<|channel|>").ids
    assert matcher.try_consume_tokens(again) == len(again)
    assert not matcher.try_consume_tokens(model.backend.encode("analysis").ids[:1])
