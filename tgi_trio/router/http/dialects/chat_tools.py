"""The tools of a chat request, and which of them the answer may call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ToolError
from tgi_trio.router.http.messages import tool_schema
from tgi_trio.router.http.messages.body_reader import convert_body, invalid_value
from tgi_trio.router.text.tools.custom import INPUT, custom_function, shown_parameters
from tgi_trio.router.text.tools.functions import NO_PARAMETERS, Function, select_functions
from tgi_trio.router.text.turns import PastCall, read_arguments

_SHOWN: Final = 60  # most characters of an unknown type in its error


@dataclass(frozen=True, slots=True)
class Choice:
    """The value of `tool_choice`."""

    tool: str | None = None  # auto (or None), required, none, or a name
    named: bool = False  # `tool` can only be a name
    allowed: Collection[str] | None = None  # names that may be called; None: all

    @property
    def none(self) -> bool:
        """Whether nothing may be called."""
        return self.tool == "none" and not self.named

    @classmethod
    def of(cls, given: str | Mapping[str, Any] | None) -> Choice:
        """Return the choice that a body gives. Raises BodyRejected."""
        if given is None or isinstance(given, str):
            return cls(given)
        if given.get("type") != "allowed_tools":
            served = "`function`, `custom` and `allowed_tools`"
            return cls(_tool_name(given, "tool_choice", served), named=True)
        found = convert_body(given, tool_schema.AllowedToolsChoice, "tool_choice")
        where, mode = "tool_choice.allowed_tools", found.allowed_tools.mode
        if mode not in tool_schema.MODES:
            modes = ", ".join(f"`{each}`" for each in tool_schema.MODES)
            raise invalid_value(f"{where}.mode", f"`{mode[:_SHOWN]}` is none of {modes}")
        names = [
            _tool_name(each, f"{where}.tools[{i}]", "`function` and `custom`")
            for i, each in enumerate(found.allowed_tools.tools)
        ]
        return cls(mode, allowed=names)

    def narrow(self, functions: Sequence[Function]) -> Sequence[Function]:
        """Return the functions that may be called. Raises ToolError."""
        found = functions if self.allowed is None else select_functions(functions, self.allowed)
        if self.tool == "required" and not self.named and not found:
            raise ToolError("`tool_choice` is `required`, and there are no tools")
        return found


@dataclass(frozen=True, slots=True)
class GivenTools:
    """The tools of one chat, in order."""

    functions: Sequence[Function]
    listed: Sequence[Mapping[str, Any]]  # as templates render them
    custom: Collection[str]  # names of tools whose input is one text

    @classmethod
    def of(cls, given: Sequence[Mapping[str, Any]], most: int) -> GivenTools:
        """Return a body's tools; `most`: bytes of a tool's grammar.

        Raises BodyRejected and ToolError.
        """
        functions: list[Function] = []
        listed: list[Mapping[str, Any]] = []
        custom: set[str] = set()
        for i, tool in enumerate(given):
            if _kind(tool, f"tools[{i}]") == "custom":
                function, shown = _custom_tool(tool, f"tools[{i}]", most)
                custom.add(function.name)
            else:
                function, shown = _function(tool, f"tools[{i}]"), _to_listed_tool(tool)
            functions.append(function)
            listed.append(shown)
        return cls(functions, listed, custom)


def to_past_call(each: tool_schema.ToolCall, path: str) -> PastCall:
    """Return a call of an earlier turn, with its arguments decoded. Raises BodyRejected."""
    if each.type == "custom" and each.custom is not None:
        return PastCall(each.custom.name, {INPUT: each.custom.input}, each.id)
    function = each.function
    if function is None:
        needed = "custom" if each.type == "custom" else "function"
        raise invalid_value(path, f"missing field `{needed}`")
    arguments = function.arguments
    if arguments is None:
        arguments = function.parameters if function.parameters is not None else {}
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    return PastCall(function.name, arguments, each.id, each.type)


def _kind(given: Mapping[str, Any], path: str, served: str = "`function` and `custom`") -> str:
    """Return `custom` or `function`; other types may stand for the latter. Raises BodyRejected."""
    kind = given.get("type", "function")
    if kind == "custom":
        return "custom"
    if isinstance(kind, str) and kind != "function" and "function" not in given:
        what = f"`{kind[:_SHOWN]}` is not served, only {served}: tools run at the client"
        raise invalid_value(f"{path}.type", what)
    return "function"


def _tool_name(given: Mapping[str, Any], path: str, served: str) -> str:
    if _kind(given, path, served) == "custom":
        return convert_body(given, tool_schema.NamedCustomToolChoice, path).custom.name
    return convert_body(given, tool_schema.NamedToolChoice, path).function.name


def _function(tool: Mapping[str, Any], path: str) -> Function:
    found = convert_body(tool, tool_schema.Tool, path).function
    return Function.of(
        found.name, found.arguments if found.parameters is None else found.parameters
    )


def _to_listed_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool as sent, but with `parameters` under that name, not TGI's other one.

    A tool that has none gets those of a function without arguments: many templates fail otherwise.
    """
    function = tool["function"]
    if function.get("parameters") is not None:
        return tool
    if function.get("arguments") is None:
        shown = {k: v for k, v in function.items() if k != "arguments"}
        return {**tool, "function": {**shown, "parameters": NO_PARAMETERS}}
    shown = {k: v for k, v in function.items() if k != "parameters"}
    renamed = {"parameters" if k == "arguments" else k: v for k, v in shown.items()}
    return {**tool, "function": renamed}


def _custom_tool(
    tool: Mapping[str, Any], path: str, most: int
) -> tuple[Function, Mapping[str, Any]]:
    """Return a custom tool as a function, and as templates render it."""
    found = convert_body(tool, tool_schema.CustomTool, path).custom
    form: dict[str, Any] | None = None
    if found.format is not None:
        form = {"type": found.format.type}
        if form["type"] == "grammar":
            if found.format.grammar is None:
                raise invalid_value(f"{path}.custom.format", "missing field `grammar`")
            grammar = found.format.grammar
            form |= {"syntax": grammar.syntax, "definition": grammar.definition}
    shown: dict[str, Any] = {"name": found.name}
    if found.description is not None:
        shown["description"] = found.description
    shown["parameters"] = shown_parameters(form)
    return custom_function(found.name, form, most), {"type": "function", "function": shown}
