"""The turns of a conversation, and how they are arranged so that a template renders all of them.

Agents send system and developer messages anywhere, and several user messages in a row. Many
templates refuse that, and others silently leave such a message out. What a template renders is
found by probes (`roles.py`); what it does not render is folded into a neighbouring turn. Nothing
moves to the front: the beginning of the prompt would change with every turn, and its cached prefix
would be lost. And no system message becomes a user's turn after results of tools: templates treat
such a turn as a new question, and drop the thoughts that led to the calls. If a template renders
only one call a turn, turns of several calls are split.

After an interrupt agents send two answers in a row, or a call without its result. Where a template
refuses that, answers are joined, as mistral-common does, and the call gets a result that says that
there is none, as in LiteLLM. An answer is not joined with a call beside which the template writes
no text, as Mistral Nemo's: an empty turn of the user comes between them. Where results of tools are
refused, they are the user's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tgi_trio.router.media.links import MediaLink, Piece
from tgi_trio.router.text.roles import Roles

_BREAK = "\n\n"  # between texts that are joined in one turn
NO_RESULT = "No result was given for this call."
_RESULT = "<tool_response>\n", "\n</tool_response>"  # around a result in a turn of the user


@dataclass(frozen=True, slots=True)
class PastCall:
    """A call that the model made in an earlier turn."""

    name: str
    arguments: Any  # a JSON value, or text that is not JSON
    id: str | None = None
    type: str = "function"

    def field(self) -> dict[str, Any]:
        """Return the call as templates expect it; they convert its arguments to JSON themselves."""
        made = {"type": self.type, "function": {"name": self.name, "arguments": self.arguments}}
        return made if self.id is None else {"id": self.id, **made}


def read_arguments(text: str) -> Any:
    """Return a call's arguments, JSON, as a value; unchanged if not JSON or nested too deeply."""
    try:
        return msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str  # system, user, assistant, tool, or any other that a template knows
    text: str | None = None  # without images
    calls: Sequence[PastCall] | None = None
    name: str | None = None  # of the speaker, or of the function whose result this is
    call_id: str | None = None  # of the call whose result this is
    thought: str | None = None
    parts: tuple[Piece, ...] = ()  # texts and images in order, if there are images

    @property
    def images(self) -> list[MediaLink]:
        """The turn's images and videos."""
        return [part for part in self.parts if isinstance(part, MediaLink)]

    @classmethod
    def of(cls, role: str, pieces: Sequence[Piece], between: str = "", **fields: Any) -> Turn:
        """Return a turn of these pieces, with `between` between two that are both texts."""
        texts = [piece for piece in pieces if isinstance(piece, str)]
        turn = cls(role, between.join(texts), **fields)
        if len(texts) == len(pieces):
            return turn
        parts: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, str) and parts and isinstance(parts[-1], str):
                parts[-1] += between + piece
            elif piece:
                parts.append(piece)
        return replace(turn, parts=tuple(parts))

    def message(self) -> dict[str, Any]:
        """Return the turn as templates expect it: plain values, the thought by all its names."""
        fields = {
            "role": self.role,
            "content": [_part(each) for each in self.parts] if self.parts else self.text,
            "tool_calls": None if self.calls is None else [each.field() for each in self.calls],
            "name": self.name,
            "tool_call_id": self.call_id,
            "reasoning_content": self.thought,
            "reasoning": self.thought,
            "thinking": self.thought,
        }
        return {name: value for name, value in fields.items() if value is not None}


def arrange_turns(turns: Iterable[Turn], roles: Roles) -> list[Turn]:
    """Return the turns so that a template with these `roles` renders them all.

    Developer messages become system messages, and those at the beginning are joined into one. No
    text is lost, and no two texts change their order.
    """
    arranged: list[Turn] = []
    waiting: list[str] = []  # system texts for the next turn
    for turn in turns:
        if turn.role == "developer":
            turn = replace(turn, role="system")
        if turn.role == "system":
            _add_system(arranged, waiting, turn, roles)
            continue
        if turn.role == "tool" and not roles.results:
            turn = _as_user(turn)
        if waiting:
            text = _join(*waiting)
            waiting.clear()
            if turn.role in ("user", "tool"):
                turn = _saying(turn, Turn(turn.role, text), turn)
            else:
                _add(arranged, Turn("user", text), roles)
        _add(arranged, turn, roles)
    if waiting:
        _add(arranged, Turn("user", _join(*waiting)), roles)
    if not roles.system_alone and [turn.role for turn in arranged] == ["system"]:
        arranged = [replace(arranged[0], role="user")]
    return arranged if roles.several_calls else _split_calls(arranged)


def _add(arranged: list[Turn], turn: Turn, roles: Roles) -> None:
    """Append a turn, or join it to the last one if the template would not render it behind that."""
    last = arranged[-1] if arranged else None
    if turn.role == "assistant" and not (turn.calls or roles.assistant_first):
        if all(each.role != "user" for each in arranged):
            arranged.append(Turn("user", ""))
            last = arranged[-1]
    elif last is not None and last.calls and turn.role == "user" and not roles.user_after_call:
        arranged += [Turn("tool", NO_RESULT, name=c.name, call_id=c.id) for c in last.calls]
        last = arranged[-1]
    if last is None or _may_follow(last, turn, roles):
        arranged.append(turn)
        return
    if turn.calls and last.text and not roles.text_with_calls:
        arranged += [Turn("user", ""), turn]
        return
    thought = _join(last.thought, turn.thought) or None
    arranged[-1] = replace(_saying(last, last, turn), calls=turn.calls, thought=thought)


def _may_follow(last: Turn, turn: Turn, roles: Roles) -> bool:
    """Return whether the template renders `turn` behind `last`."""
    match last.role, turn.role:
        case "user", "user":
            return roles.user_after_user
        case "tool", "user":
            return roles.user_after_result
        case "assistant", "assistant" if not last.calls:
            return roles.call_after_assistant if turn.calls else roles.assistant_after_assistant
    return True


def _as_user(result: Turn) -> Turn:
    """Return a tool's result as a turn of the user, for a template without such results."""
    before, after = _RESULT
    parts = (before, *result.parts, after) if result.parts else ()
    return Turn("user", f"{before}{result.text or ''}{after}", parts=parts)


def _split_calls(turns: list[Turn]) -> list[Turn]:
    """Return the turns so that each has at most one call, followed by its result."""
    split: list[Turn] = []
    rest: list[PastCall] = []  # of the previous turn, without a turn of their own so far
    for turn in turns:
        if turn.role == "tool":
            owner = next((call for call in rest if call.id == turn.call_id), None)
            if owner is not None:
                rest.remove(owner)
                split.append(Turn("assistant", "", calls=[owner]))
            split.append(turn)
            continue
        split += [Turn("assistant", "", calls=[call]) for call in rest]
        rest = list(turn.calls[1:]) if turn.calls else []
        split.append(replace(turn, calls=turn.calls[:1]) if rest and turn.calls else turn)
    return split + [Turn("assistant", "", calls=[call]) for call in rest]


def _add_system(arranged: list[Turn], waiting: list[str], turn: Turn, roles: Roles) -> None:
    """Put a system message where the template renders it."""
    last = arranged[-1] if arranged else None
    text = turn.text or ""
    if last is None and not waiting:
        if roles.system:
            arranged.append(turn)
        else:
            waiting.append(text)
    elif last is None:
        waiting.append(text)
    elif last.role == "system" and len(arranged) == 1:
        arranged[0] = replace(last, text=_join(last.text, text))
    elif roles.late_system and not waiting:
        arranged.append(turn)
    elif last.role in ("user", "tool") and not waiting:
        arranged[-1] = _saying(last, last, turn)
    else:
        waiting.append(text)


def _saying(turn: Turn, first: Turn, second: Turn) -> Turn:
    """Return `turn` with the contents of two others."""
    merged = replace(turn, text=_join(first.text, second.text))
    if not first.parts and not second.parts:
        return merged
    ends = [each.parts or tuple(filter(None, (each.text,))) for each in (first, second)]
    return replace(merged, parts=(*ends[0], *((_BREAK,) if all(ends) else ()), *ends[1]))


def _part(piece: Piece) -> dict[str, str]:
    """Return a part of a message as templates expect it."""
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": piece.kind}


def _join(*texts: str | None) -> str:
    return _BREAK.join(filter(None, texts))
