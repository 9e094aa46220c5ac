"""How model families write calls of tools: a table.

A model calls best in the words it was trained on, and those are in its chat template. An answer is

    prose  trigger  opening  name  middle  arguments  (next  name  middle  arguments)*  closing

where everything but prose, names and arguments is literal text of the format. Behind the trigger
the grammar allows nothing else, so one row tells both how a call is forced and how it is read.
"""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Format:
    """One family's way to write calls."""

    name: str
    signs: tuple[str, ...]  # texts that are all in the templates of this family
    trigger: str  # ends the prose: from here on it is a call
    opening: str  # between the trigger and the first name
    middle: str  # between a name and its arguments
    next: str  # between arguments and the next name; "" where an answer makes one call at most
    closing: str  # after the last arguments
    anchored: bool = False  # the trigger counts only where the answer begins

    @property
    def texts(self) -> tuple[str, ...]:
        """Return every literal text, in the order in which an answer has them."""
        return (self.trigger, self.opening, self.middle, self.next, self.closing)

    def write(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Return calls, at least one, as the model would write them: pairs of name and arguments.

        Arguments are JSON values, or text that is taken as it is. Where the format has no way to
        write several, they stand side by side.
        """
        written = [
            f"{name}{self.middle}{arguments if isinstance(arguments, str) else _json(arguments)}"
            for name, arguments in calls
        ]
        return f"{self.trigger}{self.opening}{self.next.join(written)}{self.closing}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


HERMES = Format(
    name="hermes",  # Hermes 2 and 3, Qwen 2.5, Qwen 3 and many that follow them
    signs=("<tool_call>",),
    trigger="<tool_call>",
    opening='\n{"name": "',
    middle='", "arguments": ',
    next='}\n</tool_call>\n<tool_call>\n{"name": "',
    closing="}\n</tool_call>",
)

# In the order in which they are looked for: the first whose signs are all there is taken.
FORMATS = (
    Format(
        name="deepseek-v3",  # DeepSeek V3 and R1
        signs=("<｜tool▁calls▁begin｜>", "```json"),
        trigger="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        next="\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        closing="\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    Format(
        name="deepseek-v3.1",
        signs=("<｜tool▁calls▁begin｜>",),
        trigger="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        next="<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
        closing="<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    Format(
        name="mistral-args",  # Mistral Small 3.2, Devstral, Magistral, Ministral 3
        signs=("[TOOL_CALLS]", "[ARGS]"),
        trigger="[TOOL_CALLS]",
        opening="",
        middle="[ARGS]",
        next="[TOOL_CALLS]",
        closing="",
    ),
    Format(
        name="mistral",  # Mistral 7B 0.3, Nemo, Large 2
        signs=("[TOOL_CALLS]",),
        trigger="[TOOL_CALLS]",
        opening='[{"name": "',
        middle='", "arguments": ',
        next='}, {"name": "',
        closing="}]",
    ),
    Format(
        name="granite",  # Granite 3
        signs=("<|tool_call|>",),
        trigger="<|tool_call|>",
        opening='[{"name": "',
        middle='", "arguments": ',
        next='}, {"name": "',
        closing="}]",
    ),
    HERMES,
    Format(
        # Llama 3.1, 3.2 and 3.3; there is no mark but the JSON itself, and their templates refuse
        # a turn of several calls.
        name="llama-3",
        signs=('"parameters": ', "<|start_header_id|>"),
        trigger='{"name": "',
        opening="",
        middle='", "parameters": ',
        next="",
        closing="}",
        anchored=True,
    ),
)


def format_of(template: str) -> Format:
    """Return the format a chat template speaks of; Hermes' where it speaks of none we know."""
    for each in FORMATS:
        if all(sign in template for sign in each.signs):
            return each
    return HERMES
