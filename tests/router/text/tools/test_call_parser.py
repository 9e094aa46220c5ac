"""One parser for streams and bodies: how an answer is cut into pieces makes no difference."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tgi_trio.router.text.tools.call_formats import FORMATS, HERMES, Format
from tgi_trio.router.text.tools.call_parser import Answer, CallParser, Delta

BY_NAME = {each.name: each for each in FORMATS}
NAMES = st.sampled_from(["f", "get_weather", "a.b:c/d-1"])
# Strings that look like the end of an object, of a call or of an answer.
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(['"}', "}}", "\\", '\\"', "</tool_call>", "[TOOL_CALLS]", "]}", "\n```"]),
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3)
PROSE = st.one_of(
    st.text(alphabet='abc <[{"\n', max_size=20),
    st.sampled_from(["", "<tool_", "Sure.\n", "[TOOL", '{"na', '{"name": 1}', "<|tool_call"]),
)


def parser_of(form: Format, *, required: bool = False) -> CallParser:
    numbers = itertools.count()
    return CallParser(form, lambda: f"id{next(numbers)}", required=required)


def deltas(form: Format, pieces: list[str], *, required: bool = False) -> list[Delta]:
    parser = parser_of(form, required=required)
    return [*map(parser.push, pieces), parser.finish()]


def fold(parts: list[Delta]) -> Answer:
    answer = Answer()
    for part in parts:
        answer.add(part)
    return answer


def said(answer: Answer) -> tuple[str, list[tuple[str | None, str]]]:
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def cut(text: str, places: list[int]) -> list[str]:
    """Return the text in pieces, empty ones among them."""
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


PLACES = st.lists(st.integers(0, 10**6), max_size=12)


@pytest.mark.parametrize("form", FORMATS, ids=BY_NAME)
@given(prose=PROSE, calls=CALLS, places=PLACES)
def test_what_was_written_is_read(form: Format, prose: str, calls: Any, places: list[int]) -> None:
    if form.anchored and calls:
        prose = ""
    calls = calls if form.next else calls[:1]
    text = prose + (form.write(calls) if calls else "")
    expected = [(name, compact(arguments)) for name, arguments in calls]
    for pieces in (cut(text, places), [text], list(text)):
        content, read = said(fold(deltas(form, pieces)))
        assert read == expected
        assert content == (prose.rstrip() if calls else prose)


@pytest.mark.parametrize("form", FORMATS, ids=BY_NAME)
@given(prose=PROSE, calls=CALLS, junk=st.text(max_size=5), end=st.integers(0, 10**6), places=PLACES)
def test_a_broken_answer_reads_the_same_in_all_pieces(
    form: Format, prose: str, calls: Any, junk: str, end: int, places: list[int]
) -> None:
    """Cut anywhere, with anything put in: no piece of a call's markup becomes content."""
    calls = calls if form.next else calls[:1]
    whole = prose + (form.write(calls) if calls else "")
    text = whole[: end % (len(whole) + 1)] + junk
    one = fold(deltas(form, [text]))
    assert said(fold(deltas(form, cut(text, places)))) == said(one)
    assert said(fold(deltas(form, list(text)))) == said(one)
    assert form.trigger not in one.content or form.anchored
    for call, (name, arguments) in zip(one.calls, calls, strict=False):
        if not junk and not form.anchored:
            assert call.name == name
            assert compact(arguments).startswith(call.arguments)


@given(text=st.one_of(PROSE, st.text(max_size=20)), places=PLACES)
@example("<tool_call> not one, after all", [3])
def test_an_answer_that_must_be_a_call_has_no_content(text: str, places: list[int]) -> None:
    assert fold(deltas(HERMES, cut(text, places), required=True)).content == ""


def test_a_call_is_told_as_it_comes() -> None:
    pieces = ["Well", ".\n<to", "ol_call>\n{", '"name": "f', '", "arguments": {"', 'a":1}', "}\n"]
    parser = parser_of(HERMES)
    parts = [parser.push(piece) for piece in pieces]
    assert [part.content for part in parts] == ["Well", ".", "", "", "", "", ""]
    first, second = (part.calls[0] for part in parts if part.calls)
    assert (first.index, first.id, first.name, first.arguments) == (0, "id0", "f", '{"')
    assert (second.index, second.id, second.name, second.arguments) == (0, None, None, 'a":1}')
    assert parser.complete and parser.calls == 1
    assert not parser.finish()


def test_calls_are_numbered_and_two_may_come_in_one_piece() -> None:
    text = HERMES.write([("f", {}), ("g", {"x": [1]})])
    (both, end) = deltas(HERMES, [text])
    assert [(c.index, c.id, c.name, c.arguments) for c in both.calls] == [
        (0, "id0", "f", "{}"),
        (1, "id1", "g", '{"x":[1]}'),
    ]
    assert not end


@pytest.mark.parametrize(
    ("text", "content", "calls", "complete"),
    [
        ("Hi <tool_ca", "Hi <tool_ca", [], False),  # nobody knows what it would have been
        ("Hi <tool_call>", "Hi", [], False),
        ('<tool_call>\n{"name": "get', "", [], False),
        ('<tool_call>\n{"name": "f", "arguments": {"a": "x', "", [("f", '{"a": "x')], False),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')], True),
        ("<tool_call> I would call f", "", [], False),
        (HERMES.write([("f", {})]) + " done", "", [("f", "{}")], True),
        (HERMES.write([("f", {})]) + '\n<tool_call>\n{"name": "g', "", [("f", "{}")], False),
    ],
)
def test_an_answer_that_ends_early(
    text: str, content: str, calls: list[tuple[str, str]], complete: bool
) -> None:
    parser = parser_of(HERMES)
    answer = fold([parser.push(text), parser.finish()])
    assert said(answer) == (content, calls)
    assert parser.complete == complete


def test_llamas_calls_begin_with_the_answer() -> None:
    form = BY_NAME["llama-3"]
    call = form.write([("f", {"a": 1})])
    assert said(fold(deltas(form, [call, "; ", call]))) == ("", [("f", '{"a":1}')])
    assert said(fold(deltas(form, list(call)))) == ("", [("f", '{"a":1}')])
    prose = f"Like this: {call}"
    assert said(fold(deltas(form, list(prose)))) == (prose, [])
    assert said(fold(deltas(form, ['{"n', 'ame" is a key']))) == ('{"name" is a key', [])
