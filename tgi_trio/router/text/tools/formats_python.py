"""Rows of the families that write calls in Python's syntax."""

from __future__ import annotations

from tgi_trio.router.text.tools.arguments_python import PythonArguments
from tgi_trio.router.text.tools.format import Format

LFM2 = Format(
    name="lfm2",
    families="LFM2, LFM2.5",
    signs=("<|tool_call_start|>",),
    token="<|tool_call_start|>",
    trigger="<|tool_call_start|>",
    opening="[",
    middle="(",
    next="), ",
    closing=")]<|tool_call_end|>",
    arguments=PythonArguments(quote="'"),
)
LLAMA_4 = Format(
    name="llama-4",
    families="Llama 4, asked for Python",
    signs=("<|python_start|>",),
    trigger="<|python_start|>",
    opening="[",
    middle="(",
    next="), ",
    closing=")]<|python_end|>",
    arguments=PythonArguments(),
)
_OLMO_3_LINES = Format(
    name="olmo-3-lines",
    families="Olmo 3 (vLLM's template)",
    signs=("<function_calls>",),
    trigger="<function_calls>",
    opening="\n",
    middle="(",
    next=")\n",
    closing=")\n</function_calls>",
    arguments=PythonArguments(quote="'", json_words=True),
)
OLMO_3 = Format(
    name="olmo-3",
    families="Olmo 3",
    signs=("<function_calls>",),
    trigger="<function_calls>",
    opening="",
    middle="(",
    next=")\n",
    closing=")</function_calls>",
    arguments=PythonArguments(),
    variants=(_OLMO_3_LINES,),
)
