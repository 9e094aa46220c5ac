"""Tools that OpenAI defines and clients run: two shells, and patches of files.

A request names them by their type alone, so what their arguments are is written down here. A model
is shown a function of the tool's name; its calls and their results are items of their own.

| type | its calls | arguments |
|---|---|---|
| `local_shell` | `local_shell_call` | a command, its directory and time |
| `shell` | `shell_call` | commands, their time, and how much of what they print is wanted |
| `apply_patch` | `apply_patch_call` | a file to be created, updated or deleted |

A `shell` of a container is run by OpenAI, and is none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from tgi_trio.router.http.dialects.command_schemas import (
    TEXT,
    ToolSchemas,
    describe_commands,
    describe_object,
)
from tgi_trio.router.http.dialects.responses import replies, schema

_NUMBER: Final = {"type": "integer"}
_TEXTS: Final = {"type": "array", "items": dict(TEXT)}
# By the operations of a patch, which of the parameters each has beside `type`.
_OPERATIONS: Final = MappingProxyType(
    {"create_file": ("path", "diff"), "update_file": ("path", "diff"), "delete_file": ("path",)}
)
_PATCH: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "path": {**TEXT, "description": "Of the file"},
        "diff": {
            **TEXT,
            "description": (
                "Of a new file its lines, each behind `+`. Of an update parts behind `@@`, in "
                "which each line is behind ` ` if it stays, `-` if it goes, and `+` if it is new"
            ),
        },
    }
)


@dataclass(frozen=True, slots=True)
class ClientTool:
    """One of these tools."""

    name: str  # its type, and the model's name for it
    description: str
    schemas: ToolSchemas
    field: str  # of its calls, that has the arguments
    write: Callable[[str, replies.ItemStatus, str, Mapping[str, Any]], replies.ClientCallItem]

    @property
    def call(self) -> str:
        """The type of its calls."""
        return f"{self.name}_call"

    @property
    def definition(self) -> Mapping[str, Any]:
        """The tool as a function of a request."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.schemas.shown,
        }

    def read_call(self, item: schema.InputItem) -> dict[str, Any]:
        """Return the arguments of an earlier call, as the model wrote them."""
        found = getattr(item, self.field)
        given = found if isinstance(found, Mapping) else {}
        names = self.schemas.shown["properties"]
        return {name: given[name] for name in names if given.get(name) is not None}


def find_client_tool(tool: Mapping[str, Any]) -> ClientTool | None:
    """Return which of these tools a request defines; None: another, or one that OpenAI runs."""
    found = CLIENT_TOOLS.get(str(tool.get("type")))
    place = tool.get("environment")
    if found is _SHELL and isinstance(place, Mapping) and place.get("type") != "local":
        return None
    return found


def read_shell_output(output: Sequence[Any]) -> str | None:
    """Return what commands of `shell` have printed, and how each ended; None: it is no such."""
    said: list[str] = []
    for each in output:
        if not isinstance(each, Mapping) or not isinstance(outcome := each.get("outcome"), Mapping):
            return None
        said += [text for name in ("stdout", "stderr") if (text := each.get(name))]
        late = outcome.get("type") == "timeout"
        said.append("[timeout]" if late else f"[exit code {outcome.get('exit_code')}]")
    return "\n".join(map(str, said))


def _write_local_shell(
    id: str, status: replies.ItemStatus, call_id: str, given: Mapping[str, Any]
) -> replies.LocalShellCallItem:
    action = replies.ShellAction([])  # in progress, or cut off
    with suppress(msgspec.ValidationError):
        action = msgspec.convert({**given, "type": "exec"}, replies.ShellAction)
    return replies.LocalShellCallItem(id, status, call_id, action)


def _write_shell(
    id: str, status: replies.ItemStatus, call_id: str, given: Mapping[str, Any]
) -> replies.ShellCallItem:
    action = replies.ShellCommands([])
    with suppress(msgspec.ValidationError):
        action = msgspec.convert(given, replies.ShellCommands)
    return replies.ShellCallItem(id, status, call_id, action)


def _write_patch(
    id: str, status: replies.ItemStatus, call_id: str, given: Mapping[str, Any]
) -> replies.ApplyPatchCallItem:
    operation: replies.PatchOperation = replies.UpdateFile("", "")
    with suppress(msgspec.ValidationError):
        operation = msgspec.convert(given, replies.PatchOperation)
    # Of OpenAI's types a patch that is cut off is in progress.
    known: replies.PatchStatus = "completed" if status == "completed" else "in_progress"
    return replies.ApplyPatchCallItem(id, known, call_id, operation)


def _plain(properties: Mapping[str, Any], required: str) -> ToolSchemas:
    found = describe_object(properties, [required])
    return ToolSchemas(found, found)


_SHELL: Final = ClientTool(
    name="shell",
    description="Runs commands, one after the other, and returns what they print.",
    schemas=_plain(
        {"commands": _TEXTS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER}, "commands"
    ),
    field="action",
    write=_write_shell,
)
CLIENT_TOOLS: Final[Mapping[str, ClientTool]] = MappingProxyType(
    {
        "local_shell": ClientTool(
            name="local_shell",
            description="Runs a command and returns what it prints.",
            schemas=_plain(
                {"command": _TEXTS, "working_directory": TEXT, "timeout_ms": _NUMBER}, "command"
            ),
            field="action",
            write=_write_local_shell,
        ),
        "shell": _SHELL,
        "apply_patch": ClientTool(
            name="apply_patch",
            description="Creates, updates or deletes a file.",
            schemas=describe_commands("type", _OPERATIONS, _PATCH),
            field="operation",
            write=_write_patch,
        ),
    }
)
# By the types of their calls.
CALLS: Final[Mapping[str, ClientTool]] = MappingProxyType(
    {tool.call: tool for tool in CLIENT_TOOLS.values()}
)
