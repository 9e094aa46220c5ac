"""Schemas of tools that APIs define by a type alone, and clients run.

A tool of several commands takes one object. A model is shown all parameters of it; what it writes
must fit one of the commands, with the parameters of that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

TEXT: Final[Mapping[str, Any]] = MappingProxyType({"type": "string"})
_NONE: Final[Mapping[str, Sequence[str]]] = MappingProxyType({})


class ToolSchemas(NamedTuple):
    """JSON schemas of a tool's arguments."""

    shown: Mapping[str, Any]  # with all parameters, for a template
    accepted: Mapping[str, Any]  # which tells commands apart


def describe_object(properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": {name: dict(each) for name, each in properties.items()},
        "required": list(required),
        "additionalProperties": False,
    }


def describe_commands(
    key: str,
    commands: Mapping[str, Sequence[str]],
    parameters: Mapping[str, Any],
    optional: Mapping[str, Sequence[str]] = _NONE,
) -> ToolSchemas:
    """Return the schemas of a tool whose argument `key` says the command.

    `commands`: which of `parameters` each needs; `optional`: which it may have beside.
    """
    used = {name: (*needed, *optional.get(name, ())) for name, needed in commands.items()}
    names = dict.fromkeys(each for own in used.values() for each in own)
    every = {key: {**TEXT, "enum": list(commands)}} | {name: parameters[name] for name in names}
    alternatives = [
        describe_object(
            {key: {**TEXT, "enum": [name]}} | {each: parameters[each] for each in used[name]},
            [key, *needed],
        )
        for name, needed in commands.items()
    ]
    return ToolSchemas(describe_object(every, [key]), {"anyOf": alternatives})
