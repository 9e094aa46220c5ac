"""The tools of /v1/responses: what the model sees, and the form in which calls are returned.

| `type` | to the model | its calls come back as |
|---|---|---|
| `function` | a function | `function_call` |
| `custom` | a function of one text, `input`, of the form that it may have | `custom_tool_call` |
| `namespace` | its tools of these two types, each as `namespace.name` | theirs, with `namespace` |
| those of `client_tools.py` | a function of their name | items of their own |
| any other | nothing: OpenAI's servers would run it | |
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tgi_trio.errors import ToolError
from tgi_trio.router.http.dialects.responses.client_tools import CLIENT_TOOLS, find_client_tool
from tgi_trio.router.http.messages.body_reader import invalid_value
from tgi_trio.router.text.tools.custom import custom_function, shown_parameters
from tgi_trio.router.text.tools.functions import NO_PARAMETERS, Function, select_functions


class Way(enum.Enum):
    """The form in which a call is returned."""

    FUNCTION = "function"
    CUSTOM = "custom"
    CLIENT = "client"  # as `client_tools.py` has it


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called."""

    way: Way
    name: str  # the client's name for it
    namespace: str | None = None


class ToolList(NamedTuple):
    """Tools that a request defines at one place."""

    path: str  # of the list, for errors
    tools: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, by the model's names for them."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    listed: Sequence[Mapping[str, Any]] = ()  # as templates render them
    functions: Sequence[Function] = ()
    loose: Collection[str] = ()  # names of tools that are not strict

    @classmethod
    def of(cls, lists: Sequence[ToolList], most: int) -> Toolbox:
        """Return the tools that can be served; `most`: bytes of a tool's grammar.

        A tool takes the place of one of the same name in an earlier list.

        Raises ToolError and BodyRejected.
        """
        defined: dict[str, tuple[Tool, Mapping[str, Any]]] = {}
        for given in lists:
            found: dict[str, tuple[Tool, Mapping[str, Any]]] = {}
            for tool, shown in _served(given.tools, given.path):
                name = model_name(tool.namespace, tool.name)
                if name in found:
                    raise ToolError(f"two tools have the name `{name}`")
                found[name] = tool, shown
            defined |= found
        functions: list[Function] = []
        loose: set[str] = set()
        for name, (tool, shown) in defined.items():
            if tool.way is Way.CUSTOM:
                functions.append(custom_function(name, shown.get("format"), most))
                continue
            own = CLIENT_TOOLS[name] if tool.way is Way.CLIENT else None
            held = shown.get("parameters") if own is None else own.schemas.accepted
            functions.append(Function.of(name, held or NO_PARAMETERS))
            if shown.get("strict") is not True:
                loose.add(name)
        tools = {name: tool for name, (tool, _) in defined.items()}
        listed = [_listed(name, shown) for name, (_, shown) in defined.items()]
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


def _listed(name: str, shown: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool as templates render it."""
    function: dict[str, Any] = {"name": name}
    if shown.get("description") is not None:
        function["description"] = shown["description"]
    function["parameters"] = shown.get("parameters") or NO_PARAMETERS
    return {"type": "function", "function": function}


def _served(
    given: Sequence[Mapping[str, Any]], path: str, space: str | None = None
) -> Iterator[tuple[Tool, Mapping[str, Any]]]:
    """Yield each tool that can be called, with its definition; `space`: their namespace."""
    for i, tool in enumerate(given):
        where = f"{path}[{i}]"
        match tool.get("type") if isinstance(tool, Mapping) else None:
            case "function":
                yield Tool(Way.FUNCTION, _name(tool, where), space), tool
            case "custom":
                shown = {**tool, "parameters": shown_parameters(tool.get("format"))}
                yield Tool(Way.CUSTOM, _name(tool, where), space), shown
            case str() if space is None and (own := find_client_tool(tool)) is not None:
                yield Tool(Way.CLIENT, own.name), own.definition
            case "namespace" if space is None:
                inner = tool.get("tools")
                tools = inner if isinstance(inner, list) else []
                yield from _served(tools, f"{where}.tools", _name(tool, where))
            case str():
                continue
            case _ if space is None:
                raise invalid_value(where, "missing field `type`")


def _name(tool: Mapping[str, Any], path: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise invalid_value(path, "missing field `name`")
    return name
