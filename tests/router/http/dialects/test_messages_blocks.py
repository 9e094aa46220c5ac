"""Anthropic's Messages: what a user's blocks say, and thoughts that the client keeps unread."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.http.dialects.anthropic_answers import (
    ASKED,
    asked,
    error,
    events,
    folded,
    prompt_of,
    reply,
)
from tests.router.http.dialects.conversations import engine
from tests.router.http.thinking import let_think
from tgi_trio.router.http.dialects.anthropic import replies

pytestmark = pytest.mark.trio

RAIN = {"type": "text", "text": "It rains."}
FOUND = {"type": "search_result", "source": "a.org", "title": "Sky", "content": [RAIN, RAIN]}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "title": "Sky", "context": "Old.", "source": source}


READ = [
    (FOUND, "Sky\n\na.org\n\nIt rains.\n\nIt rains."),
    (document(type="text", data="D"), "Sky\n\nOld.\n\nD"),
    (document(type="content", content="D"), "Sky\n\nOld.\n\nD"),
    (document(type="content", content=[RAIN, RAIN]), "Sky\n\nOld.\n\nIt rains.\n\nIt rains."),
]


@pytest.mark.parametrize(("block", "shown"), READ)
async def test_blocks_that_say_something_are_read(block, shown):
    prompt = await prompt_of(messages=[{"role": "user", "content": [block]}])
    assert prompt == f"<user>{shown}<end><assistant>"
    result = {"type": "tool_result", "tool_use_id": "x", "content": [block]}
    prompt = await prompt_of(messages=[*ASKED, {"role": "user", "content": [result]}])
    assert prompt == f"<user>Rain?<end><tool>{shown}x<end><assistant>"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (document(type="base64", media_type="application/pdf", data="x"), "no plain text"),
        (document(type="content", content=[RAIN, PICTURE]), "no plain text"),
        (document(type="content", content=[{}]), "messages[0].content[0]"),
        (document(type=[]), "no plain text"),
        ({**FOUND, "content": None}, "holds a search result that is no plain text"),
        ({"type": "container_upload", "file_id": "f"}, "files are not stored here"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "holds `input_audio`, and this API"),
        ({**FOUND, "content": [{"text": "x"}]}, "messages[0].content[0]"),
    ],
)
async def test_blocks_that_cannot_be_read_are_refused(block, words):
    found = error(await asked(engine(), messages=[{"role": "user", "content": [block]}]))
    assert found[:2] == (400, "invalid_request_error") and words in found[2]


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
async def test_a_thought_that_is_not_shown_comes_back_to_the_model(http, monkeypatch, kind):
    let_think(monkeypatch)
    thinking = {"type": kind, "display": "omitted"}
    text = "<think>Hm, rain.</think>Yes."
    message = reply(await asked(engine(text), http, thinking=thinking))
    streamed, _, usage = folded(
        events(await asked(engine(text), http, thinking=thinking, stream=True))
    )
    assert message.content == streamed and message.usage == usage
    thought, said = message.content
    assert isinstance(thought, replies.ThinkingContent) and thought.thinking == ""
    assert thought.signature and "rain" not in thought.signature
    assert said == replies.TextContent("Yes.")
    past = [{"type": "thinking", "thinking": "", "signature": thought.signature}]
    turns = [*ASKED, {"role": "assistant", "content": [*past, RAIN]}, *ASKED]
    assert "<assistant>Hm, rain.It rains.<end>" in await prompt_of(messages=turns)
    foreign = {"type": "thinking", "thinking": "", "signature": "ErUB"}
    turns[1] = {"role": "assistant", "content": [foreign, RAIN]}
    assert "<assistant>It rains.<end>" in await prompt_of(messages=turns)


async def test_tokens_of_thoughts_are_counted(http, monkeypatch):
    let_think(monkeypatch)
    usage = reply(await asked(engine("<think>Hm.</think>Yes."), http)).usage
    details = usage.output_tokens_details
    assert isinstance(details, replies.MessageTokensDetails)
    assert details.thinking_tokens == len("<think>Hm.</think>")
    plain = reply(await asked(engine("Yes."), http)).usage
    assert plain.output_tokens_details == replies.MessageTokensDetails(0)
