"""Checks the tools of a request, and selects those that may be called."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ToolError, name_param

MOST_CALLS = 16  # in one answer, so that a model that repeats itself ends
NO_PARAMETERS: Final = {"type": "object", "properties": {}}  # as templates are shown them
_LONGEST = 128  # characters of a name
_LISTED = 20  # most names in an error
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{_LONGEST}}}")
# Keywords that constrain nothing. The prompt shows them; the grammar is smaller without them.
_ANNOTATIONS = frozenset(
    {"$comment", "$schema", "default", "deprecated", "description", "examples", "title"}
)
# Keywords that our grammars cannot enforce. Tools of agents use some of them and have to be served,
# so arguments may violate these keywords, and no others.
_BEYOND = frozenset(
    {
        *("contains", "maxContains", "minContains", "uniqueItems", "unevaluatedItems"),
        *("dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("if", "then", "else", "not", "unevaluatedProperties"),
    }
)
_NAMED = frozenset({"$defs", "definitions", "patternProperties", "properties"})  # name -> schema
_DATA = frozenset({"const", "enum"})


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a model may call."""

    name: str
    schema: dict[str, Any]  # of its arguments, an object; only keywords that a grammar enforces
    part: str = "parameters"  # the field of the tool that had the schema

    @classmethod
    def of(cls, name: str, parameters: Any, part: str = "parameters") -> Function:
        """Return a checked function; `parameters`: a JSON schema, None for no arguments.

        `part`: the API's name of that field. Raises ToolError.
        """
        if not _NAME.fullmatch(name):
            raise ToolError(
                f"`{name[:140]}` is no name for a function: 1 to 128 letters, digits, `_`, `-`, "
                "`.`, `:` and `/` are"
            )
        if parameters is None:
            parameters = {"properties": {}}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise ToolError(f"the `{part}` of `{name}` must be a JSON schema of type `object`")
        try:
            schema = {"type": "object", **_keep_grammar(parameters)}
        except RecursionError as error:
            raise ToolError(f"the `{part}` of `{name}` nest too deeply") from error
        return cls(name, schema, part)


def _keep_grammar(schema: Any) -> Any:
    """Return a schema without annotations and keywords that no grammar can enforce."""
    if isinstance(schema, list):
        return [_keep_grammar(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    bare = {}
    for key, value in schema.items():
        if key in _DATA:
            bare[key] = value
        elif key in _NAMED and isinstance(value, dict):
            bare[key] = {name: _keep_grammar(each) for name, each in value.items()}
        elif key not in _ANNOTATIONS and key not in _BEYOND:
            bare[key] = _keep_grammar(value)
    return bare


def find_unenforced(schema: Any) -> Iterator[str]:
    """Yield the keywords of a schema that no grammar of ours can enforce."""
    if isinstance(schema, list):
        for each in schema:
            yield from find_unenforced(each)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key in _BEYOND:
                yield key
            elif key in _NAMED and isinstance(value, dict):
                yield from find_unenforced(list(value.values()))
            elif key not in _DATA and key not in _ANNOTATIONS:
                yield from find_unenforced(value)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What one request allows: which functions, whether one must be called, and how many calls."""

    functions: tuple[Function, ...]  # none: tools are only shown
    required: bool
    most: int  # calls in one answer


def select_functions(functions: Sequence[Function], names: Collection[str]) -> list[Function]:
    """Return the functions of these names. Raises ToolError for an unknown name."""
    wanted, known = set(names), {function.name for function in functions}
    for name in names:
        if name not in known:
            raise _unknown(name, functions)
    return [function for function in functions if function.name in wanted]


def tool_use(
    functions: Sequence[Function], choice: str | None, *, named: bool, parallel: bool
) -> ToolUse | None:
    """Return what `tool_choice` allows of a request's functions; None: nothing is to be called.

    `choice`: `auto` or None, `required`, or the name of the function that must be called; with
    `named` it can only be a name. Raises ToolError.
    """
    seen: set[str] = set()  # a set, since a body may have tens of thousands
    for function in functions:
        if function.name in seen:
            raise ToolError(f"two tools have the name `{function.name}`")
        seen.add(function.name)
    if not named and choice in (None, "auto", "required"):
        if not functions:
            return None
        return ToolUse(tuple(functions), choice == "required", MOST_CALLS if parallel else 1)
    chosen = tuple(function for function in functions if function.name == choice)
    if not chosen:
        raise _unknown(str(choice), functions)
    return ToolUse(chosen, required=True, most=1)


def _unknown(name: str, functions: Sequence[Function]) -> ToolError:
    """Return the error for a function that is not among those of the request."""
    shown = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
    if not functions:
        text = f"Tool with name {shown} not found: `tools` is empty"
        return name_param(ToolError(text), "tool_choice")
    known = [f"`{function.name}`" for function in functions[:_LISTED]]
    more = len(functions) - len(known)
    among = ", ".join(known) + (f" and {more} more" if more else "")
    return name_param(ToolError(f"Tool with name {shown} not found among {among}"), "tool_choice")
