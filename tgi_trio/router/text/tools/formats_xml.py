"""Rows of the families that write arguments as parameters between tags."""

# ruff: noqa: RUF001 - DeepSeek's own marks have a bar of full width

from __future__ import annotations

from tgi_trio.router.text.tools.arguments_xml import XmlArguments
from tgi_trio.router.text.tools.format import Format
from tgi_trio.router.text.tools.matching import INDEX, TYPE

_JSON_TYPES = ("null", "boolean", "integer", "number", "array", "object")
_DSML_VALUES = XmlArguments(
    prefix='<｜DSML｜parameter name="',
    middle=f'" string="{TYPE}">',
    suffix="</｜DSML｜parameter>\n",
    types={"string": "true", **dict.fromkeys(_JSON_TYPES, "false")},
)
DSML_V32 = Format(
    name="dsml-v3.2",
    families="DeepSeek V3.2",
    signs=("<｜DSML｜", "function_calls"),
    trigger="<｜DSML｜function_calls>",
    opening='\n<｜DSML｜invoke name="',
    middle='">\n',
    next='</｜DSML｜invoke>\n<｜DSML｜invoke name="',
    closing="</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    arguments=_DSML_VALUES,
)
DSML_V4 = Format(
    name="dsml",
    families="DeepSeek V4",
    signs=("<｜DSML｜", "tool_calls>"),
    trigger="<｜DSML｜tool_calls>",
    opening='\n<｜DSML｜invoke name="',
    middle='">\n',
    next='</｜DSML｜invoke>\n<｜DSML｜invoke name="',
    closing="</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    arguments=_DSML_VALUES,
)
KIMI_K3 = Format(
    name="kimi-k3",
    families="Kimi K3",
    signs=("<|open|>", "<|sep|>"),
    trigger="<|open|>tools<|sep|>",
    opening='<|open|>call tool="',
    middle=f'" index="{INDEX}"<|sep|>',
    next='<|close|>call<|sep|><|open|>call tool="',
    closing="<|close|>call<|sep|><|close|>tools<|sep|>",
    first=1,
    arguments=XmlArguments(
        prefix='<|open|>argument key="',
        middle=f'" type="{TYPE}"<|sep|>',
        suffix="<|close|>argument<|sep|>",
        types={"string": "string", **{name: name for name in _JSON_TYPES}, "integer": "number"},
    ),
)
MINIMAX_M2 = Format(
    name="minimax-m2",
    families="MiniMax M2, M2.5, M2.7",
    signs=("<minimax:tool_call>",),
    trigger="<minimax:tool_call>",
    opening='\n<invoke name="',
    middle='">\n',
    next='</invoke>\n<invoke name="',
    closing="</invoke>\n</minimax:tool_call>",
    arguments=XmlArguments(prefix='<parameter name="', middle='">', suffix="</parameter>\n"),
)
SEED = Format(
    name="seed",
    families="Seed-OSS",
    signs=("<seed:tool_call>",),
    trigger="<seed:tool_call>",
    opening="\n<function=",
    middle=">\n",
    next="</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=",
    closing="</function>\n</seed:tool_call>",
    arguments=XmlArguments(prefix="<parameter=", middle=">", suffix="</parameter>\n"),
)
_GLM_LINES = Format(
    name="glm-lines",
    families="GLM-4.5, 4.6, Laguna",
    signs=("<arg_key>",),
    trigger="<tool_call>",
    opening="",
    middle="\n",
    next="</tool_call>\n<tool_call>",
    closing="</tool_call>",
    arguments=XmlArguments(
        prefix="<arg_key>", middle="</arg_key>\n<arg_value>", suffix="</arg_value>\n"
    ),
)
GLM = Format(
    name="glm",
    families="GLM-4.7, 5",
    signs=("<arg_key>",),
    trigger="<tool_call>",
    opening="",
    middle="",
    next="</tool_call><tool_call>",
    closing="</tool_call>",
    arguments=XmlArguments(
        prefix="<arg_key>", middle="</arg_key><arg_value>", suffix="</arg_value>"
    ),
    variants=(_GLM_LINES,),
)
QWEN_XML = Format(
    name="qwen-xml",
    families="Qwen3-Coder, Qwen3.5, 3.6, 3.8, Nemotron 3, Step 3.5, MiMo v2",
    signs=("<function=", "<parameter="),
    trigger="<tool_call>",
    opening="\n<function=",
    middle=">\n",
    next="</function>\n</tool_call>\n<tool_call>\n<function=",
    closing="</function>\n</tool_call>",
    arguments=XmlArguments(prefix="<parameter=", middle=">\n", suffix="\n</parameter>\n"),
)
