"""Custom tools of Responses: one text, of the form that its grammar says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.router.http.dialects.conversations import engine
from tests.router.http.dialects.responses_answers import asked, error, prompt_of
from tests.router.http.fake_engine import byte_tokenizer
from tests.router.text.families import BY_NAME
from tests.router.text.test_lark_regex import ADDED, PATCH
from tgi_trio.router.text.tools.format import Format
from tgi_trio.router.text.tools.probe import find_call_style

pytestmark = pytest.mark.trio

LARK = {"type": "grammar", "syntax": "lark", "definition": PATCH}
REGEX = {"type": "grammar", "syntax": "regex", "definition": 'a "b"|[0-9]+'}


def custom(form: Any) -> dict[str, Any]:
    return {"type": "custom", "name": "patch", "description": "Patches.", "format": form}


async def written(family: str, form: Any, text: str) -> bool:
    """Whether the model of a family may call the tool with a text."""
    found = BY_NAME[family]
    one = engine("", found.source, tokenizer=byte_tokenizer(found.added))
    answer = await asked(one, tools=[custom(form)], tool_choice="required")
    assert answer.status == 200, answer.body
    tokenizer = LLTokenizer(one.tokenizer._backend.to_str(), eos_token=1)
    matcher = LLMatcher(tokenizer, one.submitted[0].sampling.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    style: Format = find_call_style(one.chat_template, found.added).format
    arguments: Any = {"input": text}
    if style.name == "lfm2":  # double quotes are forced
        arguments = f"input={json.dumps(text, ensure_ascii=False)}"
    ids = one.tokenizer.encode_ids(style.write([("patch", arguments)]), False).tolist()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    "family",
    ["qwen2.5", "qwen3-coder", "mistral-nemo", "gpt-oss", "kimi-k2", "lfm2.5", "functiongemma"],
)
async def test_the_text_fits_its_grammar_however_a_family_writes_it(family):
    for form, text in ((LARK, ADDED), (REGEX, 'a "b"'), (REGEX, "12")):
        assert await written(family, form, text), text
    for form, text in ((LARK, ADDED.replace("Add", "Ad")), (REGEX, "a"), (REGEX, "12x")):
        assert not await written(family, form, text), text
    for free in (None, {"type": "text"}):
        assert await written(family, free, "anything,\nat all")


async def test_the_model_is_shown_the_grammar():
    prompt = await prompt_of(tools=[custom(REGEX), {"type": "custom", "name": "free"}])
    first, second = json.loads(prompt[: prompt.index("<user>")])
    shown = first["function"]["parameters"]["properties"]["input"]
    assert shown["description"] == 'regex grammar:\na "b"|[0-9]+'
    assert second["function"]["parameters"]["properties"]["input"] == {"type": "string"}


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("lark", "neither `text` nor `grammar`"),
        ({"type": "json"}, "neither `text` nor `grammar`"),
        ({"type": "grammar", "syntax": "lark"}, "needs `definition`"),
        ({"type": "grammar", "syntax": "gbnf", "definition": "x"}, "neither `lark` nor `regex`"),
        ({**LARK, "definition": 'start: "(" start? ")"'}, "recursion is not supported"),
        ({**LARK, "definition": "x" * 70_000}, "--max-grammar-bytes"),
    ],
)
async def test_a_form_that_cannot_be_held_to_is_refused(form, words):
    status, _, _, message = error(await asked(engine(), tools=[custom(form)]))
    assert status == 400 and "the `format` of `patch`: " in message and words in message
