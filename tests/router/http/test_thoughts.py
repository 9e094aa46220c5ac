"""Thoughts of a chat: told apart in bodies and streams, counted, left out, given back."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.router.http.fake_engine import TEMPLATE
from tests.router.http.served import Answer, served
from tests.router.http.thinking_answers import (
    BODY,
    CALL,
    CHAT,
    MAY,
    SPECIAL,
    THINKS,
    USER,
    WEATHER,
    asked,
    choice_of,
    engine,
    folded,
)
from tests.router.http.tool_calls import called
from tests.router.text.families import BY_NAME

pytestmark = pytest.mark.trio

CASES = [
    # text, thought, content, calls, reason
    ("Hm.\n</think>\n\nYes.", "Hm.", "Yes.", [], "stop"),
    (f"Hm.</think>Well.\n{CALL}", "Hm.", "Well.", [("weather", '{"city":"Rome"}')], "tool_calls"),
    (f"Hm.\n{CALL}", "Hm.", "", [("weather", '{"city":"Rome"}')], "tool_calls"),
    ("</think>Yes.", "", "Yes.", [], "stop"),
    ("Hm, for ever.", "Hm, for ever.", "", [], "stop"),
]


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["spelled", "special"])
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(("text", "thought", "content", "calls", "reason"), CASES)
async def test_stream_and_body_tell_thoughts_apart(
    text, thought, content, calls, reason, step, special
):
    tools = {"tools": [WEATHER]} if "tool_call" in text else {}
    whole, stream = engine(text, special=special), engine(text, special=special)
    whole.tokens_per_step = stream.tokens_per_step = step
    found = choice_of(await asked(whole, **tools))
    said = called(found.message)
    assert found.message.reasoning_content == found.message.reasoning
    assert (found.message.reasoning or "") == thought
    assert (found.message.content or "", said, found.finish_reason) == (content, calls, reason)
    assert found.message.content is not None or calls
    told = folded(await asked(stream, stream=True, **tools))
    assert told[:4] == (thought, content, calls, reason)


@pytest.mark.parametrize("special", [(), SPECIAL], ids=["spelled", "special"])
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "thought", "tokens"),
    [
        (f"Hm.\n{CALL}", "Hm.\n", f"{CALL}</s>"),
        (f"<tool_call> or so <\n{CALL}", "<tool_call> or so <\n", f"{CALL}</s>"),
        ("Hm: <tool_call>\n{", "Hm: <tool_call>\n{</s>", ""),
    ],
)
async def test_the_tokens_of_a_call_within_a_thought_are_the_answers(
    text, thought, tokens, step, special
):
    """What begins a call is none of the thought's, though that is known late."""
    options = {"tools": [WEATHER], "logprobs": True}
    for stream in (False, True):
        found = engine(text, special=special)
        found.tokens_per_step = step
        answer = await asked(found, stream=stream, **options)
        if stream:
            shown = folded(answer)[4]
        else:
            logprobs = choice_of(answer).logprobs
            shown = [entry.token for entry in logprobs.content] if logprobs else []
        assert "".join(shown) == tokens
        assert found.metrics.value("tgi_request_reasoning_tokens") == len(
            thought.replace("</s>", "$")
        )


@pytest.mark.parametrize("step", [1, 1000])
async def test_a_forced_call_cut_off_in_its_opening_belongs_to_no_thought(step):
    options = {"tools": [WEATHER], "tool_choice": "required", "logprobs": True, "max_tokens": 9}
    for stream in (False, True):
        found = engine(f"Hm.\n{CALL}", special=(*SPECIAL, "<tool_call>"))
        found.tokens_per_step = step
        answer = await asked(found, stream=stream, **options)
        if stream:
            *told, tokens = folded(answer)
            assert told == ["Hm.", "", [], "length"]
        else:
            choice = choice_of(answer)
            assert choice.logprobs is not None
            message, tokens = choice.message, [each.token for each in choice.logprobs.content]
            assert (message.reasoning, message.content, choice.finish_reason) == (
                "Hm.",
                "",
                "length",
            )
            assert not message.tool_calls
        assert "".join(tokens) == '<tool_call>\n{"n'
        assert found.metrics.value("tgi_request_reasoning_tokens") == len("Hm.\n")


async def test_a_thought_that_is_cut_off_has_no_content():
    found = choice_of(await asked(engine("Hm, for ever."), max_tokens=4))
    assert (found.message.reasoning, found.message.content) == ("Hm,", None)
    assert found.finish_reason == "length"
    ended = choice_of(await asked(engine("Hm.")))  # by its end token: never copied into the content
    assert (ended.message.reasoning, ended.message.content) == ("Hm.", "")
    assert ended.finish_reason == "stop"


@pytest.mark.parametrize("text", ["Yes, it rains 雨.", "\n\n<b>Yes</b>", "", "<thin air>"])
@pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER]}], ids=["plain", "tools"])
async def test_an_answer_without_thoughts_is_what_it_was(text, tools):
    """The same bytes as from a model that never thinks, where nothing looks like a mark."""
    for stream in (False, True):
        may, never = engine(text, MAY), engine(text, TEMPLATE)
        options = {**tools, "stream": stream, "logprobs": True, "return_token_ids": True}
        found, expected = await asked(may, **options), await asked(never, **options)
        if "<" in text and stream:
            assert folded(found) == folded(expected)
            continue
        assert undated(found) == undated(expected)
        assert b"reasoning_content" not in found.body


def undated(answer: Answer) -> bytes:
    return re.sub(rb'"(id|created|receipt)":("[^"]*"|\d+|\{[^}]*\})', b"", answer.body)


async def test_harmony_thinks_more_than_once():
    """Messages on channels; no tools, so that what is called is nobody's."""
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Yes. END<|return|>"
    )
    expected: Any = ("Hm.\n\nSo.", "Let me see.\n\nYes. ", [], "stop")
    for special in ((), BY_NAME["gpt-oss"].added):
        for step in (1, 1000):
            whole, stream = (engine(text, BY_NAME["gpt-oss"].source, special) for _ in range(2))
            whole.tokens_per_step = stream.tokens_per_step = step
            answer = await asked(whole, stop=["END", "Hm"])
            choice = choice_of(answer)
            content = (choice.message.reasoning, choice.message.content)
            assert (*content, [], choice.finish_reason) == expected
            assert not choice.message.tool_calls
            details = answer.json()["usage"]["completion_tokens_details"]
            assert details["reasoning_tokens"] >= len("Hm.So.")
            assert folded(await asked(stream, stop=["END", "Hm"], stream=True))[:4] == expected


# ---- what is told of them ----------------------------------------------------------------------


async def test_thoughts_are_counted_with_their_marks():
    text = "<think>Hm.</think>\nYes."
    for special, count in (((), len("<think>Hm.</think>")), (SPECIAL, 5)):
        found = engine(text, MAY, special)
        answer = await asked(found)
        usage = answer.json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == count
        assert found.metrics.value("tgi_request_reasoning_tokens") == count
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last, _ = (await asked(engine(text, MAY, special), **options)).events()
        assert json.loads(last)["usage"]["completion_tokens_details"]["reasoning_tokens"] == count
    answer = await asked(engine("Yes, <b>", MAY))
    assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_two_answers_are_counted_together():
    answer = await asked(engine("Hm.</think>Yes."), n=2)
    assert [c["message"]["reasoning"] for c in answer.json()["choices"]] == ["Hm.", "Hm."]
    details = answer.json()["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == 2 * len("Hm.</think>")


async def test_log_probabilities_are_those_of_the_answer():
    for special in ((), SPECIAL):
        text = "<think>Hm.</think>\nYes."
        choice = choice_of(await asked(engine(text, MAY, special), logprobs=True))
        assert choice.logprobs is not None
        assert "".join(entry.token for entry in choice.logprobs.content) == "Yes.</s>"
        answer = await asked(engine(text, MAY, special), logprobs=True, stream=True)
        assert "".join(folded(answer)[4]) == "Yes.</s>"


async def test_thoughts_are_left_out_or_left_in():
    text = "Hm.</think>Yes."
    for stream in (False, True):
        answer = await asked(engine(text), include_reasoning=False, stream=stream)
        assert b'"reasoning' not in answer.body.replace(b'"reasoning_tokens"', b"")
        if stream:
            assert folded(answer)[:2] == ("", "Yes.")
        else:
            assert choice_of(answer).message.content == "Yes."
            details = answer.json()["usage"]["completion_tokens_details"]
            assert details["reasoning_tokens"] == len("Hm.</think>")
        answer = await asked(engine(text), separate_reasoning=False, stream=stream)
        found = folded(answer)[1] if stream else choice_of(answer).message.content
        assert found == text


async def test_info_tells_the_marks():
    async with served(engine("")) as server:
        client = await server.connect()
        told = (await client.get("/info")).json()
    assert told["reasoning"] == {
        "start": "<think>",
        "end": "</think>",
        "source": "rendered thought",
    }
    async with served(engine("", TEMPLATE)) as server:
        client = await server.connect()
        assert (await client.get("/info")).json()["reasoning"] is None


# ---- what the model is told --------------------------------------------------------------------


async def prompt_of(template: str, **more: Any) -> str:
    async with served(engine("", template)) as server:
        client = await server.connect()
        answer = await client.post("/chat_tokenize", {**BODY, **more})
    assert answer.status == 200, answer.body
    return answer.json()["templated_text"]


async def test_switches():
    on, off = "<|user|>Rain?<|assistant|><think>", "<|user|>Rain?<|assistant|><think></think>"
    assert await prompt_of(THINKS) == on
    assert await prompt_of(THINKS, chat_template_kwargs={"enable_thinking": False}) == off
    assert await prompt_of(THINKS, reasoning_effort="none") == off
    assert await prompt_of(THINKS, reasoning_effort="low") == on
    both = THINKS.replace("{% for m", "{{ reasoning_effort }}{% for m", 1)
    assert await prompt_of(both, reasoning_effort="none") == "none" + on


async def test_earlier_thoughts_reach_the_template_in_the_shape_it_reads():
    every = "{{ messages[-1].reasoning_content }}|{{ messages[-1].reasoning }}|"
    every += "{{ messages[-1].thinking }}|{{ messages[-1].content }}"
    said = {"role": "assistant", "content": "Yes."}
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]
    for message in (
        {**said, "reasoning_content": "Hm."},
        {**said, "reasoning": "Hm."},
        {**said, "thinking": "Hm."},
        {"role": "assistant", "content": parts},
    ):
        options = {"messages": [*USER, message], "continue_final_message": False}
        assert await prompt_of(every, **options) == "Hm.|Hm.|Hm.|Yes."
        magistral = (
            "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
            "{% else %}{% for p in m.content %}{% if p.type == 'thinking' %}"
            "{{ '[THINK]' + p.thinking + '[/THINK]' }}{% else %}{{ p.text }}{% endif %}"
            "{% endfor %}{% endif %}{% endfor %}"
        )
        assert await prompt_of(magistral, **options) == (
            "[user]Rain?[assistant][THINK]Hm.[/THINK]Yes."
        )


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
async def test_an_answer_that_was_cut_off_in_its_thought_is_taken_back(name):
    message = {"role": "assistant", "content": None, name: "Hm,"}
    every = "{% for m in messages %}[{{ m.role }}]{{ m.thinking }}{{ m.content }}{% endfor %}"
    assert await prompt_of(every, messages=[*USER, message, *USER]) == (
        "[user]Rain?[assistant]Hm,[user]Rain?"
    )
    # Where the thought was not shown, or is not kept, nothing is left of it.
    for empty in ({"content": None}, {"content": None, name: None}, {name: ""}, {"content": ""}):
        message = {"role": "assistant", **empty}
        assert await prompt_of(every, messages=[*USER, message, *USER]) == (
            "[user]Rain?[assistant][user]Rain?"
        )
    for role in ("user", "system", "tool"):
        reply = await asked(engine("x"), messages=[*USER, {"role": role}])
        assert reply.status == 422 and "needs `content` or `tool_calls`" in reply.text


async def test_an_answer_whose_thought_was_hidden_is_taken_back():
    one = engine("<think>Hm, it may", MAY)
    async with served(one) as server:
        client = await server.connect()
        body = {**BODY, "include_reasoning": False, "max_tokens": 12}
        message = (await client.post(CHAT, body)).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": None}
        again = await client.post(CHAT, {**body, "messages": [*USER, message, *USER]})
    assert again.status == 200, again.text


async def test_the_native_api_knows_no_thoughts():
    async with served(engine("a END</think>b")) as server:
        client = await server.connect()
        parameters = {"stop": ["END"], "max_new_tokens": 99}
        body = {"inputs": "<think>", "parameters": parameters}
        assert (await client.post("/generate", body)).json() == {"generated_text": "a END"}
