"""One parser for streams and bodies: how an answer is cut into pieces makes no difference."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tgi_trio.router.delta import Answer, Delta
from tgi_trio.router.text.answer import CallReader
from tgi_trio.router.text.tools.arguments_json import JSON
from tgi_trio.router.text.tools.arguments_python import PythonArguments
from tgi_trio.router.text.tools.arguments_xml import XmlArguments
from tgi_trio.router.text.tools.call_formats import FORMATS, HERMES, Format
from tgi_trio.router.text.tools.call_parser import CallParser, call_reader
from tgi_trio.router.text.tools.functions import Function
from tgi_trio.router.text.tools.schemas import name_type

EVERY = [each for form in FORMATS for each in (form, *form.variants)]
BY_NAME = {each.name: each for each in EVERY}
NAMES = st.sampled_from(["f", "get_weather", "a.b:c/d-1"])
# Strings that look like the end of an object, of a call or of an answer.
TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(['"}', "}}", "\\", '\\"', "</tool_call>", "[TOOL_CALLS]", "]}", "\n```"]),
    st.sampled_from(["\n", "\nx\n", "null", "2", " a ", "</para", "<|", "')", "naïve 雨", "{x}"]),
)
KEYS = st.sampled_from(["x", "city_name", "n2", "Z"])
NUMBERS = st.one_of(st.integers(), st.booleans(), st.none())


def values(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.one_of(TEXTS, NUMBERS),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=6,
    )


def arguments_of(form: Format) -> st.SearchStrategy[dict[str, Any]]:
    """Return arguments that the format can write: a text between marks cannot have them in it."""
    keys = TEXTS if form.arguments is JSON else KEYS
    drawn = st.dictionaries(keys, values(keys), max_size=3)
    if form.arguments is JSON or isinstance(form.arguments, PythonArguments):
        return drawn
    ends = form.arguments.texts[-1].strip()
    return drawn.filter(lambda found: ends not in json.dumps(found, ensure_ascii=False))


def calls_of(form: Format) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    return st.lists(st.tuples(NAMES, arguments_of(form)), max_size=3 if form.next else 1)


# Made once: hypothesis looks into every new strategy before it draws from it.
CALLS = {each.name: calls_of(each) for each in EVERY}


def functions_of(calls: Any) -> list[Function]:
    """Return functions whose schemas are those of the values that calls have."""
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        for key, value in arguments.items():
            types = found.setdefault(name, {}).setdefault(key, {"type": []})["type"]
            if name_type(value) not in types:
                types.append(name_type(value))
    return [Function.of(name, {"properties": listed}) for name, listed in found.items()]


def readable(form: Format, calls: Any) -> Any:
    """Return calls as their format lets them be known: where strings may stand, all are strings."""
    if not isinstance(form.arguments, XmlArguments) or form.arguments.types:
        return calls
    known = {each.name: each.schema["properties"] for each in functions_of(calls)}
    return [
        (name, {key: _known(known[name][key]["type"], value) for key, value in arguments.items()})
        for name, arguments in calls
    ]


def _known(types: list[str], value: Any) -> Any:
    if "string" not in types or isinstance(value, str):
        return None if value == "null" and "null" in types else value
    return None if value is None else compact(value)


PROSE = st.one_of(
    st.text(alphabet='abc <[{"\n', max_size=20),
    st.sampled_from(["", "<tool_", "Sure.\n", "[TOOL", '{"na', '{"name": 1}', "<|tool_call"]),
)


def find_reader(
    form: Format, functions: list[Function] | None = None, *, required: bool = False
) -> CallReader:
    numbers = itertools.count()
    return call_reader(form, functions or [], lambda name: f"id{next(numbers)}", required=required)


def deltas(
    form: Format,
    pieces: list[str],
    *,
    required: bool = False,
    functions: list[Function] | None = None,
) -> list[Delta]:
    reader = find_reader(form, functions, required=required)
    return [*map(reader.push, pieces), reader.finish()]


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", EVERY, ids=BY_NAME)
@settings(max_examples=20)
@given(data=st.data(), prose=PROSE, places=PLACES)
def test_what_was_written_is_read(form: Format, data: Any, prose: str, places: list[int]) -> None:
    calls = data.draw(CALLS[form.name])
    if (form.anchored or form.trigger.startswith(" ")) and calls:
        prose = ""  # nothing tells it from what follows
    functions = functions_of(calls)
    text = prose + (form.write(calls) if calls else "")
    expected = readable(form, calls)
    for pieces in (cut(text, places), [text], list(text)):
        content, read = said(fold(deltas(form, pieces, functions=functions)))
        assert [(name, json.loads(written)) for name, written in read] == expected
        assert content == (prose.rstrip() if calls else prose)
        if form.arguments is JSON:
            assert [written for _, written in read] == [compact(value) for _, value in calls]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", EVERY, ids=BY_NAME)
@settings(max_examples=20)
@given(data=st.data(), prose=PROSE, junk=st.text(max_size=5), end=st.integers(0, 10**6))
def test_a_broken_answer_reads_the_same_in_all_pieces(
    form: Format, data: Any, prose: str, junk: str, end: int
) -> None:
    """Cut anywhere, with anything put in: no piece of a call's markup becomes content."""
    calls = data.draw(CALLS[form.name])
    junk = data.draw(st.sampled_from([junk, form.trigger, form.opening, form.closing, form.next]))
    functions = functions_of(calls)
    whole = prose + (form.write(calls) if calls else "")
    at = end % (len(whole) + 1)
    for text in (whole[:at] + junk, whole[:at] + junk + whole[at:]):
        one = fold(deltas(form, [text], functions=functions))
        pieces = cut(text, data.draw(PLACES))
        assert said(fold(deltas(form, pieces, functions=functions))) == said(one)
        assert said(fold(deltas(form, list(text), functions=functions))) == said(one)
        assert form.trigger not in one.content or form.anchored or form.channels
    if form.arguments is JSON and not (form.anchored or form.channels):
        one = fold(deltas(form, [whole[:at]], functions=functions))
        for call, (name, arguments) in zip(one.calls, calls, strict=False):
            assert call.name == name
            assert compact(arguments).startswith(call.arguments)


def test_a_name_ends_where_its_end_comes_first() -> None:
    text = "[TOOL_CALLS]f[0CALL_ID]000000000[ARGS]{}[TOOL_CALLS]f[CALL_ID]000000000[ARGS]{}"
    form = BY_NAME["mistral-id"]
    read = [said(fold(deltas(form, pieces, functions=[]))) for pieces in ([text], list(text))]
    assert read[0] == read[1] == ("", [("f[0CALL_ID]000000000", "{}"), ("f", "{}")])


@pytest.mark.parametrize("over", [-1, 0, 1, 50])
def test_a_name_is_too_long_however_its_text_comes(over: int) -> None:
    """A name whose end came in one piece with it had no limit."""
    form = BY_NAME["kimi-k3"]
    head = '" index="1"<|sep|>'
    name = "x" * (400 - len(head) + over)
    text = f'<|open|>tools<|sep|><|open|>call tool="{name}{head}<|close|>call<|sep|>'
    read = [said(fold(deltas(form, pieces, functions=[]))) for pieces in ([text], list(text))]
    assert read[0] == read[1] == ("", [(name, "{}")] if over <= 0 else [])


@given(text=st.one_of(PROSE, st.text(max_size=20)), places=PLACES)
@example("<tool_call> not one, after all", [3])
def test_an_answer_that_must_be_a_call_has_no_content(text: str, places: list[int]) -> None:
    assert fold(deltas(HERMES, cut(text, places), required=True)).content == ""


def test_a_call_is_told_as_it_comes() -> None:
    pieces = ["Well", ".\n<to", "ol_call>\n{", '"name": "f', '", "arguments": {"', 'a":1}', "}\n"]
    parser = find_reader(HERMES)
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
    parser = find_reader(HERMES)
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


@pytest.mark.parametrize(
    "form", [each for each in EVERY if not each.channels], ids=lambda each: each.name
)
def test_white_space_behind_a_call_does_not_gather(form: Format) -> None:
    """Some models end in it: 20,000 line ends took a minute, all of them read again with each."""
    function = Function.of("f", {"properties": {"x": {"type": "string"}}})
    whole = form.write([("f", {"x": "y"})])
    for end in range(1, len(whole) + 1):
        parser = call_reader(form, [function], str)
        parser.push(whole[:end])
        if parser.complete:
            break
    for _ in range(1000):
        parser.push("\n")
    assert isinstance(parser, CallParser)
    assert len(parser._text) < 10
    assert parser.push(whole[end:]).content == ""
    assert parser.complete and parser.calls == 1
