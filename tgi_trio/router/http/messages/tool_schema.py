"""Tools in the bodies of chats: those that a model may call, must call, and has called.

What is in no `enum` is refused where it is read, by a sentence that says what is served.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tgi_trio.router.http.messages.component_refs import any_of


class FunctionDefinition(Struct):
    """A function a model may call, or called; TGI takes `arguments` for `parameters` and back."""

    name: str
    description: str | None = None
    parameters: Any = None
    arguments: Any = None


class Tool(Struct):
    """A tool a model may call."""

    type: str
    function: FunctionDefinition


class CustomGrammar(Struct):
    """A grammar of a text."""

    definition: str
    syntax: Annotated[str, Meta(extra_json_schema={"enum": ["lark", "regex"]})]


class CustomFormat(Struct):
    """The form of a custom tool's text."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "grammar"]})]
    grammar: CustomGrammar | None = None


class CustomDefinition(Struct):
    """A custom tool: it takes one text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class CustomTool(Struct):
    """A custom tool a model may call."""

    custom: CustomDefinition
    type: Literal["custom"]


# Read as they are, since templates show every field in the order in which it was sent; what we need
# of them is converted to `Tool` or, of type `custom`, to `CustomTool`.
Tools = list[Annotated[dict[str, Any], any_of("Tool", "CustomTool")]]


class CustomInput(Struct):
    """A custom tool that was called, and its text."""

    name: str
    input: str


class ToolCall(Struct):
    """A call the model made in an earlier turn: of a function or of a custom tool."""

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
    """Those of the tools that may be called, and whether one of them must be."""

    mode: Annotated[str, Meta(extra_json_schema={"enum": list(MODES)})]
    tools: list[Annotated[dict[str, Any], any_of("NamedToolChoice", "NamedCustomToolChoice")]]


class AllowedToolsChoice(Struct):
    """Which of the tools may be called."""

    allowed_tools: AllowedTools
    type: Literal["allowed_tools"]


# Converted to what `type` says.
ToolChoice = Annotated[
    dict[str, Any], any_of("NamedToolChoice", "NamedCustomToolChoice", "AllowedToolsChoice")
]

# What bodies name, but are not decoded to.
NAMED = (Tool, CustomTool, NamedToolChoice, NamedCustomToolChoice, AllowedToolsChoice)
