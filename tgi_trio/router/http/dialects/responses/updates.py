"""Items that change what holds for the answers behind them.

| item | what it changes |
|---|---|
| `additional_tools`, `tool_search_output` | there are more `tools` |
| `configuration_update` | `reasoning.effort`, `text.format`: the last one of each counts |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from msgspec import Struct

from tgi_trio.router.http.dialects.responses import schema
from tgi_trio.router.http.dialects.responses.history import History
from tgi_trio.router.http.dialects.responses.items import name_place
from tgi_trio.router.http.dialects.responses.tools import ToolList
from tgi_trio.router.http.messages.body_reader import convert_body
from tgi_trio.router.http.messages.shared_fields import Effort

KINDS: Final = frozenset({"additional_tools", "tool_search_output", "configuration_update"})


class _Reasoning(Struct):
    effort: Effort | None = None


class _Text(Struct):
    format: schema.TextFormat


class AnswerFormat(NamedTuple):
    """The form that an answer must have."""

    path: str  # of the field, for errors
    format: schema.TextFormat


@dataclass(frozen=True, slots=True)
class Updates:
    """What the items of a conversation say beside what its request says."""

    tools: Sequence[ToolList] = ()
    effort: Effort | None = None
    form: AnswerFormat | None = None


def read_updates(history: History) -> Updates:
    """Return what the items of a conversation say. Raises BodyRejected."""
    tools: list[ToolList] = []
    effort: Effort | None = None
    form: AnswerFormat | None = None
    for i, item in enumerate(history.kept + history.given):
        if item.type not in KINDS:
            continue
        path = name_place(i, len(history.kept))
        if item.type != "configuration_update":
            given: list[dict[str, Any]] = convert_body(
                item.tools or [], list[dict[str, Any]], f"{path}.tools"
            )
            tools.append(ToolList(f"{path}.tools", given))
            continue
        if item.reasoning is not None:
            reasoning = convert_body(item.reasoning, _Reasoning, f"{path}.reasoning")
            effort = reasoning.effort or effort
        if item.text is not None:
            text = convert_body(item.text, _Text, f"{path}.text")
            form = AnswerFormat(f"{path}.text.format", text.format)
    return Updates(tools, effort, form)
