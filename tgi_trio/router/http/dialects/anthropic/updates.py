"""What messages say beside their words: what they replace, tools that come and go, and effort.

| in a message | what it changes |
|---|---|
| a block `compaction` | it stands for all that is before it |
| `tool_addition`, `tool_removal`, of the system's | which tools may be called |
| `output_config.effort`, of the system's | the last one counts |
| `clear_at` of `next_user_message`, of the system's | it is left out where the user has gone on |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from tgi_trio.router.http.dialects.anthropic import schema
from tgi_trio.router.http.dialects.summaries import tell_summary
from tgi_trio.router.http.messages.body_reader import convert_body, invalid_value
from tgi_trio.router.http.messages.shared_fields import Effort

SYSTEM: Final = ("system", "developer")


class _ChangedTool(Struct):
    """A tool by its name, or with its definition; `type` says which."""

    type: str
    name: str | None = None
    definition: schema.ToolDefinition | None = None


class _ToolChange(Struct):
    type: str
    tool: _ChangedTool


@dataclass(frozen=True, slots=True)
class Updates:
    """A conversation's messages as they hold now, and what they say of its tools and effort."""

    messages: Sequence[tuple[int, schema.InputMessage]]  # with their places in the request
    tools: Sequence[schema.ToolDefinition]  # those of the request, and those that were added
    removed: frozenset[str]  # names of those that may not be called any more
    effort: Effort | None = None


def read_updates(request: schema.CountTokensRequest) -> Updates:
    """Return what the messages of a body come to. Raises BodyRejected."""
    messages = _compact(list(enumerate(request.messages)))
    tools = list(request.tools or [])
    # Of each name the first tool, whose place another one of that name takes.
    places = {tool.name: k for k, tool in reversed(list(enumerate(tools)))}
    removed: set[str] = set()
    for path, change in _changes(messages):
        name = change.tool.name
        if (defined := change.tool.definition) is not None:
            name = defined.name
            if name is None:
                raise invalid_value(f"{path}.tool.definition", "missing field `name`")
            place = places.setdefault(name, len(tools))
            tools[place : place + 1] = [defined]
        if name is not None and change.type == "tool_removal":
            removed.add(name)
        elif name is not None:
            removed.discard(name)
    effort: Effort | None = None
    for _, message in messages:
        if message.role in SYSTEM and message.output_config is not None:
            effort = message.output_config.effort or effort
    return Updates(_shown(messages), tools, frozenset(removed), effort)


def _compact(
    messages: list[tuple[int, schema.InputMessage]],
) -> list[tuple[int, schema.InputMessage]]:
    """Return the messages from the last summary on, which is a text there."""
    for place in reversed(range(len(messages))):
        i, message = messages[place]
        blocks = message.content if isinstance(message.content, list) else []
        for j in reversed(range(len(blocks))):
            if blocks[j].type != "compaction" or blocks[j].content is None:  # null: it failed
                continue
            told = blocks[j].content
            if not isinstance(told, str) or not told.strip():
                raise invalid_value(f"messages[{i}].content[{j}].content", "expected a text")
            summary = replace(blocks[j], type="text", text=tell_summary(told), content=None)
            rest = replace(message, content=[summary, *blocks[j + 1 :]])
            return [(i, rest), *messages[place + 1 :]]
    return messages


def _changes(
    messages: Sequence[tuple[int, schema.InputMessage]],
) -> Iterator[tuple[str, _ToolChange]]:
    """Yield the changes of tools, in order, each with its path."""
    for i, message in messages:
        if not isinstance(message.content, list):
            continue
        for j, block in enumerate(message.content):
            path = f"messages[{i}].content[{j}]"
            if message.role in SYSTEM and block.type in ("tool_addition", "tool_removal"):
                tool = convert_body(block.tool, _ChangedTool, f"{path}.tool")
                yield path, _ToolChange(block.type, tool)
            for k, each in enumerate(block.tool_changes or []):
                where = f"{path}.tool_changes[{k}]"
                yield where, convert_body(each, _ToolChange, where)


def _shown(
    messages: Sequence[tuple[int, schema.InputMessage]],
) -> list[tuple[int, schema.InputMessage]]:
    """Return the messages without those that have no words, or none any more."""
    last = max((i for i, message in messages if message.role == "user"), default=-1)
    found: list[tuple[int, schema.InputMessage]] = []
    for i, message in messages:
        if message.content is None:
            if message.role not in SYSTEM or message.output_config is None:
                raise invalid_value(f"messages[{i}]", "missing field `content`")
            continue
        if message.role in SYSTEM and message.clear_at == "next_user_message" and i < last:
            continue
        found.append((i, message))
    return found
