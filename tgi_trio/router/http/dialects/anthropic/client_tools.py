"""Tools that Anthropic defines and clients run: a shell, an editor of files, a memory.

A request names them by their type alone, so what their arguments are is written down here, as
Anthropic documents it. A model is shown all parameters of a tool as one object; what it writes
fits one of its commands.

| type, without its date | commands |
|---|---|
| `bash` | a command to run, or `restart` |
| `text_editor` | `view`, `create`, `str_replace`, `insert`; `undo_edit` before 2025-04 |
| `memory` | the first four, `delete`, `rename` |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from tgi_trio.router.http.dialects.command_schemas import TEXT, describe_commands, describe_object

_PROPERTIES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "path": {**TEXT, "description": "Of the file or directory"},
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "minItems": 2,
            "maxItems": 2,
            "description": "First and last line to view; -1 is the last line of the file",
        },
        "file_text": {**TEXT, "description": "What the new file contains"},
        "old_str": {**TEXT, "description": "Text to replace, exactly as it is in the file"},
        "new_str": {**TEXT, "description": "Text to put in its place, or to insert"},
        "insert_line": {"type": "integer", "description": "Line behind which to insert; 0: none"},
        "insert_text": {**TEXT, "description": "Text to insert"},
        "old_path": {**TEXT, "description": "Path of what is renamed"},
        "new_path": {**TEXT, "description": "Its new path"},
    }
)
_EDIT: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "view": ("path",),
        "create": ("path", "file_text"),
        "str_replace": ("path", "old_str", "new_str"),
        "insert": ("path", "insert_line", "insert_text"),
    }
)
_OLDER_EDIT: Final = {**_EDIT, "insert": ("path", "insert_line", "new_str")}
_OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"view": ("view_range",)})


@dataclass(frozen=True, slots=True)
class ClientTool:
    """What a model is told of a tool, and what its arguments must fit."""

    description: str
    shown: Mapping[str, Any]  # a schema with all parameters
    accepted: Mapping[str, Any]  # one that tells commands apart


def find_client_tool(kind: str) -> ClientTool | None:
    """Return the tool of a type, as `bash_20250124`; None: it is none that clients run."""
    name, _, date = kind.rpartition("_")
    if not date.isdigit():
        return None
    match name:
        case "bash":
            return _BASH
        case "text_editor":
            return next(tool for since, tool in _EDITORS if date >= since)
        case "memory":
            return _MEMORY
    return None


def _editor(description: str, commands: Mapping[str, tuple[str, ...]]) -> ClientTool:
    return ClientTool(description, *describe_commands("command", commands, _PROPERTIES, _OPTIONAL))


_EDITS: Final = "Views and edits files."
_EDITORS: Final = (  # the last first, each with its date
    ("20250728", _editor(_EDITS, _EDIT)),
    ("20250429", _editor(_EDITS, _OLDER_EDIT)),
    ("", _editor(_EDITS, {**_OLDER_EDIT, "undo_edit": ("path",)})),
)
_MEMORY: Final = _editor(
    "Keeps notes in files below /memories.",
    {**_EDIT, "delete": ("path",), "rename": ("old_path", "new_path")},
)
_COMMAND: Final = {"command": {**TEXT, "description": "To run"}}
_RESTART: Final = {"type": "boolean", "description": "To open a new shell"}
_BASH: Final = ClientTool(
    "Runs a command in a shell that stays open, and returns what it prints.",
    describe_object({**_COMMAND, "restart": _RESTART}, []),
    {
        "anyOf": [
            describe_object(_COMMAND, ["command"]),
            describe_object({"restart": {"type": "boolean", "enum": [True]}}, ["restart"]),
        ]
    },
)
