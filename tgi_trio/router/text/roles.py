"""Tests which turns a chat template renders unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_trio.errors import TemplateError

Render = Callable[[Sequence[Mapping[str, Any]]], str]  # from messages; raises TemplateError

# A word that is in no template, and without letters that a template might change. No spaces, since
# templates may trim.
_MARK = "Probe{}x"


@dataclass(frozen=True, slots=True)
class Roles:
    """Which messages a template renders once, in their place and as turns of their own."""

    system: bool = True  # a system message at the beginning
    late_system: bool = True  # one after other turns
    user_after_user: bool = True
    user_after_result: bool = True  # a user's turn after a tool's result
    several_calls: bool = True  # in one turn of the assistant
    user_after_call: bool = True  # without the call's result
    assistant_after_assistant: bool = True
    call_after_assistant: bool = True  # calls after an answer, and another answer after them
    text_with_calls: bool = True  # what is said beside calls
    assistant_first: bool = True  # an answer before any turn of the user
    results: bool = True  # results of tools
    system_alone: bool = True  # a system message and nothing else

    def describe_missing(self) -> str:
        """Return what the template does not render, for the log; "" if nothing."""
        missing = {
            "system messages": self.system,
            "system messages behind others": self.late_system,
            "user messages in a row": self.user_after_user,
            "user messages behind results of tools": self.user_after_result,
            "several calls in one message": self.several_calls,
            "user messages behind calls without results": self.user_after_call,
            "assistant messages in a row": self.assistant_after_assistant,
            "calls behind assistant messages": self.call_after_assistant,
            "text beside calls": self.text_with_calls,
            "assistant messages in front": self.assistant_first,
            "results of tools": self.results,
            "a system message alone": self.system_alone,
        }
        return ", ".join(name for name, taken in missing.items() if not taken)


def probe_roles(render: Render) -> Roles:
    """Return what a template renders.

    If the template refuses the other turns of a probe as well, the probe says nothing and counts as
    passed: there is nothing to fold where nothing can be rendered.
    """
    arguments = _arguments(render)
    loop = [_user(1), _call(1, arguments), _result(2)]
    spoken = [_user(1), _assistant(2)]
    return Roles(
        system=_takes(render, [_system(1), _user(2)], 0),
        late_system=all(
            _takes(render, turns, at)
            for turns, at in (
                ([_system(1), _user(2), _system(3)], 2),
                ([_user(1), _system(2)], 1),
                ([_user(1), _assistant(2), _system(3), _user(4)], 2),
                ([*loop, _system(3)], 3),
            )
        ),
        user_after_user=_takes(render, [_user(1), _user(2)], 1)
        and _takes(render, [_user(1), _assistant(2), _user(3), _user(4)], 3),
        user_after_result=_takes(render, [*loop, _user(3)], 3),
        several_calls=not _writes_calls(render, 1, arguments)
        or _writes_calls(render, 2, arguments),
        user_after_call=_goes_on(render, loop[:2], [*loop[:2], _user(2)]),
        assistant_after_assistant=_goes_on(render, spoken, [*spoken, _assistant(3)]),
        call_after_assistant=_goes_on(
            render, [*loop, _assistant(3)], [*spoken, loop[1], _result(3), _assistant(4)]
        ),
        text_with_calls=_goes_on(render, loop, [_user(1), _call(1, arguments, 3), _result(2)]),
        assistant_first=_goes_on(render, spoken, [_assistant(1), _user(2)]),
        results=_goes_on(render, loop[:2], loop),
        system_alone=_goes_on(render, [_user(1)], [_system(1)]),
    )


def _arguments(render: Render) -> dict[str, Any] | str:
    """Return arguments of a call as the template accepts them: an object, or JSON text."""
    return "{}" if _writes_calls(render, 1, "{}") and not _writes_calls(render, 1, {}) else {}


def _writes_calls(render: Render, count: int, arguments: dict[str, Any] | str) -> bool:
    """Return whether a turn of so many calls is rendered with all of them."""
    turns = [_user(1), _call(count, arguments), *(_result(2 + i, i) for i in range(count))]
    try:
        text = render(turns)
    except TemplateError:
        return False
    return all(_function(i) in text for i in range(count))


def _takes(render: Render, turns: Sequence[Mapping[str, Any]], at: int) -> bool:
    """Return whether the template renders turn `at` of `turns` as a turn of its own."""
    try:
        without = render([*turns[:at], *turns[at + 1 :]])
    except TemplateError:
        return True
    try:
        text = render(turns)
    except TemplateError:
        return False
    # Others that are not rendered without it either say nothing of it: users' texts of Qwen3-ASR.
    said = ((i, turn["content"]) for i, turn in enumerate(turns) if turn["content"])
    marks = [mark for i, mark in said if i == at or mark in without]
    if any(text.count(mark) != 1 for mark in marks):
        return False
    places = [text.index(mark) for mark in marks]
    if places != sorted(places):
        return False
    mark = turns[at]["content"]
    i = marks.index(mark)
    before, _, after = text.partition(mark)
    if i + 1 < len(marks) and not after.partition(marks[i + 1])[0].strip():
        return False
    return i == 0 or _begins(before.partition(marks[i - 1])[2], without.partition(marks[i - 1])[2])


def _goes_on(
    render: Render, usual: Sequence[Mapping[str, Any]], turns: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether the template renders `turns`, whole, if it renders `usual` ones."""
    return _renders(render, turns) or not _renders(render, usual)


def _renders(render: Render, turns: Sequence[Mapping[str, Any]]) -> bool:
    try:
        text = render(turns)
    except TemplateError:
        return False
    return all(turn["content"] in text for turn in turns)


def _begins(between: str, end: str) -> bool:
    """Return whether a separate turn begins between two texts.

    `end`: what follows the first of them if the second is left out. Text that begins `end` only
    ends the previous turn.
    """
    markup = between.rstrip()
    return bool(markup.strip()) and not end.startswith(markup)


def _system(i: int) -> Mapping[str, Any]:
    return {"role": "system", "content": _MARK.format(i)}


def _user(i: int) -> Mapping[str, Any]:
    return {"role": "user", "content": _MARK.format(i)}


def _assistant(i: int) -> Mapping[str, Any]:
    return {"role": "assistant", "content": _MARK.format(i)}


def _call(
    count: int, arguments: dict[str, Any] | str, said: int | None = None
) -> Mapping[str, Any]:
    functions = [{"name": _function(i), "arguments": arguments} for i in range(count)]
    calls = [
        {"id": _id(i), "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    content = "" if said is None else _MARK.format(said)
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(i: int, call: int = 0) -> Mapping[str, Any]:
    return {
        "role": "tool",
        "content": _MARK.format(i),
        "tool_call_id": _id(call),
        "name": "probe",
    }


def _id(call: int) -> str:
    return f"probe000{call}"  # nine letters and digits, since Mistral's templates accept no other


def _function(call: int) -> str:
    return f"probe_{call}"
