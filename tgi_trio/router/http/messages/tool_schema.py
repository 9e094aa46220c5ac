"""Tools in the bodies of chats: those that the model may call, must call, and has called.

Types that are in no `enum` are refused later, with a message that lists the served ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tgi_trio.router.http.messages.component_refs import any_of


class FunctionDefinition(Struct):
    """A function; as in TGI, `arguments` may stand for `parameters` and the other way round."""

    name: str
    description: str | None = None
    parameters: Any = None
    arguments: Any = None


class Tool(Struct):
    """A tool that the model may call."""

    type: str
    function: FunctionDefinition


class CustomGrammar(Struct):
    """A grammar for a text."""

    definition: str
    syntax: Annotated[str, Meta(extra_json_schema={"enum": ["lark", "regex"]})]


class CustomFormat(Struct):
    """The form of a custom tool's text."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "grammar"]})]
    grammar: CustomGrammar | None = None


class CustomDefinition(Struct):
    """A custom tool, whose input is one text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(Struct):
    """A custom tool that the model may call."""

    custom: CustomDefinition
    type: Literal["custom"]


# Kept as sent, since templates render every field in the order in which it was sent; what is needed
# of them is converted to `Tool` or, for type `custom`, to `CustomTool`.
Tools = list[Annotated[dict[str, Any], any_of("Tool", "CustomTool")]]


class CustomInput(Struct):
    """A custom tool that was called, and its text."""

    name: str
    input: str


class ToolCall(Struct):
    """A call by the model in an earlier turn, of a function or of a custom tool."""

    function: FunctionDefinition | None = None
    custom: CustomInput | None = None
    id: str | None = None
    type: str = "function"


# ---- the choice among them -----------------------------------------------------------------------


class ToolName(Struct):
    """The name of a tool."""

    name: str


class NamedToolChoice(Struct):
    """The function that must be called."""

    function: ToolName
    type: str = "function"


class NamedCustomToolChoice(Struct):
    """The custom tool that must be called."""

    custom: ToolName
    type: Literal["custom"]


MODES = ("auto", "required")


class AllowedTools(Struct):
    """The tools that may be called, and whether one of them must be."""

    mode: Annotated[str, Meta(extra_json_schema={"enum": list(MODES)})]
    tools: list[Annotated[dict[str, Any], any_of("NamedToolChoice", "NamedCustomToolChoice")]]


class AllowedToolsChoice(Struct):
    """Which of the tools may be called."""

    allowed_tools: AllowedTools
    type: Literal["allowed_tools"]


# Converted to the type that `type` names.
ToolChoice = Annotated[
    dict[str, Any], any_of("NamedToolChoice", "NamedCustomToolChoice", "AllowedToolsChoice")
]

# Types that bodies refer to, but are not decoded to.
NAMED = (Tool, CustomTool, NamedToolChoice, NamedCustomToolChoice, AllowedToolsChoice)
