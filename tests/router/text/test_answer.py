"""One reader for streams and bodies: thought, content and calls, however the answer is cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_trio.router.delta import Answer, Delta
from tgi_trio.router.text.answer import TABLE, AnswerParser, CallOpening, Edge, Region, fold
from tgi_trio.router.text.thoughts.marks import HARMONY, KNOWN, Marks
from tgi_trio.router.text.tools.call_formats import FORMATS, HERMES, Format
from tgi_trio.router.text.tools.call_parser import TextParser, call_reader
from tgi_trio.router.text.tools.functions import Function

THINK = Marks("<think>", "</think>")
GRANITE = Marks("<think>", "</think>", opening="<response>", closing="</response>")
NAMES = ("f", "get_weather")
FUNCTIONS = [Function.of(name, {"properties": {"x": {"type": "integer"}}}) for name in NAMES]
BY_NAME = {form.name: form for form in FORMATS}
BY_START = {each.start: each for each in (*KNOWN, GRANITE)}


def opening_of(form: Format, *, forced: bool = False) -> CallOpening:
    names = tuple(map(form.introduce, NAMES))
    return CallOpening(form.beginning, names, form.trigger if forced else "")


def parser_of(
    marks: Marks = THINK,
    form: Format | None = HERMES,
    *,
    inside: bool = False,
    forced: bool = False,
) -> AnswerParser:
    numbers = itertools.count()
    if form is None:
        return AnswerParser(marks, TextParser(), inside=inside)
    calls = call_reader(form, FUNCTIONS, lambda name: f"id{next(numbers)}", required=forced)
    opening = None if form.anchored else opening_of(form, forced=forced)
    return AnswerParser(marks, calls, inside=inside, opening=opening)


def read(pieces: Any, **how: Any) -> Delta:
    parser = parser_of(**how)
    return fold([*map(parser.push, pieces), parser.finish()])


def said(pieces: Any, **how: Any) -> tuple[str, str, list[tuple[str | None, str]]]:
    answer = Answer()
    answer.add(read(pieces, **how))
    return answer.thought, answer.content, [(c.name, c.arguments) for c in answer.calls]


def cuts(text: str) -> list[list[str]]:
    """Return the text whole, byte by byte, and in every two pieces."""
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]


CALL = HERMES.write([("f", {"x": 1})])
F = ("f", '{"x":1}')


@pytest.mark.parametrize(
    ("text", "thought", "content", "calls"),
    [
        ("<think>Hm.</think>Yes.", "Hm.", "Yes.", []),
        ("<think>\n\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n", []),
        (f"<think>\nHm.\n</think>\n\nYes.\n{CALL}", "Hm.", "Yes.", [F]),
        (f"<think>Hm.</think>\n{CALL}", "Hm.", "", [F]),
        # Nothing was thought: as if nobody looked for it.
        ("Yes. <think> is a word.", "", "Yes. <think> is a word.", []),
        ("\n\nYes.", "", "\n\nYes.", []),
        ("<thin air", "", "<thin air", []),
        ("<think>\n\n</think>\n\nYes.", "", "Yes.", []),
        # Marks that come twice.
        ("<think><think>\nHm.</think></think>Yes.", "Hm.", "Yes.", []),
        ("<think>Hm.</think>\n\n</think>\nYes.", "Hm.", "Yes.", []),
        ("</think>Yes.", "", "Yes.", []),
        ("<think>a</think>\n<think>b</think>Yes.", "a\n\nb", "Yes.", []),
        # A thought speaks of calls; only a whole opening is one.
        ("<think>a <tool_call> b</think>Yes.", "a <tool_call> b", "Yes.", []),
        (
            '<think>say <tool_call>\n{"name": "g"</think>Yes.',
            'say <tool_call>\n{"name": "g"',
            "Yes.",
            [],
        ),
        ('<think>{"name": "f"} <b></think>Yes.', '{"name": "f"} <b>', "Yes.", []),
        (f"<think>Hm.\n{CALL}", "Hm.", "", [F]),
        (f"<think>{CALL}", "", "", [F]),
        (f"<think>a <tool_call> {CALL}", "a <tool_call>", "", [F]),
        # Cut off.
        ("<think>Hm. <", "Hm. <", "", []),
        ("<think>Hm.\n\n", "Hm.", "", []),
        ("<think>Hm.</thi", "Hm.</thi", "", []),
        ("<think>", "", "", []),
        ("<thi", "", "<thi", []),
        ("<think>Hm.</think>\n", "Hm.", "", []),
        ('<think>Hm.\n<tool_call>\n{"na', 'Hm.\n<tool_call>\n{"na', "", []),
        ("", "", "", []),
    ],
)
def test_every_cut_reads_the_same(
    text: str, thought: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in cuts(text):
        assert said(pieces) == (thought, content, calls), pieces


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("Hm.</think>Yes.", "Hm.", "Yes."),
        ("\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("<think>\nHm.</think>Yes.", "Hm.", "Yes."),  # though the prompt has opened it
        ("</think>Yes.", "", "Yes."),
        ("Hm.", "Hm.", ""),
        ("  ", "", ""),
        ("<b> is bold</think>Yes.", "<b> is bold", "Yes."),
    ],
)
def test_an_answer_that_begins_inside_a_thought(text: str, thought: str, content: str) -> None:
    for pieces in cuts(text):
        assert said(pieces, inside=True) == (thought, content, [])
        assert said(pieces, inside=True, form=None) == (thought, content, [])


@pytest.mark.parametrize(
    ("text", "thought", "calls"),
    [
        ("Hm.\n<tool_call>", "Hm.", []),
        ('Hm.\n<tool_call>\n{"na', "Hm.", []),
        ('<tool_call>\n{"name": "f", "arguments"', "", []),
        ('Hm.<tool_call>\n{"name": "f", "arguments": {"x"', "Hm.", [("f", '{"x"')]),
        ("Hm.\n<tool_c", "Hm.\n<tool_c", []),  # spelled, as no token begins so
        ("Hm. <", "Hm. <", []),
        ("say <tool_call> and", "say <tool_call> and", []),  # spelled as well
    ],
)
def test_a_forced_call_that_is_cut_off_is_no_thought(
    text: str, thought: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in cuts(text):
        assert said(pieces, inside=True, forced=True) == (thought, "", calls), pieces


def test_a_thought_whose_mark_the_prompt_has_half_written() -> None:
    gemma = BY_START["<|channel>thought"]
    for pieces in cuts("thought\nHm.<channel|>Yes."):
        assert said(pieces, marks=gemma, inside=True) == ("Hm.", "Yes.", [])
    for pieces in cuts("though it rains.<channel|>Yes."):
        assert said(pieces, marks=gemma, inside=True) == ("though it rains.", "Yes.", [])


def test_marks_around_the_answer_belong_to_nobody() -> None:
    for pieces in cuts("<think>Hm.</think><response>\nYes. </res</response>"):
        assert said(pieces, marks=GRANITE) == ("Hm.", "\nYes. </res", [])
    for pieces in cuts("<think>Hm.</think>Yes.</resp"):
        assert said(pieces, marks=GRANITE) == ("Hm.", "Yes.</resp", [])
    harmony = (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    )
    for pieces in cuts(harmony):
        assert said(pieces, marks=HARMONY, form=None) == ("Hm.", "Yes.", [])
    for pieces in cuts("<|channel|>final<|message|>Yes."):
        assert said(pieces, marks=HARMONY, form=None) == ("", "Yes.", [])


def test_where_an_answer_ends_is_known() -> None:
    parser = parser_of()
    assert not parser.thinking and not parser.answering
    parser.push("<think>")
    assert parser.thinking and not parser.answering
    parser.push("Hm.")
    assert parser.thinking and not parser.answering
    parser.push("</think>\n")
    assert not parser.thinking and not parser.answering
    parser.push("Y")
    assert not parser.thinking and parser.answering


def test_text_is_passed_on_as_soon_as_it_is_certain() -> None:
    parser = parser_of()
    parts = [parser.push(piece) for piece in ("<th", "ink>", "H", "m. ", "<b", "> <", "/think>Y")]
    assert [part.thought for part in parts] == ["", "", "H", "m.", " <b", ">", ""]
    assert [part.content for part in parts] == ["", "", "", "", "", "", "Y"]


def test_what_ends_a_message_belongs_to_nobody() -> None:
    marks = BY_START["<|open|>think<|sep|>"]  # Kimi K3, which opens and closes all it says
    form = BY_NAME["kimi-k3"]
    end = "<|close|>response<|sep|>"
    spoken = f"Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.{end}"
    closed, call = "<|close|>message<|sep|>", form.write([("f", {"x": 1})])
    silent = f"<|close|>think<|sep|><|open|>response<|sep|>{end}{call}{closed}"
    for pieces in cuts(spoken + closed):
        assert said(pieces, marks=marks, form=None, inside=True) == ("Hm.", "Yes.", [])
    for pieces in cuts(spoken + call + closed):
        assert said(pieces, marks=marks, form=form, inside=True) == ("Hm.", "Yes.", [F])
    for pieces in cuts(silent):
        assert said(pieces, marks=marks, form=form, inside=True) == ("", "", [F])


def test_messages_to_oneself_are_thoughts() -> None:
    glimmer = BY_START["to=self<|message|>"]
    thought, answer = " to=self<|message|>Hm.<|eom|>", " to=user<|message|>Yes."
    for pieces in cuts(f"{thought}<|start|>assistant{answer}"):
        assert said(pieces, marks=glimmer, form=None) == ("Hm.", "Yes.", [])
    for pieces in cuts(answer):
        assert said(pieces, marks=glimmer, form=None) == ("", "Yes.", [])


def test_the_table_names_every_region_and_only_marks_are_swallowed() -> None:
    assert set(TABLE) == set(Region)
    for region, edges in TABLE.items():
        assert (Edge.TEXT in edges) == (region not in (Region.THOUGHT, Region.ANSWER))


# ---- anything at all ---------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        *("Hm", " ", "\n", "<", "think>", "</think>", "<think>", "<b>", "雨"),
        *("<tool_call>", '\n{"name": "', "f", '", "arguments": ', "{}", "}\n</tool_call>"),
        *("<|channel|>", "analysis", "<|message|>", "<|end|>", "<|start|>assistant", "final"),
        *("<response>", "</response>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    ]
)
TEXTS = st.lists(WORDS, max_size=14).map("".join)
PLACES = st.lists(st.integers(0, 10**6), max_size=8)
SHAPES = st.tuples(
    st.sampled_from(list(BY_START.values())), st.sampled_from([None, *FORMATS]), st.booleans()
)


def cut(text: str, places: list[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@given(text=TEXTS, places=PLACES, shape=SHAPES)
def test_a_body_is_the_fold_of_its_deltas(text: str, places: list[int], shape: Any) -> None:
    marks, form, inside = shape
    how = {"marks": marks, "form": form, "inside": inside}
    one = said([text], **how)
    assert said(cut(text, places), **how) == one
    assert said(list(text), **how) == one


@given(
    thought=st.text(alphabet="ab <\n雨", max_size=20),
    prose=st.text(alphabet="cd <\n", max_size=20),
    calls=st.integers(0, 2),
    form=st.sampled_from(FORMATS),
    marks=st.sampled_from([each for each in KNOWN if each is not HARMONY]),
    inside=st.booleans(),
    space=st.sampled_from(["", "\n", "\n\n", " "]),
    places=PLACES,
)
def test_what_was_written_is_read(
    thought: str,
    prose: str,
    calls: int,
    form: Format,
    marks: Marks,
    inside: bool,
    space: str,
    places: list[int],
) -> None:
    calls = min(calls, 1) if not form.next else calls
    if form.anchored and calls:
        prose = ""
    end = form.write([("f", {"x": 1})] * calls) if calls else ""
    text = ("" if inside else marks.start) + space + thought + space + marks.end + space
    found = said(cut(text + prose + end, places), marks=marks, form=form, inside=inside)
    content = prose.lstrip()
    assert found == (thought.strip(), content.rstrip() if calls else content, [F] * calls)
