"""Styles of `json_schema` in structural tags: arguments as families of models write them.

The names are xgrammar's. What is written is what the calls of tools in that form have
(`tools/formats_xml.py`, `formats_gemma.py`), but that parameters and values may stand on lines of
their own, since where lines break is a matter of the tag's texts here.
"""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from tgi_trio.errors import ToolError, ValidationError
from tgi_trio.router.text.tag_terms import Ends
from tgi_trio.router.text.tools.arguments_gemma import GemmaArguments
from tgi_trio.router.text.tools.arguments_xml import XmlArguments
from tgi_trio.router.text.tools.format import Arguments
from tgi_trio.router.text.tools.formats_xml import DSML_V4, GLM, KIMI_K3, MINIMAX_M2, QWEN_XML
from tgi_trio.router.text.tools.functions import Function, find_unenforced

JSON_STYLE: Final = "json"


def _on_lines(arguments: Arguments) -> XmlArguments:
    if not isinstance(arguments, XmlArguments):
        raise TypeError(f"{arguments} are no parameters between tags")
    middle, suffix = arguments.middle.rstrip("\n"), arguments.suffix.strip("\n")
    return replace(arguments, middle=middle, suffix=suffix, breaks=True)


def _styles() -> Mapping[str, Arguments]:
    dsml = _on_lines(DSML_V4.arguments)
    spaced = replace(
        dsml,
        prefix=dsml.prefix.replace("｜parameter", "｜ parameter"),
        suffix=dsml.suffix.replace("｜parameter", "｜ parameter"),
    )
    return MappingProxyType(
        {
            "qwen_xml": _on_lines(QWEN_XML.arguments),
            "minimax_xml": _on_lines(MINIMAX_M2.arguments),
            "deepseek_xml": dsml,
            "deepseek_v4_1_xml": spaced,
            "glm_xml": _on_lines(GLM.arguments),
            "kimi_k3_xml": _on_lines(KIMI_K3.arguments),
            "gemma": GemmaArguments('<|"|>', sorts=False),
        }
    )


STYLES: Final = _styles()


def write_style(style: Any, schema: Any, path: str, added: Mapping[str, int]) -> dict[str, str]:
    """Return Lark rules (name -> right side) for arguments in a style; `start` is the top one.

    `path`: the place of `style`; `added`: text -> id of the tokenizer's added tokens. Raises
    ValidationError.
    """
    if style not in STYLES:
        known = ", ".join(f"`{each}`" for each in (JSON_STYLE, *STYLES))
        raise ValidationError(f"`{path}` must be one of {known}. Given: `{str(style)[:60]}`")
    try:
        function = Function.of("arguments", {} if schema is True else schema, "json_schema")
    except ToolError as error:
        raise ValidationError(f"`{path}` is `{style}`: {error}") from error
    if (keyword := next(find_unenforced(schema), None)) is not None:  # as of JSON
        raise ValidationError(
            f"`{path}` is `{style}`: a schema cannot have `{keyword}`, which no grammar holds to"
        )
    rules = STYLES[style].rules("arguments", function, added)
    return {"start": "arguments", **rules}


def allow_breaks(style: str, ends: Ends) -> Ends:
    """Return what arguments in a style may end with: a line may end before it."""
    if not isinstance(STYLES[style], XmlArguments):
        return ends
    return (*ends, *(f"\n{end}" for end in ends if end and not end.startswith("\n")))
