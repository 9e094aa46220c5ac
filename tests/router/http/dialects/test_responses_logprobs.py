"""Log-probabilities of Responses: those of the texts, in bodies and in streams."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.http.dialects.conversations import engine
from tests.router.http.dialects.responses_answers import TOOLS, asked, error, events, final, reply
from tests.router.http.fake_engine import byte_tokenizer
from tests.router.http.thinking import let_think
from tests.router.text.families import BY_NAME
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

INCLUDE = {"include": ["message.output_text.logprobs"]}
SPOKEN = "<think>Hm.</think>It <b> rains." + HERMES.write([("clock", {})])


def texts(found: replies.ResponseReply) -> list[replies.OutputTextPart]:
    return [item.content[0] for item in found.output if isinstance(item, replies.MessageItem)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("top", [None, 1, 2])
async def test_the_tokens_of_a_text(http, monkeypatch, step, top):
    """Nothing of the thought, of the call and of marks; held-back tokens come with their text."""
    let_think(monkeypatch)
    whole, stream = engine(SPOKEN), engine(SPOKEN)
    whole.tokens_per_step = stream.tokens_per_step = step
    options: dict[str, Any] = {**INCLUDE, "top_logprobs": top, "tools": TOOLS}
    body = reply(await asked(whole, http, **options))
    told = events(await asked(stream, http, stream=True, **options))
    deltas = [each for each in told if each.type == "response.output_text.delta"]
    (done,) = [each for each in told if each.type == "response.output_text.done"]
    (part,) = texts(body)
    assert part.text == "It <b> rains." == "".join(each.token for each in part.logprobs)
    assert [part] == texts(final(told)) and done.logprobs == part.logprobs
    streamed: list[Any] = [each for delta in deltas for each in delta.logprobs or []]
    assert streamed == part.logprobs
    for event in deltas:
        assert isinstance(event.logprobs, list)
        assert event.delta == "".join(each.token for each in event.logprobs)
    for each in part.logprobs:
        assert (each.logprob, each.bytes) == (-0.5, list(each.token.encode()))
        assert len(each.top_logprobs) == (top or 0)
    assert body.top_logprobs == (top or 0)


async def test_they_are_asked_for_in_either_way():
    for options, count in (
        ({}, 0),
        (INCLUDE, 4),
        ({"top_logprobs": 2}, 4),
        ({"top_logprobs": 0}, 0),
    ):
        (part,) = texts(reply(await asked(engine("Yes."), **options)))
        assert len(part.logprobs) == count, options


async def test_headers_of_messages_are_no_text(http):
    text = (
        "<|channel|>commentary<|message|>Let me.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Done, é."
    )
    family = BY_NAME["gpt-oss"]
    one = engine(text, family.source, tokenizer=byte_tokenizer(family.added))
    (part,) = texts(reply(await asked(one, http, **INCLUDE)))
    assert part.text == "Let me.\n\nDone, é."
    data = b"".join(bytes(each.bytes or ()) for each in part.logprobs)
    assert data.decode() == "Let me.Done, é."  # what stands between two messages nobody wrote


async def test_more_than_are_shown_are_refused():
    found = error(await asked(engine(), top_logprobs=21))
    assert found[0] == 400 and "`top_logprobs` must be >= 0 and <= 20" in found[3]
    assert error(await asked(engine(), top_logprobs=-1))[0] == 400
