"""A structural tag beside the tools of a chat: which grammar is sent, how answers are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.router.http.fake_engine import FakeEngine, byte_tokenizer
from tests.router.http.served import Answer, served
from tests.router.http.test_tools import BODY, ROME, TEMPLATE, chunks_of, folded, message_of
from tests.router.http.thinking import let_think
from tests.router.http.tool_calls import called
from tests.router.text.families import BY_NAME
from tests.router.text.test_structural_tags import CALL, Reader
from tgi_trio.grammars.compiler import compile_grammar
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

FREE: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]}
TAG: dict[str, Any] = {"type": "structural_tag", "format": FREE}
SHAPES: list[dict[str, Any]] = [
    {"response_format": TAG},
    {"structural_tag": json.dumps(TAG)},
    {"structured_outputs": {"structural_tag": TAG}},
]


def engine(answer: str, template: str = TEMPLATE, special: tuple[str, ...] = ()) -> FakeEngine:
    found = FakeEngine(lambda prompt: answer, tokenizer=byte_tokenizer(special))
    found.chat_template = ChatTemplate({"default": template}, {})
    return found


async def ask(found: FakeEngine, more: dict[str, Any]) -> Answer:
    async with served(found) as server:
        client = await server.connect()
        return await client.post("/v1/chat/completions", {**BODY, **more})


def fits(found: FakeEngine, folder: Path, text: str) -> bool:
    """Return whether an answer fits the grammar that was submitted last."""
    reader = Reader(found.tokenizer, folder)
    matcher = compile_grammar(found.submitted[-1].sampling.grammar or "", reader.tokens)
    return reader.takes(matcher, text) and matcher.is_accepting()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stream", [False, True])
async def test_both_hold(tmp_path: Path, shape: dict[str, Any], stream: bool) -> None:
    said = "So <call>abc</call> and: "
    found = engine(said + HERMES.write([ROME]))
    answer = await ask(found, {**shape, "stream": stream})
    if stream:
        content, calls, reason = folded(chunks_of(answer))
        assert [(name, json.loads(given)) for name, given in calls] == [ROME]
    else:
        message, reason = message_of(answer)
        content = message.content or ""
        assert [(name, json.loads(given)) for name, given in called(message)] == [ROME]
    assert content.strip() == said.strip()
    assert reason == "tool_calls"
    assert fits(found, tmp_path, said + HERMES.write([ROME]))
    assert fits(found, tmp_path, said)
    assert not fits(found, tmp_path, f"<call>5</call>{HERMES.write([ROME])}")
    assert not fits(found, tmp_path, HERMES.write([("other", {})]))


async def test_what_tool_choice_leaves_of_them(tmp_path: Path) -> None:
    found = engine("")
    for choice, calls, tags in (("none", True, True), ("required", True, False)):
        await ask(found, {**SHAPES[0], "tool_choice": choice})
        assert fits(found, tmp_path, HERMES.write([ROME])) is calls
        assert fits(found, tmp_path, "<call>abc</call>") is tags
        # Without tools nothing is known of calls: all of it is free text.
        assert fits(found, tmp_path, HERMES.write([("other", {})])) is (choice == "none")


async def test_on_channels_the_tag_is_that_of_the_answer(tmp_path: Path) -> None:
    family = BY_NAME["gpt-oss"]
    call = (
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
        '<|message|>{"city":"Rome"}<|call|>'
    )
    for special in ((), family.added):
        found = engine("", family.source, special)
        answer = await ask(found, SHAPES[0])
        assert answer.status == 200, answer.body
        final = "<|channel|>final<|message|>"
        assert fits(found, tmp_path, f"{final}so <call>abc</call>.")
        assert not fits(found, tmp_path, f"{final}so <call>5</call>.")
        assert fits(found, tmp_path, call.removeprefix("<|start|>assistant"))
        # No mark of a channel is free text, so that what calls begins no other way.
        assert not fits(
            found, tmp_path, f"{final}so{call.replace('Rome', '5').replace('json', 'x')}"
        )


@pytest.mark.parametrize("tools", [{}, {"tools": None}], ids=["tools", "alone"])
@pytest.mark.parametrize("special", [(), ("<think>", "</think>")], ids=["spelled", "tokens"])
async def test_free_text_begins_no_thought(
    monkeypatch: Any, tmp_path: Path, tools: dict[str, Any], special: tuple[str, ...]
) -> None:
    """It would be one beyond its budget."""
    let_think(monkeypatch)
    found = engine("", special=special)
    answer = await ask(found, {**SHAPES[0], "thinking_token_budget": 3, **tools})
    assert answer.status == 200, answer.body
    assert fits(found, tmp_path, "<think>abc</think>so <call>abc</call>")
    assert fits(found, tmp_path, "so <call>abc</call>")
    assert not fits(found, tmp_path, "<think>abcdefghij</think>so")
    assert not fits(found, tmp_path, "<think>abc</think>so <think>abcdefghij</think>")


async def test_a_tag_may_be_a_thought_of_the_clients_own(monkeypatch: Any, tmp_path: Path) -> None:
    let_think(monkeypatch)
    own = {**CALL, "begin": "<think>", "end": "</think>"}
    given = {"format": {**FREE, "triggers": ["<think>"], "tags": [own]}}
    found = engine("", special=("<think>", "</think>"))
    await ask(found, {"structural_tag": given})
    assert fits(found, tmp_path, "so <think>abc</think>.")
    assert not fits(found, tmp_path, "so <think>5</think>.")


async def test_other_forms_are_still_refused_beside_tools() -> None:
    for more in ({"regex": "a"}, {"structural_tag": TAG, "regex": "a"}):
        answer = await ask(engine(""), more)
        assert answer.status == 422
        assert "or give a structural tag" in answer.json()["error"]["message"]
    two = await ask(engine(""), {**SHAPES[0], **SHAPES[1]})
    assert two.status == 422 and "give one of them" in two.json()["error"]["message"]
