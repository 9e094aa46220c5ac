"""What is forced comes behind the thought, and a budget ends that."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.router.http.fake_engine import TEMPLATE
from tests.router.http.thinking_answers import CALL, MAY, SPECIAL, THINKS, WEATHER, asked, engine

pytestmark = pytest.mark.trio

FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, 2]}}}
REQUIRED = {"tools": [WEATHER], "tool_choice": "required"}
NAMED = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}


async def matcher_of(template: str, special: tuple[str, ...], **more: Any) -> Any:
    """Return what llguidance makes of the grammar of a request, and the tokenizer's ids."""
    found = engine("</think>", template, special)
    answer = await asked(found, **more)
    assert answer.status == 200, answer.body
    (request,) = found.submitted
    assert request.sampling.grammar
    tokenizer = LLTokenizer(found.tokenizer._backend.to_str(), eos_token=1)
    matcher = LLMatcher(tokenizer, request.sampling.grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher, lambda text: found.tokenizer.encode_ids(text, False).tolist()


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["spelled", "special"])
@pytest.mark.parametrize(
    ("asked_for", "good", "bad"),
    [
        ({"response_format": FORMAT}, "1", "3"),
        ({"response_format": {"type": "json_object"}}, "{}", "[]"),
        ({"regex": "a+"}, "aa", "ab"),
        ({"guided_choice": ["x", "y"]}, "y", "z"),
        (REQUIRED, CALL, CALL.replace("city", "town")),
        (NAMED, CALL, CALL.replace("weather", "clock")),
    ],
    ids=["json_schema", "json_object", "regex", "choice", "required", "named"],
)
async def test_what_is_forced_comes_behind_the_thought(asked_for, good, bad, special):
    for template, begin in ((THINKS, ""), (MAY, "<think>")):
        for text, fits in ((good, True), (bad, False)):
            matcher, ids = await matcher_of(template, special, **asked_for)
            whole = ids(f"{begin}Hm.\n</think>\n\n{text}")
            taken = matcher.try_consume_tokens(whole)
            assert (taken == len(whole) and matcher.is_accepting()) is fits, (text, begin)
        matcher, ids = await matcher_of(template, special, **asked_for)
        thought = ids(f"{begin}Hm.")
        assert matcher.try_consume_tokens(thought) == len(thought) and not matcher.is_accepting()
    # Where the prompt has ended the thought, none can come.
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    matcher, ids = await matcher_of(THINKS, special, **asked_for, **off)
    assert matcher.try_consume_tokens(ids(good)) == len(ids(good)) and matcher.is_accepting()
    matcher, ids = await matcher_of(THINKS, special, **asked_for, **off)
    assert matcher.try_consume_tokens(ids("Hm.</think>")) < len(ids("Hm.</think>"))


@pytest.mark.parametrize(
    "name", ["thinking_token_budget", "max_think_tokens", "thinking_budget_tokens"]
)
@pytest.mark.parametrize("special", [(), SPECIAL], ids=["spelled", "special"])
async def test_a_budget_forces_the_end_mark(name, special):
    for more in ({}, {"response_format": FORMAT}, REQUIRED, {"tools": [WEATHER]}):
        matcher, ids = await matcher_of(THINKS, special, **{name: 8}, **more)
        assert matcher.try_consume_tokens(ids("x" * 8)) == 8
        assert matcher.deep_copy().try_consume_tokens(ids("x")) == 0
        end = ids("</think>")
        assert matcher.try_consume_tokens(end) == len(end)


async def test_a_budget_where_nothing_is_thought_is_nothing():
    for template, more in (
        (TEMPLATE, {}),
        (THINKS, {"chat_template_kwargs": {"enable_thinking": False}}),
        (THINKS, {"thinking_token_budget": -1}),
    ):
        found = engine("Yes.", template)
        answer = await asked(found, **{"thinking_token_budget": 8, **more})
        assert answer.status == 200 and not found.submitted[0].sampling.grammar
    words = "{# Here is my thought process: Here is my response: #}" + TEMPLATE
    refused = await asked(engine("", words), thinking_token_budget=8)
    assert refused.status == 422 and b"a budget of a thought is not supported" in refused.body
