"""Stop strings end what is said: they may stand in thoughts and in calls."""

from __future__ import annotations

import pytest

from tests.router.http.thinking_answers import (
    CALL,
    SPECIAL,
    WEATHER,
    asked,
    choice_of,
    engine,
    folded,
)
from tests.router.http.tool_calls import called
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio


@pytest.mark.parametrize("stop", [{"stop": ["END"]}, {"stop_regex": "E.D"}])
@pytest.mark.parametrize("step", [1, 2, 5, 1000])
async def test_a_stop_string_ends_the_answer_alone(stop, step):
    """It may stand in the thought, and in a call; behind the end mark it counts at once."""
    (name,) = stop
    reason = stop[name] if name == "stop_regex" else "END"
    for stream in (False, True):
        found = engine("the END.</think>Yes. END of it")
        found.tokens_per_step = step
        answer = await asked(found, stream=stream, **stop)
        if stream:
            assert folded(answer)[:4] == ("the END.", "Yes. ", [], "stop")
            continue
        choice = choice_of(answer)
        assert (choice.message.reasoning, choice.message.content) == ("the END.", "Yes. ")
        assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)
    call = HERMES.write([("weather", {"city": "END"})])
    expected = ("END", "", [("weather", '{"city":"END"}')], "tool_calls")
    for stream in (False, True):
        found = engine(f"END</think>{call}")
        found.tokens_per_step = step
        answer = await asked(found, stream=stream, tools=[WEATHER], **stop)
        if stream:
            assert folded(answer)[:4] == expected
            continue
        choice = choice_of(answer)
        calls = called(choice.message)
        content = choice.message.content or ""
        assert (choice.message.reasoning, content, calls, choice.finish_reason) == expected


async def test_a_stop_string_cuts_calls_that_follow_it():
    for step in (1, 1000):
        found = engine(f"</think>Yes. END {CALL}")
        found.tokens_per_step = step
        choice = choice_of(await asked(found, stop=["END"], tools=[WEATHER]))
        assert (choice.message.content, choice.finish_reason) == ("Yes. ", "stop")
        assert not choice.message.tool_calls


async def test_white_space_around_the_end_mark_stops_nothing():
    choice = choice_of(await asked(engine("Hm.\n\n</think>\n\nYes.\n\nNo."), stop=["\n\n"]))
    assert (choice.message.reasoning, choice.message.content) == ("Hm.", "Yes.")


async def test_a_special_token_stops_in_the_answer_alone():
    found = engine("a<|end|>b</think>c<|end|>d", special=SPECIAL)
    choice = choice_of(await asked(found, stop=["<|end|>"]))
    assert (choice.message.reasoning, choice.message.content) == ("ab", "c")
    assert choice.stop_reason == "<|end|>"


async def test_stop_token_ids_end_anything():
    found = engine("abc")
    (id,) = found.tokenizer.encode_ids("b", False).tolist()
    choice = choice_of(await asked(found, stop_token_ids=[id]))
    assert (choice.message.reasoning, choice.stop_reason) == ("a", id)
    choice = choice_of(await asked(engine("abcb"), stop_token_ids=[id], min_tokens=2))
    assert (choice.message.reasoning, choice.stop_reason) == ("abc", id)


async def test_the_stop_string_is_kept_where_it_is_asked_for():
    options = {"stop": ["END"], "include_stop_str_in_output": True}
    choice = choice_of(await asked(engine("END</think>Yes END no"), **options))
    assert (choice.message.reasoning, choice.message.content) == ("END", "Yes END")
