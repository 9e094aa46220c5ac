"""Rows of the families that write arguments in Gemma's own notation."""

from __future__ import annotations

from tgi_trio.router.text.tools.arguments_gemma import GemmaArguments
from tgi_trio.router.text.tools.format import Format

GEMMA_4 = Format(
    name="gemma-4",
    families="Gemma 4",
    signs=("<|tool_call>", '<|"|>'),
    trigger="<|tool_call>",
    opening="call:",
    middle="",
    next="<tool_call|><|tool_call>call:",
    closing="<tool_call|>",
    arguments=GemmaArguments('<|"|>'),
)
FUNCTION_GEMMA = Format(
    name="functiongemma",
    families="functiongemma",
    signs=("<start_function_call>",),
    trigger="<start_function_call>",
    opening="call:",
    middle="",
    next="<end_function_call><start_function_call>call:",
    closing="<end_function_call>",
    arguments=GemmaArguments("<escape>"),
)
