"""How a chat asks for thoughts in the words of OpenRouter, DeepSeek, Z.ai, Kimi and Qwen's API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.http.fake_engine import TEMPLATE
from tests.router.http.served import served
from tests.router.http.thinking_answers import (
    BODY,
    CHAT,
    MAY,
    SPECIAL,
    THINKS,
    asked,
    choice_of,
    engine,
)

pytestmark = pytest.mark.trio

ON, OFF = "<|user|>Rain?<|assistant|><think>", "<|user|>Rain?<|assistant|><think></think>"
TOLD = THINKS.replace("{% for m", "{{ reasoning_effort }}{% for m", 1)
WORDED = "{{ reasoning_effort }}{# <think> </think> #}" + TEMPLATE  # an effort, and no switch


async def prompt_of(template: str, **more: Any) -> tuple[int, str]:
    """Return the status, and the prompt or why there is none."""
    async with served(engine("", template)) as server:
        client = await server.connect()
        answer = await client.post("/chat_tokenize", {**BODY, **more})
    if answer.status != 200:
        return answer.status, answer.body.decode()
    return answer.status, answer.json()["templated_text"]


@pytest.mark.parametrize(
    ("asks", "thinks"),
    [
        ({"reasoning": {}}, True),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "high", "enabled": True, "summary": "auto"}}, True),
        ({"reasoning": {"max_tokens": 9}}, True),
        ({"reasoning": {"exclude": True, "enabled": None}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "auto"}}, True),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True, "thinking_budget": 9}, True),
        ({"enable_thinking": False, "reasoning": {"enabled": False}}, False),
        ({"enable_thinking": False, "reasoning_effort": "none"}, False),
        ({"reasoning": None, "thinking": None, "enable_thinking": None}, True),
    ],
)
async def test_whether_it_thinks(asks, thinks):
    assert await prompt_of(THINKS, **asks) == (200, ON if thinks else OFF)


@pytest.mark.parametrize(
    "asks", [{"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}], ids=str
)
async def test_the_effort_reaches_the_template(asks):
    assert await prompt_of(TOLD, **asks) == (200, f"low{ON}")


@pytest.mark.parametrize(
    "asks",
    [
        {"thinking_token_budget": 8},
        {"thinking_budget": 8},
        {"reasoning": {"max_tokens": 8}},
        {"thinking": {"type": "enabled", "budget_tokens": 8}},
        {"thinking_budget": 8, "reasoning": {"max_tokens": 8}},
    ],
    ids=str,
)
async def test_a_budget_is_a_part_of_the_grammar(asks):
    found = engine("", special=SPECIAL)
    await asked(found, **asks)
    plain = engine("", special=SPECIAL)
    await asked(plain)
    (request,), (unbound,) = found.submitted, plain.submitted
    assert unbound.sampling.grammar == ""
    assert "8" in request.sampling.grammar


async def test_thoughts_may_be_left_out():
    for stream in (False, True):
        answer = await asked(engine("Hm.</think>Yes."), reasoning={"exclude": True}, stream=stream)
        assert b"Hm." not in answer.body.replace(b'"H"', b"")
        if not stream:
            assert choice_of(answer).message.content == "Yes."
    answer = await asked(engine("Hm.</think>Yes."), reasoning={"exclude": False})
    assert choice_of(answer).message.reasoning == "Hm."


@pytest.mark.parametrize(
    ("asks", "named"),
    [
        (
            {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
            ("`reasoning_effort` = low", "`reasoning.effort` = high"),
        ),
        (
            {"thinking_token_budget": 3, "thinking": {"type": "enabled", "budget_tokens": 4}},
            ("`thinking_token_budget` = 3", "`thinking.budget_tokens` = 4"),
        ),
        (
            {"enable_thinking": True, "thinking": {"type": "disabled"}},
            ("`enable_thinking` = true", "`thinking.type` = disabled"),
        ),
        (
            {"reasoning": {"enabled": False, "effort": "low"}},
            ("`reasoning.enabled` = false", "`reasoning.effort` = low"),
        ),
        (
            {"reasoning_effort": "none", "enable_thinking": True},
            ("`enable_thinking` = true", "`reasoning_effort` = none"),
        ),
        (
            {"include_reasoning": True, "reasoning": {"exclude": True}},
            ("`include_reasoning` = true", "`reasoning.exclude` = true"),
        ),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            ("chat_template_kwargs: `enable_thinking` has a field of its own",),
        ),
        (
            {"reasoning": {"enabled": True}, "chat_template_kwargs": {"thinking": False}},
            ("chat_template_kwargs: `thinking` has a field of its own",),
        ),
    ],
    ids=str,
)
async def test_what_contradicts_itself_is_refused_by_both_names(asks, named):
    status, text = await prompt_of(TOLD, **asks)
    assert status == 422
    for each in named:
        assert each in text


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ({"reasoning": "high"}, "reasoning: Expected `object"),
        ({"reasoning": {"effort": "warp"}}, "reasoning.effort: Invalid enum value"),
        ({"reasoning": {"max_tokens": "many"}}, "reasoning.max_tokens: Expected `int"),
        ({"reasoning": {"max_tokens": -2}}, "reasoning.max_tokens: Expected `int` >= -1"),
        ({"reasoning": {"tokens": 5}}, "reasoning: Object contains unknown field `tokens`"),
        ({"thinking": True}, "thinking: Expected `object"),
        ({"thinking": {}}, "thinking: Object missing required field `type`"),
        ({"thinking": {"type": "on"}}, "thinking.type: Invalid enum value"),
        (
            {"thinking": {"type": "enabled", "clear_thinking": False}},
            "thinking: Object contains unknown field `clear_thinking`",
        ),
        ({"enable_thinking": "no"}, "enable_thinking: Expected `bool"),
    ],
    ids=str,
)
async def test_what_is_not_read_is_refused_by_name(asks, said):
    status, text = await prompt_of(THINKS, **asks)
    assert status == 422
    assert said in text


@pytest.mark.parametrize(
    ("template", "asks", "said"),
    [
        (TEMPLATE, {"enable_thinking": True}, "`enable_thinking` is not supported: this model"),
        (TEMPLATE, {"reasoning": {"enabled": True}}, "`reasoning.enabled` is not supported"),
        (TEMPLATE, {"thinking": {"type": "enabled"}}, "`thinking.type` is not supported"),
        (MAY, {"enable_thinking": False}, "`enable_thinking` is not supported: the chat template"),
        (WORDED, {"thinking": {"type": "disabled"}}, "`thinking.type` is not supported: the chat"),
    ],
    ids=str,
)
async def test_what_a_model_cannot_be_told_is_refused(template, asks, said):
    async with served(engine("", template)) as server:
        client = await server.connect()
        answer = await client.post(CHAT, {**BODY, **asks})
    assert answer.status == 422
    error = answer.json()["error"]
    assert said in error["message"]
    assert (error["param"], error["code"]) == (said.split("`")[1], "unsupported_parameter")


@pytest.mark.parametrize(
    ("template", "asks"),
    [
        (TEMPLATE, {"enable_thinking": False}),
        (TEMPLATE, {"thinking": {"type": "disabled"}}),
        (TEMPLATE, {"reasoning": {"enabled": False}}),
        (TEMPLATE, {"reasoning": {"effort": "none"}}),
        (TEMPLATE, {"reasoning": {}}),
        (MAY, {"enable_thinking": True}),
        (WORDED, {"thinking": {"type": "enabled"}}),
    ],
    ids=str,
)
async def test_what_happens_anyway_may_be_asked_for(template, asks):
    assert (await prompt_of(template, **asks))[0] == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})]
)
async def test_elsewhere_they_are_refused_by_name(path, body):
    async with served(engine("")) as server:
        client = await server.connect()
        for asks in ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}):
            answer = await client.post(path, {**body, **asks})
            assert answer.status in (400, 422)
            assert f"`{next(iter(asks))}` is not supported" in answer.json()["error"]["message"]
