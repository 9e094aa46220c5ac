"""By which marks thoughts are told apart, and where an answer begins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.text.families import BY_NAME, FAMILIES, template_of
from tests.router.text.template_family import Family
from tgi_trio.errors import TemplateError
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.thoughts.derive import Thoughts, ThoughtSettings, derive_thoughts
from tgi_trio.router.text.thoughts.marks import HARMONY, KNOWN, Marks
from tgi_trio.router.text.thoughts.place import Place, find_place

PLACES = {"inside": Place.INSIDE, "closed": Place.CLOSED, "may-open": Place.MAY_OPEN}
USER = {"role": "user", "content": "Think: what is <think> for?"}
THINK = Marks("<think>", "</think>")


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {})


def thoughts_of(family: Family) -> Thoughts | None:
    return derive_thoughts(template_of(family.name), None, ())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_marks_of_a_family(family: Family) -> None:
    found = thoughts_of(family)
    marks = None if found is None else (found.marks.start, found.marks.end)
    expected = None if family.marks is None else tuple(mark.strip() for mark in family.marks)
    assert marks == expected


THINKING = [each for each in FAMILIES if each.marks is not None]


@pytest.mark.parametrize("family", THINKING, ids=lambda family: family.name)
def test_where_the_answer_of_a_family_begins(family: Family) -> None:
    thoughts = thoughts_of(family)
    assert thoughts is not None and thoughts.header
    chat = template_of(family.name)
    for name, variables in (("default", {}), ("on", family.switch_on), ("off", family.switch_off)):
        expected = getattr(family, name)
        if expected is None:
            continue
        prompt = chat.render([USER], **dict[str, Any](variables))
        assert find_place(prompt, thoughts, USER["content"]) is PLACES[expected], (name, prompt)
        # Earlier turns may say what they like.
        quoting = [USER, {"role": "assistant", "content": "<think>a"}, USER]
        prompt = chat.render(quoting, **dict[str, Any](variables))
        assert find_place(prompt, thoughts, USER["content"]) is PLACES[expected], (name, prompt)


@pytest.mark.parametrize("family", THINKING, ids=lambda family: family.name)
def test_a_message_that_is_continued(family: Family) -> None:
    thoughts, chat = thoughts_of(family), template_of(family.name)
    assert thoughts is not None
    marks = thoughts.marks
    for text, place in ((f"{marks.start}Hm", Place.INSIDE), ("Yes", None)):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        try:
            prompt = chat.render(turns, continue_final_message=True)
        except TemplateError:
            continue
        if text in prompt:  # some templates cut thoughts out of what was said
            found = find_place(prompt, thoughts)
            assert found is place or (place is None and found is not Place.INSIDE)
            if place is None and marks.header:  # the message goes on where it has begun
                assert found is Place.CLOSED


def test_behind_a_tools_result() -> None:
    """The model's message may go on behind it, without a header of its own."""
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "f", "content": "k"},
    ]
    for name, variables, place in (
        ("qwen3.5", {}, Place.INSIDE),
        ("gemma-4", {"enable_thinking": True}, Place.MAY_OPEN),
        ("gpt-oss", {}, Place.MAY_OPEN),
    ):
        thoughts = thoughts_of(BY_NAME[name])
        assert thoughts is not None
        prompt = template_of(name).render(turns, **dict[str, Any](variables))
        assert find_place(prompt, thoughts, "k") is place, prompt


def test_half_a_mark_is_a_beginning() -> None:
    thoughts = thoughts_of(BY_NAME["gemma-4"])
    assert thoughts is not None
    assert find_place("<|turn>model\n<|channel>", thoughts) is Place.INSIDE
    assert find_place("<|turn>model\nI <", thoughts) is Place.MAY_OPEN


@pytest.mark.parametrize("marks", KNOWN, ids=lambda marks: marks.start)
def test_every_way_to_find_a_pair(marks: Marks) -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    field = {"open": marks.start + "\n", "close_pattern": None, "close": marks.end}
    spec = {"fields": {"thinking": {k: v for k, v in field.items() if v}}}
    found = derive_thoughts(template(plain), spec, ())
    assert found is not None and (found.marks, found.source) == (marks, "response_template")
    writes = (
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}"
        "{{ open + '\n' + m.reasoning_content + '\n' + close }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    head = f"{{% set open = {marks.start!r} %}}{{% set close = {marks.end!r} %}}"
    found = derive_thoughts(template(head + writes), None, ())
    assert found is not None and (found.marks, found.source) == (marks, "rendered thought")
    found = derive_thoughts(template(f"{{# {marks.start} {marks.end} #}}{plain}"), None, ())
    assert found is not None and (found.marks, found.source) == (marks, "template")
    found = derive_thoughts(template(plain), None, (marks.start, marks.end))
    assert found is not None and (found.marks, found.source) == (marks, "added tokens")
    assert derive_thoughts(template(plain), None, (marks.end,)) is None
    assert derive_thoughts(template(f"{{# {marks.end} #}}{plain}"), None, ()) is None


def test_content_parts_and_switches_are_probed() -> None:
    parts = (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'thinking' %}{{ '[TH' + 'INK]' + p.thinking }}"
        "{{ '[/TH' + 'INK]' }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    found = derive_thoughts(template(parts), None, ())
    assert found is not None and found.marks.start == "[THINK]"
    switched = (
        "{% for m in messages %}[{{ m.role }}]{% if thinking and m.reasoning_content %}"
        "{{ '<th' + 'ink>' + m.reasoning_content + '</th' + 'ink>' }}{% endif %}{{ m.content }}"
        "{% endfor %}"
    )
    found = derive_thoughts(template(switched), None, ())
    assert found is not None and found.marks == THINK


def test_what_stands_around_answers() -> None:
    source = "{# <think> </think> <response> </response> #}{{ messages[0].content }}"
    found = derive_thoughts(template(source), None, ())
    assert found is not None
    assert (found.marks.opening, found.marks.closing) == ("<response>", "</response>")


@pytest.mark.parametrize(
    ("spec", "marks"),
    [
        ({"fields": {"thinking": {"open": "<a>\n", "close": "</a>"}}}, ("<a>", "</a>")),
        (
            {
                "fields": {
                    "reasoning_content": {"open": ["<a>", "<b>"], "close_pattern": "</a>\\s*"}
                }
            },
            ("<a>", "</a>"),
        ),
        ({"fields": {"thinking": {"open_pattern": "<(a|b)>", "close": "</a>"}}}, None),
        ({"fields": {"thinking": {"open": "<a>"}}}, None),
        ({"fields": {"content": {"open": "<a>", "close": "</a>"}}}, None),
        ({"fields": []}, None),
        ("nothing", None),
    ],
)
def test_response_templates(spec: Any, marks: tuple[str, str] | None) -> None:
    found = derive_thoughts(template("{{ messages[0].content }}"), spec, ())
    assert (None if found is None else (found.marks.start, found.marks.end)) == marks


def test_the_flag_overrules() -> None:
    chat = template("{# <think> </think> #}{{ messages[0].content }}")
    assert derive_thoughts(chat, None, (), ThoughtSettings.parse("none")) is None
    found = derive_thoughts(chat, None, (), ThoughtSettings.parse("<a>, </a>"))
    assert found is not None
    assert (found.marks, found.source) == (Marks("<a>", "</a>"), "--reasoning")
    assert ThoughtSettings.parse(f"{HARMONY.start},{HARMONY.end}").given == HARMONY
    assert ThoughtSettings.parse("auto") == ThoughtSettings()
    for wrong in ("", "<think>", "<a>,", ",</a>", "<a>,<a>", "a,b,c"):
        with pytest.raises(ValueError, match="START,END"):
            ThoughtSettings.parse(wrong)
