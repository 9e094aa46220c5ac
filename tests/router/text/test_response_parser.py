"""Answers as transformers' own reader of them tells it, where a checkpoint carries a template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.text.test_answer import FUNCTIONS, THINK, cuts, parser_of
from tgi_trio.router.delta import Answer
from tgi_trio.router.text.answer import fold
from tgi_trio.router.text.tools.call_formats import FORMATS

pytest.importorskip("transformers.utils.chat_parsing")
from transformers.utils.chat_parsing.response_parser import parse_response

THINKING = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
# Joined, since what stands between two calls is content to it as well.
CONTENT = {"content": "text", "repeats": True, "join": ""}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": f.name, "parameters": {"properties": {"x": {"type": "integer"}}}},
    }
    for f in FUNCTIONS
]
# As checkpoints carry it in tokenizer_config.json: name of our row -> how calls are read.
CALLS: dict[str, dict[str, Any]] = {
    "hermes": {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "content": "json",
        "repeats": True,
        "transform": {"type": "function", "function": "{content}"},
    },
    "qwen-xml": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>\s*",
        "close_pattern": r"\s*</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"
        },
        "repeats": True,
        "transform": {
            "type": "function",
            "function": {"name": "{name}", "arguments": "{content}"},
        },
    },
}
BY_NAME = {form.name: form for form in FORMATS}
CALLED: list[list[tuple[str, dict[str, int]]]] = [
    [],
    [("f", {"x": 1})],
    [("f", {"x": -7}), ("get_weather", {"x": 20})],
]
SAID = [
    ("", "Yes."),
    ("Hm.", "Yes."),
    ("Hm.\nAnd so on: 1 < 2, 3 > 2.", "Yes, <b> it is."),
    ("I might call <tool_call> or not.", "Let me look."),
]


def spec_of(form: str) -> dict[str, Any]:
    fields = {"thinking": THINKING, "content": CONTENT, "tool_calls": CALLS[form]}
    return {"start_anchor": "<|assistant|>", "fields": fields}


def expected(text: str, form: str) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return thought, content and calls as transformers reads them."""
    message = parse_response(text, spec_of(form), prefix="<|user|>Hi.<|assistant|>", tools=TOOLS)
    called = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(call["name"], call["arguments"]) for call in called]
    return message.get("thinking", "").strip(), message.get("content", "").strip(), calls


@pytest.mark.parametrize("form", sorted(CALLS))
@pytest.mark.parametrize("calls", CALLED, ids=len)
@pytest.mark.parametrize(("thought", "content"), SAID)
def test_an_answer_says_what_transformers_reads_in_it(
    form: str, calls: list[tuple[str, dict[str, int]]], thought: str, content: str
) -> None:
    text = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
    if calls:
        text += f"\n\n{BY_NAME[form].write(calls)}"
    told = expected(text, form)
    assert told == (thought, content, calls)
    for pieces in cuts(text):
        parser = parser_of(THINK, BY_NAME[form])
        answer = Answer()
        answer.add(fold([*map(parser.push, pieces), parser.finish()]))
        found = [(call.name, json.loads(call.arguments)) for call in answer.calls]
        assert (answer.thought, answer.content.strip(), found) == told
