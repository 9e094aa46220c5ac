"""The tools of /v1/responses: what the model is shown, and how its calls are given back.

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

from tgi_trio.errors import ToolError, ValidationError
from tgi_trio.router.http.messages.schema import invalid_value
from tgi_trio.router.text import grammars
from tgi_trio.router.text.lark_regex import lark_regex
from tgi_trio.router.text.tools.functions import Function

INPUT: Final = "input"  # the one argument of a custom tool
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
    """How a call is given back."""

    FUNCTION = "function"
    CUSTOM = "custom"
    SHELL = "local_shell"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called."""

    way: Way
    name: str  # as the client knows it
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, by the names that the model knows them by."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    listed: Sequence[Mapping[str, Any]] = ()  # as templates show them
    functions: Sequence[Function] = ()
    loose: Collection[str] = ()  # those that are not strict

    @classmethod
    def of(cls, given: Sequence[Mapping[str, Any]], most: int) -> Toolbox:
        """Return the tools that can be served; `most` bytes of a grammar of one.

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
            if shown.get("strict") is not True:
                loose.add(name)
            parameters = shown.get("parameters") or {"type": "object", "properties": {}}
            made = Function.of(name, parameters)
            if tool.way is Way.CUSTOM and (pattern := _pattern(shown, most)) is not None:
                made = replace(made, schema=_text_schema(pattern=pattern), part="format")
                loose.discard(name)
            functions.append(made)
            function: dict[str, Any] = {"name": name}
            if shown.get("description") is not None:
                function["description"] = shown["description"]
            function["parameters"] = parameters
            listed.append({"type": "function", "function": function})
        return cls(tools, listed, functions, loose)

    def only(self, names: Sequence[str]) -> Toolbox:
        """Return the tools of these names; raises ToolError for one that is not there."""
        for name in names:
            if name not in self.tools:
                raise ToolError(f"Tool with name {name} not found")
        kept = [i for i, each in enumerate(self.functions) if each.name in names]
        return Toolbox(
            {name: self.tools[name] for name in names},
            [self.listed[i] for i in kept],
            [self.functions[i] for i in kept],
            self.loose,
        )

    def find(self, name: str) -> Tool:
        """Return the tool that the model called."""
        return self.tools.get(name) or Tool(Way.FUNCTION, name)


def model_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function of a namespace."""
    return f"{namespace}.{name}" if namespace else name


def _served(given: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Tool, Mapping[str, Any]]]:
    """Yield each tool that can be called, with what it says of itself."""
    for i, tool in enumerate(given):
        match tool.get("type"):
            case "function":
                yield Tool(Way.FUNCTION, _name(tool, f"tools[{i}]")), tool
            case "custom":
                name = _name(tool, f"tools[{i}]")
                yield Tool(Way.CUSTOM, name), {**tool, "parameters": _shown_text(tool)}
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


# ---- custom tools ------------------------------------------------------------------------------


def _text_schema(**more: Any) -> dict[str, Any]:
    """Return the schema of one text."""
    properties = {INPUT: {"type": "string", **more}}
    return {"type": "object", "properties": properties, "required": [INPUT]}


def _shown_text(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a custom tool as the model is shown them: with its grammar."""
    form = tool.get("format")
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return _text_schema()
    return _text_schema(description=f"{form.get('syntax')} grammar:\n{form.get('definition')}")


def _pattern(tool: Mapping[str, Any], most: int) -> str | None:
    """Return the expression that a custom tool's text must match; None: any text will do.

    Raises ToolError.
    """
    form, where = tool.get("format"), f"the `format` of `{tool['name']}`"
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        raise ToolError(f"{where}: its `type` is neither `text` nor `grammar`")
    if form["type"] == "text":
        return None
    definition = form.get("definition")
    if not isinstance(definition, str):
        raise ToolError(f"{where}: a grammar needs `definition`, a text")
    try:
        grammars.check_size(definition, most)
        match form.get("syntax"):
            case "regex":
                return f"^(?:{definition})$"
            case "lark":
                return f"^(?:{lark_regex(definition, most)})$"
    except ValidationError as error:
        raise ToolError(f"{where}: {error}") from error
    raise ToolError(f"{where}: its `syntax` is neither `lark` nor `regex`")


def _name(tool: Mapping[str, Any], path: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise invalid_value(path, "missing field `name`")
    return name
