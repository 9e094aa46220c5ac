"""The tools of /v1/responses: what the model sees, and the form in which calls are returned.

| `type` | to the model | its calls come back as |
|---|---|---|
| `function` | a function | `function_call` |
| `namespace` | its functions, each as `namespace.name` | `function_call` with `namespace` |
| `custom` | a function of one text, `input`, of the form that it may have | `custom_tool_call` |
| `local_shell` | a function of a command | `local_shell_call` |
| any other | nothing: OpenAI's servers would run it | |
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tgi_trio.errors import ToolError
from tgi_trio.router.http.messages.body_reader import invalid_value
from tgi_trio.router.text.tools.custom import custom_function, shown_parameters
from tgi_trio.router.text.tools.functions import NO_PARAMETERS, Function, select_functions

SHELL: Final = "local_shell"
_SHELL: Final = {
    "type": "function",
    "name": SHELL,
    "description": "Runs a command and returns what it prints.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}


class Way(enum.Enum):
    """The form in which a call is returned."""

    FUNCTION = "function"
    CUSTOM = "custom"
    SHELL = "local_shell"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called."""

    way: Way
    name: str  # the client's name for it
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, by the model's names for them."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    listed: Sequence[Mapping[str, Any]] = ()  # as templates render them
    functions: Sequence[Function] = ()
    loose: Collection[str] = ()  # names of tools that are not strict

    @classmethod
    def of(cls, given: Sequence[Mapping[str, Any]], most: int) -> Toolbox:
        """Return the tools that can be served; `most`: bytes of a tool's grammar.

        Raises ToolError and BodyRejected.
        """
        tools: dict[str, Tool] = {}
        listed: list[Mapping[str, Any]] = []
        functions: list[Function] = []
        loose: set[str] = set()
        for tool, shown in _served(given):
            name = model_name(tool.namespace, tool.name)
            if name in tools:
                raise ToolError(f"two tools have the name `{name}`")
            tools[name] = tool
            parameters = shown.get("parameters") or NO_PARAMETERS
            if tool.way is Way.CUSTOM:
                functions.append(custom_function(name, shown.get("format"), most))
            else:
                functions.append(Function.of(name, parameters))
                if shown.get("strict") is not True:
                    loose.add(name)
            function: dict[str, Any] = {"name": name}
            if shown.get("description") is not None:
                function["description"] = shown["description"]
            function["parameters"] = parameters
            listed.append({"type": "function", "function": function})
        return cls(tools, listed, functions, loose)

    def select(self, names: Sequence[str]) -> Toolbox:
        """Return the tools of these names. Raises ToolError for an unknown name."""
        kept = select_functions(self.functions, names)
        return replace(self, tools={name: self.tools[name] for name in names}, functions=kept)

    def find(self, name: str) -> Tool:
        """Return the tool that the model called."""
        return self.tools.get(name) or Tool(Way.FUNCTION, name)


def model_name(namespace: str | None, name: str) -> str:
    """Return the model's name for a function of a namespace."""
    return f"{namespace}.{name}" if namespace else name


def _served(given: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Tool, Mapping[str, Any]]]:
    """Yield each tool that can be called, with its definition."""
    for i, tool in enumerate(given):
        match tool.get("type"):
            case "function":
                yield Tool(Way.FUNCTION, _name(tool, f"tools[{i}]")), tool
            case "custom":
                name = _name(tool, f"tools[{i}]")
                shown = {**tool, "parameters": shown_parameters(tool.get("format"))}
                yield Tool(Way.CUSTOM, name), shown
            case "local_shell":
                yield Tool(Way.SHELL, SHELL), _SHELL
            case "namespace":
                space = _name(tool, f"tools[{i}]")
                inner = tool.get("tools")
                for j, each in enumerate(inner if isinstance(inner, list) else []):
                    if isinstance(each, dict) and each.get("type") == "function":
                        name = _name(each, f"tools[{i}].tools[{j}]")
                        yield Tool(Way.FUNCTION, name, space), each
            case str():
                continue
            case _:
                raise invalid_value(f"tools[{i}]", "missing field `type`")


def _name(tool: Mapping[str, Any], path: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise invalid_value(path, "missing field `name`")
    return name
