"""The `openai` package with what users of vLLM, SGLang and llama.cpp put into `extra_body`.

Whatever is asked of it, an answer that is not cut off is of the form that was asked for, by judges
that are not ours: jsonschema, `re`, and a check written for each grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import openai as package
import pytest
from openai import OpenAI

pytestmark = pytest.mark.system

MESSAGES: list[Any] = [{"role": "user", "content": "Describe the queue."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["ring", "queue", None]},
    },
    "required": ["name", "size", "kind"],
}
PATTERN = r"(\d{1,3}\.){3}\d{1,3}"
CHOICES = ["continuous batching", "paged attention", "neither"]
# Balanced brackets around words; no regular expression can say so.
GBNF = r"""
root  ::= "(" word tail ")"   # llama.cpp, xgrammar
tail  ::= "" | " " root
word  ::= [a-z]{1,6}
"""
LARK = """
start: "(" WORD tail ")"
tail: "" | " " start
WORD: /[a-z]{1,6}/
"""


def is_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_pattern(text: str) -> bool:
    return re.fullmatch(PATTERN, text) is not None


def is_choice(text: str) -> bool:
    return text in CHOICES


def is_nested(text: str) -> bool:
    """The definition of both grammars, from the inside out."""
    while found := re.search(r" ?\([a-z]{1,6}\)", text):
        if found.span() == (0, len(text)):
            return not text.startswith(" ")
        text = text[: found.start()] + text[found.end() :]
    return False


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tag"],
        "tags": [
            {
                "type": "tag",
                "begin": f"<tag {name}>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</tag>",
            }
            for name in ("a", "b")
        ],
        "at_least_one": True,
    },
}
OLDER: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "The queue", "schema": SCHEMA, "end": "."}],
    "triggers": ["The"],
}


def has_tags(text: str) -> bool:
    """One at the beginning, and wherever else one begins: with content that is valid."""
    found = re.findall(r"<tag [ab]>(.*?)</tag>", text, re.DOTALL)
    rest = re.sub(r"<tag [ab]>.*?</tag>", "", text, flags=re.DOTALL)
    return text.startswith("<tag ") and all(map(is_schema, found)) and "<tag" not in rest


def has_sentences(text: str) -> bool:
    """Whatever begins as the trigger is such a sentence."""
    found = re.findall(r"The queue(\{.*?\})\.", text)
    return all(map(is_schema, found)) and text.count("The") == len(found)


FORMS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"structured_outputs": {"json": SCHEMA}}, is_schema),
    ({"structured_outputs": {"regex": PATTERN}}, is_pattern),
    ({"structured_outputs": {"choice": CHOICES}}, is_choice),
    ({"structured_outputs": {"grammar": GBNF}}, is_nested),
    ({"structured_outputs": {"grammar": LARK}}, is_nested),
    ({"structured_outputs": {"json_object": True}}, is_object),
    ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "xgrammar"}, is_schema),
    ({"guided_regex": PATTERN}, is_pattern),
    ({"guided_choice": CHOICES}, is_choice),
    ({"guided_grammar": GBNF}, is_nested),
    ({"regex": PATTERN}, is_pattern),
    ({"json_schema": json.dumps(SCHEMA)}, is_schema),
    ({"ebnf": GBNF}, is_nested),
    ({"grammar": GBNF}, is_nested),
    ({"json_schema": SCHEMA}, is_schema),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_schema),
    ({"response_format": TAGS}, has_tags),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, has_tags),
    ({"structural_tag": OLDER}, has_sentences),
]


@pytest.mark.parametrize(("extra", "fits"), FORMS)
def test_an_answer_has_the_form_that_was_asked_for(
    openai: OpenAI, extra: dict[str, Any], fits: Callable[[str], bool]
) -> None:
    # So warm that it would say anything.
    drawn: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_tokens": 80, "n": 3}
    drawn |= {"model": "tgi", "extra_body": extra}
    chat = openai.chat.completions.create(messages=MESSAGES, **drawn)
    texts = openai.completions.create(prompt="The queue: ", **drawn)
    answers = [(each.message.content or "", each.finish_reason) for each in chat.choices]
    answers += [(each.text, each.finish_reason) for each in texts.choices]
    whole = [text for text, reason in answers if reason == "stop"]
    assert [text for text in whole if not fits(text)] == []
    if fits is is_object:  # may have as many properties as it likes
        assert {text[:1] for text, _ in answers} == {"{"}
    else:
        assert len(whole) >= 2
    streamed: dict[int, str] = {}
    for chunk in openai.chat.completions.create(messages=MESSAGES, **drawn, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert streamed == {each.index: each.message.content for each in chat.choices}


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"grammar": 'root ::= "a" other'}, "line 1, column 14: there is no rule `other`"),
        ({"guided_grammar": 'start: "a" other'}, "unknown name"),
        ({"guided_regex": "("}, "grammar is not valid"),
        ({"regex": "a", "guided_choice": ["a"]}, "`guided_choice` and `regex`"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "neither `format` nor `structures`"),
        ({"regex": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "`regex`"),
        ({"stop_regex": "(?=a)b"}, "`stop_regex` is not valid at character 1"),
        ({"use_beam_search": True}, "`use_beam_search` is not supported: there is no beam search"),
        ({"mirostat": 2}, "`mirostat` is not supported"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "`lora` is not supported"),
    ],
)
def test_what_is_wrong_or_not_served_is_said(
    openai: OpenAI, extra: dict[str, Any], problem: str
) -> None:
    with pytest.raises(package.UnprocessableEntityError) as caught:
        openai.chat.completions.create(
            model="tgi", messages=MESSAGES, max_tokens=5, extra_body=extra
        )
    assert problem in str(caught.value)


def test_a_stop_expression_ends_an_answer_as_a_string_does(openai: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tgi", "messages": MESSAGES, "temperature": 0}
    create = openai.chat.completions.create
    whole = create(**fields, max_tokens=30).choices[0].message.content or ""
    found = re.search(r" (q\w|[s-t]\w\w)", whole)
    assert found is not None
    extra: dict[str, Any] = {"stop_regex": r" (q\w|[s-t]\w\w)"}
    stopped = create(**fields, max_tokens=30, extra_body=extra).choices[0]
    assert stopped.message.content == whole[: found.start()]
    assert stopped.finish_reason == "stop"
    assert stopped.model_extra is not None
    assert stopped.model_extra["matched_stop"] == extra["stop_regex"]
    assert stopped.model_extra["stop_reason"] == extra["stop_regex"]
    chunks = list(create(**fields, max_tokens=30, extra_body=extra, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == stopped.message.content
    reasons = [(c.choices[0].model_extra or {})["matched_stop"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [extra["stop_regex"]]
