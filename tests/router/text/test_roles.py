"""What templates take is found by probing them, and conversations are arranged for it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.router.text.families import FAMILIES
from tests.router.text.role_templates import TEMPLATES
from tests.router.text.template_family import Family
from tgi_trio.errors import TemplateError
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.roles import Roles
from tgi_trio.router.text.turns import NO_RESULT, PastCall, Turn, arrange_turns

ALL = Roles()
NO_LATE = {"late_system": False}
ALTERNATING = {
    **NO_LATE,
    **dict.fromkeys(("user_after_user", "user_after_result", "user_after_call"), False),
    **dict.fromkeys(("assistant_after_assistant", "call_after_assistant"), False),
    "assistant_first": False,
}
TAKEN: dict[str, dict[str, bool]] = {  # what is not taken is said
    "headers": {},
    "known": {},
    "first-only": NO_LATE,
    "first-silent": NO_LATE,
    "alternating": ALTERNATING,
    "silent-calls": {**ALTERNATING, "text_with_calls": False},
    "parity": {
        **NO_LATE,
        **dict.fromkeys(("user_after_user", "results"), False),
        **dict.fromkeys(("assistant_after_assistant", "assistant_first", "system_alone"), False),
    },
    "no-system": {**NO_LATE, "system": False, "system_alone": False},
    "hoisting": NO_LATE,
    "glued": NO_LATE,
    "plain": {},
}
CALL = PastCall("look", {"at": "sky"}, "abcdefghi")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": TEMPLATES[name]}, {})


def arranged(roles: Roles, *turns: Turn) -> list[tuple[str, str | None]]:
    return [(turn.role, turn.text) for turn in arrange_turns(turns, roles)]


def test_every_template_is_in_the_table() -> None:
    assert TAKEN.keys() == TEMPLATES.keys()


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes(name: str, tools: bool) -> None:
    assert template(name).roles(tools=tools) == Roles(**TAKEN[name])


def test_a_template_that_writes_nothing_tells_nothing() -> None:
    assert ChatTemplate({"default": "{{ raise_exception('no') }}"}, {}).roles() == ALL
    assert ChatTemplate({}, {}).roles() == ALL


def test_the_template_for_tools_is_probed_by_itself() -> None:
    both = {"default": TEMPLATES["headers"], "tool_use": TEMPLATES["alternating"]}
    found = ChatTemplate(both, {})
    assert found.roles() == ALL
    assert found.roles(tools=True) == Roles(**TAKEN["alternating"])


def test_what_is_not_taken_is_told() -> None:
    assert ALL.describe_missing() == ""
    assert Roles(late_system=False).describe_missing() == "system messages behind others"


def test_messages_of_the_system_in_front_are_one() -> None:
    turns = [Turn("developer", "a"), Turn("system", "b"), Turn("developer", "c"), Turn("user", "d")]
    assert arranged(ALL, *turns) == [("system", "a\n\nb\n\nc"), ("user", "d")]
    assert arranged(Roles(system=False), *turns) == [("user", "a\n\nb\n\nc\n\nd")]


def test_later_ones_stay_where_they_are_taken() -> None:
    turns = [Turn("user", "a"), Turn("developer", "b"), Turn("assistant", "c"), Turn("system", "d")]
    kept = [("user", "a"), ("system", "b"), ("assistant", "c"), ("system", "d")]
    assert arranged(ALL, *turns) == kept


FOLDED = Roles(late_system=False)


def test_else_they_are_folded_into_what_stands_beside_them() -> None:
    asked = [Turn("system", "s"), Turn("user", "a")]
    assert arranged(FOLDED, *asked, Turn("system", "b")) == [("system", "s"), ("user", "a\n\nb")]
    assert arranged(FOLDED, *asked, Turn("assistant", "b"), Turn("system", "c"), Turn("user", "d"))[
        2:
    ] == [("assistant", "b"), ("user", "c\n\nd")]
    called = [*asked, Turn("assistant", calls=[CALL]), Turn("tool", "r", call_id=CALL.id)]
    assert arranged(FOLDED, *called, Turn("system", "b"))[3:] == [("tool", "r\n\nb")]


def test_never_a_turn_of_the_user_behind_results() -> None:
    turns = [Turn("user", "a"), Turn("assistant", calls=[CALL]), Turn("system", "b")]
    turns += [Turn("tool", "r"), Turn("system", "c"), Turn("tool", "q"), Turn("system", "d")]
    roles = [turn.role for turn in arrange_turns(turns, FOLDED)]
    assert roles == ["user", "assistant", "tool", "tool"]
    texts = [turn.text for turn in arrange_turns(turns, FOLDED)]
    assert texts == ["a", None, "b\n\nr\n\nc", "q\n\nd"]


def test_behind_the_last_answer_it_is_the_users() -> None:
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("system", "c")]
    assert arranged(FOLDED, *turns)[2:] == [("user", "c")]
    # ... and in front of the one that is to be continued.
    assert arranged(FOLDED, *turns, Turn("assistant", "d"))[2:] == [
        ("user", "c"),
        ("assistant", "d"),
    ]


def test_turns_of_the_user_are_joined_where_they_must_alternate() -> None:
    turns = [Turn("user", "a"), Turn("user", "b"), Turn("assistant", "c")]
    assert arranged(ALL, *turns) == [("user", "a"), ("user", "b"), ("assistant", "c")]
    assert arranged(Roles(user_after_user=False), *turns) == [
        ("user", "a\n\nb"),
        ("assistant", "c"),
    ]
    answered = [Turn("assistant", calls=[CALL]), Turn("tool", "r"), Turn("user", "b")]
    assert arranged(Roles(user_after_result=False), *answered)[1:] == [("tool", "r\n\nb")]


def test_answers_in_a_row_are_joined_where_they_are_refused() -> None:
    """As after an interrupt."""
    turns = [Turn("user", "a"), Turn("assistant", "b", thought="t"), Turn("assistant", "c")]
    assert arrange_turns(turns, ALL) == turns
    apart = Roles(assistant_after_assistant=False)
    assert arrange_turns(turns, apart) == [turns[0], Turn("assistant", "b\n\nc", thought="t")]
    calls = [*turns[:2], Turn("assistant", calls=[CALL], thought="u")]
    assert arrange_turns(calls, apart) == calls
    joined = arrange_turns(calls, Roles(call_after_assistant=False))
    assert joined == [turns[0], Turn("assistant", "b", [CALL], thought="t\n\nu")]
    silent = Roles(call_after_assistant=False, text_with_calls=False)
    assert arrange_turns(calls, silent) == [*calls[:2], Turn("user", ""), calls[2]]


def test_a_call_without_its_result_gets_one_where_the_user_may_not_follow() -> None:
    other = PastCall("b", {}, "2")
    called = [Turn("user", "a"), Turn("assistant", calls=[CALL, other])]
    turns = [*called, Turn("user", "b")]
    assert arrange_turns(turns, ALL) == turns
    results = [Turn("tool", NO_RESULT, name=c.name, call_id=c.id) for c in (CALL, other)]
    roles = Roles(user_after_call=False)
    assert arrange_turns(turns, roles) == [*called, *results, turns[-1]]
    joined = arrange_turns(turns, Roles(user_after_call=False, user_after_result=False))
    assert joined[-1].text == f"{NO_RESULT}\n\nb"
    for more in ([], [Turn("tool", "r", call_id="2"), *turns[2:]], [Turn("assistant", "c")]):
        assert arrange_turns([*called, *more], roles) == [*called, *more]
    folded = arrange_turns(
        [*called, Turn("system", "s")], Roles(False, False, user_after_call=False)
    )
    assert folded == [*called, *results, Turn("user", "s")]


def test_results_are_the_users_where_there_are_none() -> None:
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("tool", "r", call_id="1")]
    assert arrange_turns(turns, ALL) == turns
    said = "<tool_response>\nr\n</tool_response>"
    roles = Roles(results=False, user_after_user=False)
    assert arranged(roles, *turns)[2:] == [("user", said)]
    assert arranged(roles, *turns, turns[2], Turn("user", "c"))[2:] == [
        ("user", f"{said}\n\n{said}\n\nc")
    ]


def test_an_answer_in_front_is_to_nothing() -> None:
    turns = [Turn("system", "s"), Turn("assistant", "a"), Turn("user", "b")]
    assert arrange_turns(turns, ALL) == turns
    roles = Roles(assistant_first=False)
    assert arrange_turns(turns, roles) == [turns[0], Turn("user", ""), *turns[1:]]
    assert arrange_turns(turns[1:], roles) == [Turn("user", ""), *turns[1:]]
    called = [Turn("assistant", calls=[CALL]), Turn("tool", "r"), turns[1]]
    assert arrange_turns(called, roles) == [*called[:2], Turn("user", ""), turns[1]]


def test_a_message_of_the_system_alone_may_be_the_users() -> None:
    turns = [Turn("system", "a"), Turn("developer", "b")]
    assert arranged(ALL, *turns) == [("system", "a\n\nb")]
    assert arranged(Roles(system_alone=False), *turns) == [("user", "a\n\nb")]


ROLES = ["system", "developer", "user", "assistant", "loop", "interrupted"]
SPOKEN = st.lists(st.sampled_from(ROLES), max_size=6)


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30)
@given(spoken=SPOKEN, begins=st.booleans())
@example(spoken=["assistant", "interrupted", "user"], begins=True)
@example(spoken=["assistant", "assistant", "interrupted", "system", "user"], begins=False)
@example(spoken=["loop", "user", "loop", "assistant", "assistant"], begins=True)
def test_whatever_agents_send_is_written_once_and_in_its_order(
    name: str, tools: list[object] | None, spoken: list[str], begins: bool
) -> None:
    turns = [Turn("user", "T0t")] if begins or not spoken else []
    calls = None if name in ("parity", "plain") else [CALL]  # there they are text by then
    for i, role in enumerate(spoken, start=1):
        if role in ("loop", "interrupted"):
            beside = "" if name == "silent-calls" else f"A{i}a"  # which is the template's choice
            turns.append(Turn("assistant", beside, calls))
            if role == "loop":
                turns.append(Turn("tool", f"T{i}t", call_id=CALL.id))
        else:
            turns.append(Turn(role, f"T{i}t"))
    found = template(name)
    ready = arrange_turns(turns, found.roles(tools=tools is not None))
    text = found.render([turn.message() for turn in ready], tools=tools)  # type: ignore[arg-type]
    said = [turn.text for turn in turns if turn.text]
    places = [text.index(each) for each in said]
    assert places == sorted(places)
    assert all(text.count(each) == 1 for each in said)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_comes_later_does_not_change_the_head(name: str) -> None:
    found = template(name)
    turns = [Turn("system", "S"), Turn("user", "U"), Turn("developer", "D")]
    turns += [Turn("assistant", "A", [CALL]), Turn("tool", "R"), Turn("system", "L")]
    turns += [Turn("assistant", "B"), Turn("user", "V"), Turn("system", "M")]
    roles = found.roles()

    def prompt(count: int) -> str:
        ready = arrange_turns(turns[:count], roles)
        return found.render([turn.message() for turn in ready], add_generation_prompt=False)

    # What an agent sends with the next request extends what it sent with the last one, up to the
    # end of a turn.
    for fewer, more in pairwise((3, 6, 9)):
        short, long = prompt(fewer), prompt(more)
        assert long.startswith(short.removesuffix("<end>").rstrip("\n"))


def test_templates_that_refuse_are_told_to_the_client() -> None:
    with pytest.raises(TemplateError, match="alternate"):
        template("alternating").render([{"role": "assistant", "content": "a"}])


# ---- real families -------------------------------------------------------------------------------


# Their templates write a message of the system, but not where it stands: DeepSeek's collect them in
# front, and Gemma's goes on with the model's turn behind a result.
ELSEWHERE = {"deepseek-r1", "deepseek-v3.1", "gemma-4"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_a_family_takes(family: Family) -> None:
    found = ChatTemplate({"default": family.source}, family.special)
    for tools in (False, True):
        roles = found.roles(tools=tools)
        assert roles.late_system == (family.middle == "ok" and family.name not in ELSEWHERE)
        assert roles.user_after_user == (family.users == "ok")
        assert roles.several_calls == (family.calls in ("many", "none"))
        alternates = family.name == "mistral-small-3.2"
        assert roles.assistant_after_assistant == roles.assistant_first == (not alternates)
        assert roles.user_after_call == roles.call_after_assistant == (not alternates)
        assert roles.results and roles.system_alone == (family.name != "qwen3.5")


def test_several_calls_are_split_where_a_turn_has_one() -> None:
    other, third = PastCall("b", {}, "2"), PastCall("c", {}, "3")
    turns = [Turn("user", "a"), Turn("assistant", "x", [CALL, other, third], thought="t")]
    turns += [Turn("tool", "r", call_id=CALL.id), Turn("tool", "s", call_id="2"), Turn("user", "u")]
    assert arrange_turns(turns, ALL) == turns
    assert arrange_turns(turns, Roles(several_calls=False)) == [
        Turn("user", "a"),
        Turn("assistant", "x", [CALL], thought="t"),
        Turn("tool", "r", call_id=CALL.id),
        Turn("assistant", "", [other]),
        Turn("tool", "s", call_id="2"),
        Turn("assistant", "", [third]),
        Turn("user", "u"),
    ]
