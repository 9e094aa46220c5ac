"""Rows of the families that write arguments as a JSON object."""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

from tgi_trio.router.text.tools.format import Format
from tgi_trio.router.text.tools.matching import ID, INDEX

DEEPSEEK_V3 = Format(
    name="deepseek-v3",
    families="DeepSeek V3, R1",
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    trigger="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    next="\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    closing="\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
DEEPSEEK_V31 = Format(
    name="deepseek-v3.1",
    families="DeepSeek V3.1",
    signs=("<｜tool▁calls▁begin｜>",),
    trigger="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    next="<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
KIMI_K2 = Format(
    name="kimi-k2",
    families="Kimi K2, K2-Thinking, K2.5",
    signs=("<|tool_calls_section_begin|>",),
    trigger="<|tool_calls_section_begin|>",
    opening="<|tool_call_begin|>functions.",
    middle=f":{INDEX}<|tool_call_argument_begin|>",
    next="<|tool_call_end|><|tool_call_begin|>functions.",
    closing="<|tool_call_end|><|tool_calls_section_end|>",
    ids="counted",
)
MISTRAL_ID = Format(
    name="mistral-id",
    families="Mistral Small 3.2",
    signs=("[TOOL_CALLS]", "[CALL_ID]"),
    trigger="[TOOL_CALLS]",
    opening="",
    middle=f"[CALL_ID]{ID}[ARGS]",
    short_middle="[ARGS]",
    next="[TOOL_CALLS]",
    closing="",
    ids="nine",
)
MISTRAL_ARGS = Format(
    name="mistral-args",
    families="Devstral, Magistral, Ministral 3",
    signs=("[TOOL_CALLS]", "[ARGS]"),
    trigger="[TOOL_CALLS]",
    opening="",
    middle="[ARGS]",
    next="[TOOL_CALLS]",
    closing="",
    ids="nine",
)
MISTRAL = Format(
    name="mistral",
    families="Mistral 7B 0.3, Nemo, Large 2",
    signs=("[TOOL_CALLS]",),
    trigger="[TOOL_CALLS]",
    opening='[{"name": "',
    middle='", "arguments": ',
    next='}, {"name": "',
    closing="}]",
    ids="nine",
)
GRANITE = Format(
    name="granite",
    families="Granite 3",
    signs=("<|tool_call|>",),
    trigger="<|tool_call|>",
    opening='[{"name": "',
    middle='", "arguments": ',
    next='}, {"name": "',
    closing="}]",
)
COHERE = Format(
    name="cohere",
    families="Command R7B, Command A",
    signs=("<|START_ACTION|>",),
    trigger="<|START_ACTION|>",
    opening=f'[\n    {{"tool_call_id": "{INDEX}", "tool_name": "',
    middle='", "parameters": ',
    next=f'}},\n    {{"tool_call_id": "{INDEX}", "tool_name": "',
    closing="}\n]<|END_ACTION|>",
)
APERTUS = Format(
    name="apertus",
    families="Apertus",
    signs=("<|tools_prefix|>",),
    trigger="<|tools_prefix|>",
    opening='[{"',
    middle='": ',
    next='}, {"',
    closing="}]<|tools_suffix|>",
)
NEMOTRON = Format(
    name="nemotron-json",
    families="Nemotron Nano v2, Llama-Nemotron",
    signs=("<TOOLCALL>",),
    trigger="<TOOLCALL>",
    opening='[{"name": "',
    middle='", "arguments": ',
    next='}, {"name": "',
    closing="}]</TOOLCALL>",
)
HUNYUAN = Format(
    name="hunyuan",
    families="Hunyuan A13B, Apriel 1.5 and 1.6",
    signs=("<tool_calls>",),
    trigger="<tool_calls>",
    opening='[{"name": "',
    middle='", "arguments": ',
    next='}, {"name": "',
    closing="}]</tool_calls>",
)
PHI_4_MINI = Format(
    name="phi-4-mini",
    families="Phi-4-mini",
    signs=("<|tool|>",),
    token="<|tool|>",  # for templates of other programs, which only mention `functools`
    trigger="functools[",  # the word alone occurs in prose
    opening='{"name": "',
    middle='", "arguments": ',
    next='}, {"name": "',
    closing="}]",
)
GIGACHAT = Format(
    name="gigachat",
    families="GigaChat 3",
    signs=("<|function_call|>",),
    trigger="<|function_call|>",
    opening='{"name": "',
    middle='", "arguments": ',
    next="",
    closing="}",
)
_ERNIE = Format(
    name="hermes-lines",
    families="Ernie 4.5",
    signs=("<tool_call>",),
    trigger="<tool_call>",
    opening='\n{"name": "',
    middle='", "arguments": ',
    next='}\n</tool_call>\n\n<tool_call>\n{"name": "',
    closing="}\n</tool_call>",
)
_EXAONE = Format(
    name="hermes-compact",
    families="EXAONE 4",
    signs=("<tool_call>",),
    trigger="<tool_call>",
    opening='{"name": "',
    middle='", "arguments": ',
    next='}</tool_call>\n<tool_call>{"name": "',
    closing="}</tool_call>",
)
HERMES = Format(
    name="hermes",
    families="Hermes 2 and 3, Qwen2.5, Qwen3, Qwen3-VL, Granite 4, SmolLM3, EXAONE 4, Ernie 4.5",
    signs=("<tool_call>",),
    trigger="<tool_call>",
    opening='\n{"name": "',
    middle='", "arguments": ',
    next='}\n</tool_call>\n<tool_call>\n{"name": "',
    closing="}\n</tool_call>",
    variants=(_ERNIE, _EXAONE),
)
LLAMA_4_JSON = Format(
    # As Llama 3's, after the content between `<|python_start|>` and `<|python_end|>`.
    name="llama-4-json",
    families="Llama 4",
    signs=('"parameters": ', "<|python_start|>"),
    trigger='{"name": "',
    opening="",
    middle='", "parameters": ',
    next='}{"name": "',
    closing="}",
    anchored=True,
)
LLAMA_3 = Format(
    # There is no mark but the JSON itself, and their templates refuse a turn of several calls.
    name="llama-3",
    families="Llama 3.1, 3.2, 3.3",
    signs=('"parameters": ', "<|start_header_id|>"),
    trigger='{"name": "',
    opening="",
    middle='", "parameters": ',
    next="",
    closing="}",
    anchored=True,
)
