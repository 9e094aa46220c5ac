"""Chat templates of real families, as fixtures, and the table of what they do.

The templates in `templates/` are our own: condensed to the marks, roles, switches and calls of the
model that they are named after, whose own template may be of another licence or a hundred times as
long. What is said of one here is what the original does as well.
"""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

from functools import cache
from typing import Any

from tests.router.text.template_family import Family
from tgi_trio.router.text.chat_template import ChatTemplate

THINK = ("<think>", "</think>")
ENABLE: Any = {
    "switch_on": {"enable_thinking": True},
    "switch_off": {"enable_thinking": False},
}
CHATML: Any = {"special": {"eos_token": "<|im_end|>"}}
DEEPSEEK: Any = {
    "special": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
    "added": (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜User｜>", "<｜Assistant｜>", *THINK),
    ),
}
QWEN = (*THINK, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_end|>")
GLM = (
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *THINK, "<tool_call>"),
    *("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

THINKS: Any = {"default": "inside", "on": "inside", "off": "closed", **ENABLE}
MAY_THINK: Any = {"default": "may-open", "on": "may-open", "off": "closed", **ENABLE}
DEEPSEEK_THINKS: Any = {
    "default": "closed",
    "on": "inside",
    "off": "closed",
    "switch_on": {"thinking": True},
    "switch_off": {"thinking": False},
}
DSML: Any = {"special": DEEPSEEK["special"], "added": ("｜DSML｜", *THINK)}
STRICT: Any = {"middle": "error", "developer": "error"}
MISTRAL: Any = {
    **STRICT,
    "users": "error",
    "ids": "mistral",
    "added": ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "[THINK]", "[/THINK]"),
    "special": {"bos_token": "<s>", "eos_token": "</s>"},
}
MISTRAL_THINKS: Any = {"marks": ("[THINK]", "[/THINK]"), "default": "may-open"}

FAMILIES = (
    Family(
        name="qwen3.5",
        format="qwen-xml",
        marks=THINK,
        default="inside",
        on="inside",
        off="closed",
        **ENABLE,
        middle="error",
        developer="error",
        added=QWEN,
        **CHATML,
    ),
    Family(
        name="gpt-oss",
        format="harmony-recipient-first",
        marks=("<|channel|>analysis<|message|>", "<|end|>"),
        default="may-open",
        on="may-open",
        off="may-open",
        switch_on={"reasoning_effort": "high"},
        switch_off={"reasoning_effort": "low"},
        middle="dropped",
        calls="first",
        added=(
            *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>"),
            "<|return|>",
        ),
        special={"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
    ),
    Family(
        name="mistral-small-3.2",
        format="mistral-id",
        middle="error",
        developer="error",
        users="error",
        ids="mistral",
        added=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]"),
        special={"bos_token": "<s>", "eos_token": "</s>"},
    ),
    Family(
        name="glm-4.6",
        format="glm-lines",
        marks=THINK,
        default="may-open",
        on="may-open",
        off="closed",
        **ENABLE,
        developer="dropped",
        added=GLM,
    ),
    Family(
        name="glm-4.7",
        format="glm",
        marks=THINK,
        default="inside",
        on="inside",
        off="closed",
        **ENABLE,
        developer="dropped",
        added=GLM,
    ),
    Family(
        name="deepseek-v3.1",
        format="deepseek-v3.1",
        marks=THINK,
        default="closed",
        on="inside",
        off="closed",
        switch_on={"thinking": True},
        switch_off={"thinking": False},
        developer="dropped",
        arguments="text",
        **DEEPSEEK,
    ),
    Family(
        name="gemma-4",
        format="gemma-4",
        marks=("<|channel>thought\n", "<channel|>"),
        default="closed",
        on="may-open",
        off="closed",
        **ENABLE,
        added=(
            *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
            *('<|"|>', "<|think|>", "<|tool_response>", "<tool_response|>", "<|tool>", "<tool|>"),
        ),
        special={"bos_token": "<bos>", "eos_token": "<turn|>"},
    ),
    Family(
        name="kimi-k2",
        format="kimi-k2",
        ids="kimi",
        added=(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|im_middle|>", "<|im_end|>"),
        ),
        special={"eos_token": "<|im_end|>"},
    ),
    Family(name="qwen3-coder", format="qwen-xml", added=QWEN, **CHATML),
    Family(
        name="llama-3.1",
        format="llama-3",
        calls="error",
        special={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        added=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    ),
    Family(name="qwen2.5", format="hermes", developer="dropped", added=QWEN[2:], **CHATML),
    Family(
        name="deepseek-r1",
        format="deepseek-v3",
        marks=THINK,
        default="inside",
        developer="dropped",
        arguments="text",
        **DEEPSEEK,
    ),
    Family(
        name="smollm3",
        format="hermes",
        marks=THINK,
        default="may-open",
        on="may-open",
        off="closed",
        **ENABLE,
        middle="dropped",
        developer="dropped",
        added=(*THINK, "<|im_end|>"),
        **CHATML,
    ),
    Family(
        name="qwen3", format="hermes", marks=THINK, **MAY_THINK, developer="dropped", added=QWEN
    ),
    Family(name="qwen3-2507", format="hermes", developer="dropped", added=QWEN),
    Family(name="qwen3.6", format="qwen-xml", marks=THINK, **THINKS, **STRICT, added=QWEN),
    Family(name="qwen3.8", format="qwen-xml", marks=THINK, **THINKS, **STRICT, added=QWEN),
    Family(
        name="qwq", format="hermes", marks=THINK, default="inside", developer="dropped", added=QWEN
    ),
    Family(name="deepseek-v3.2", format="dsml-v3.2", marks=THINK, **DEEPSEEK_THINKS, **DSML),
    Family(name="deepseek-v4", format="dsml", marks=THINK, **DEEPSEEK_THINKS, **DSML),
    Family(
        name="deepseek-v3", format="deepseek-v3", developer="dropped", arguments="text", **DEEPSEEK
    ),
    Family(name="glm-5", format="glm", marks=THINK, **THINKS, developer="dropped", added=GLM),
    Family(name="laguna", format="glm-lines", marks=THINK, **THINKS, added=GLM),
    Family(
        name="minimax-m2",
        format="minimax-m2",
        marks=THINK,
        default="inside",
        added=(*THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Family(
        name="kimi-k2-thinking",
        format="kimi-k2",
        marks=THINK,
        default="may-open",
        ids="kimi",
        added=("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", *THINK),
    ),
    Family(
        name="kimi-k3",
        format="kimi-k3",
        marks=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        default="inside",
        on="inside",
        off="closed",
        switch_on={"thinking": True},
        switch_off={"thinking": False},
        begun="<|open|>response<|sep|>",
        added=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    Family(name="magistral", format="mistral-args", **MISTRAL, **MISTRAL_THINKS),
    Family(name="ministral-3", format="mistral-args", **MISTRAL, **MISTRAL_THINKS),
    Family(name="devstral", format="mistral-args", **MISTRAL),
    Family(name="mistral-nemo", format="mistral", **MISTRAL),
    Family(
        name="granite-3.3",
        format="granite",
        marks=THINK,
        default="may-open",
        on="may-open",
        switch_on={"thinking": True},
        added=("<|tool_call|>", "<|start_of_role|>", "<|end_of_role|>"),
    ),
    Family(name="granite-4", format="hermes", added=("<tool_call>", "</tool_call>")),
    Family(name="nemotron-3", format="qwen-xml", marks=THINK, **THINKS, added=QWEN),
    Family(
        name="nemotron-nano-v2",
        format="nemotron-json",
        marks=THINK,
        **THINKS,
        developer="dropped",
        added=("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
    ),
    Family(
        name="seed-oss",
        format="seed",
        marks=("<seed:think>", "</seed:think>"),
        default="may-open",
        off="closed",
        switch_off={"thinking_budget": 0},
        added=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    Family(
        name="lfm2.5",
        format="lfm2",
        marks=THINK,
        default="may-open",
        added=("<|tool_call_start|>", "<|tool_call_end|>", *THINK),
    ),
    Family(
        name="lfm2",
        format="lfm2",
        calls="none",
        added=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Family(
        name="llama-4",
        format="llama-4-json",
        added=("<|python_start|>", "<|python_end|>", "<|header_start|>", "<|header_end|>"),
        special={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"},
    ),
    Family(
        name="llama-4-pythonic",
        format="llama-4",
        added=("<|python_start|>", "<|python_end|>", "<|header_start|>", "<|header_end|>"),
        special={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot|>"},
    ),
    Family(
        name="olmo-3",
        format="olmo-3",
        marks=THINK,
        default="inside",
        developer="dropped",
        added=("<|im_start|>", "<|im_end|>", "<functions>", "</functions>"),
    ),
    Family(
        name="command-a",
        format="cohere",
        marks=("<|START_THINKING|>", "<|END_THINKING|>"),
        default="inside",
        off="closed",
        switch_off={"reasoning_effort": "none"},
        developer="dropped",
        added=("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        special={"bos_token": "<BOS_TOKEN>"},
    ),
    Family(
        name="apertus",
        format="apertus",
        marks=("<|inner_prefix|>", "<|inner_suffix|>"),
        default="may-open",
        on="may-open",
        switch_on={"enable_thinking": True},
        added=("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
        special={"bos_token": "<s>"},
    ),
    Family(
        name="apriel-1.6",
        format="hunyuan",
        marks=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        default="inside",
        developer="dropped",
        added=("<|begin_user|>", "<|begin_assistant|>", "<|begin_tool_result|>", "<|end|>"),
    ),
    Family(name="hunyuan-a13b", format="hunyuan", marks=THINK, **MAY_THINK),
    Family(
        name="phi-4-mini",
        format="phi-4-mini",
        added=("<|tool|>", "<|/tool|>", "<|user|>", "<|assistant|>", "<|end|>"),
    ),
    Family(
        name="gigachat-3",
        format="gigachat",
        calls="error",
        added=("<|function_call|>", "<|role_sep|>", "<|message_sep|>"),
        special={"bos_token": "<s>"},
    ),
    Family(
        name="exaone-4",
        format="hermes-compact",
        marks=THINK,
        default="closed",
        on="inside",
        off="closed",
        **ENABLE,
        developer="dropped",
        added=QWEN,
    ),
    Family(
        name="ernie-4.5",
        format="hermes-lines",
        marks=THINK,
        default="inside",
        developer="dropped",
        added=QWEN,
    ),
    Family(
        name="step-3.5",
        format="qwen-xml",
        marks=THINK,
        default="inside",
        developer="dropped",
        added=QWEN,
    ),
    Family(
        name="functiongemma",
        format="functiongemma",
        added=("<start_function_call>", "<end_function_call>", "<escape>"),
        special={"bos_token": "<bos>"},
    ),
)
# Whose templates write calls of earlier turns: the others' are shown as text.
WRITING = tuple(each for each in FAMILIES if each.calls != "none")
BY_NAME = {each.name: each for each in FAMILIES}


@cache
def template_of(name: str) -> ChatTemplate:
    """Return the compiled template of a family."""
    family = BY_NAME[name]
    return ChatTemplate({"default": family.source}, family.special)
