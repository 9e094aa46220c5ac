"""What templates take is found by probing them, and conversations are arranged for it."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.text.families import FAMILIES, Family
from tests.router.text.role_templates import TEMPLATES
from tgi_trio.errors import TemplateError
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.roles import Roles
from tgi_trio.router.text.turns import PastCall, Turn, arrange_turns

ALL = Roles()
# (system, late system, user after user, user after a result); all but one take several calls
TAKEN = {
    "headers": (True, True, True, True),
    "known": (True, True, True, True),
    "first-only": (True, False, True, True),
    "first-silent": (True, False, True, True),
    "alternating": (True, False, False, False),
    "no-system": (False, False, True, True),
    "hoisting": (True, False, True, True),
    "glued": (True, False, True, True),
    "plain": (True, True, True, True),
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
    assert template(name).roles(tools=tools) == Roles(*TAKEN[name])


def test_a_template_that_writes_nothing_tells_nothing() -> None:
    assert ChatTemplate({"default": "{{ raise_exception('no') }}"}, {}).roles() == ALL
    assert ChatTemplate({}, {}).roles() == ALL


def test_the_template_for_tools_is_probed_by_itself() -> None:
    both = {"default": TEMPLATES["headers"], "tool_use": TEMPLATES["alternating"]}
    found = ChatTemplate(both, {})
    assert found.roles() == ALL
    assert found.roles(tools=True) == Roles(*TAKEN["alternating"])


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


SPOKEN = st.lists(st.sampled_from(["system", "developer", "user", "assistant", "loop"]), max_size=6)


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30)
@given(spoken=SPOKEN)
def test_whatever_agents_send_is_written_once_and_in_its_order(
    name: str, tools: list[object] | None, spoken: list[str]
) -> None:
    turns = [Turn("user", "T0t")]
    for i, role in enumerate(spoken, start=1):
        # Two answers in a row are nobody's history.
        if role in ("assistant", "loop") and turns[-1].role == "assistant":
            turns.append(Turn("user", f"U{i}u"))
        if role == "loop":
            turns += [Turn("assistant", f"A{i}a", [CALL]), Turn("tool", f"T{i}t", call_id=CALL.id)]
        elif role == "assistant" and turns[-1].role == "tool" and name == "alternating":
            turns.append(Turn("assistant", f"T{i}t"))
        else:
            turns.append(Turn(role, f"T{i}t"))
    found = template(name)
    ready = arrange_turns(turns, found.roles(tools=tools is not None))
    text = found.render([turn.message() for turn in ready], tools=tools)  # type: ignore[arg-type]
    places = [text.index(turn.text or "") for turn in turns]
    assert places == sorted(places)
    assert all(text.count(turn.text or "") == 1 for turn in turns)


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


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_a_family_takes(family: Family) -> None:
    found = ChatTemplate({"default": family.source}, family.special)
    for tools in (False, True):
        roles = found.roles(tools=tools)
        assert roles.late_system == (family.middle == "ok" and family.name not in ELSEWHERE)
        assert roles.user_after_user == (family.users == "ok")
        assert roles.several_calls == (family.calls in ("many", "none"))


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
