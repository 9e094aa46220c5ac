"""OpenAI's compaction: a conversation becomes its user's messages and a summary of the rest."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openai.types.responses import (
    CompactedResponse,
    ResponseCompactionItem,
    ResponseInputMessageItem,
    ResponseUsage,
)

from tests.router.http.dialects.conversations import ROME, TEMPLATE, engine
from tests.router.http.dialects.responses_answers import PATH, TOOLS, error
from tests.router.http.dialects.test_responses_kept import Talk
from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import data_url, seeing_engine
from tests.router.http.served import Answer, served
from tests.router.http.thinking import let_think
from tests.router.media.image_files import encode, noise
from tgi_trio.router.http.dialects.responses.compaction import list_output
from tgi_trio.router.http.routes import compaction
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

USER = {"role": "user", "content": "Rain?"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "wet"}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "It rains."}]}


class Compacting(Talk):
    """A client that has conversations made shorter."""

    async def try_compacting(self, **body: Any) -> Answer:
        return await self._client.post(f"{PATH}/compact", {"model": "test/model", **body})

    async def compact(self, **body: Any) -> list[dict[str, Any]]:
        """Return the items that take a conversation's place, which are of OpenAI's types."""
        answer = await self.try_compacting(**body)
        assert answer.status == 200, answer.body
        found = answer.json()
        assert found.keys() == CompactedResponse.model_fields.keys() - {"image"}
        assert found["object"] == "response.compaction"
        assert ResponseUsage.model_validate(found["usage"], strict=True).output_tokens > 0
        output: list[dict[str, Any]] = found["output"]
        for item in output[:-1]:
            ResponseInputMessageItem.model_validate(item, strict=True)
        ResponseCompactionItem.model_validate(output[-1], strict=True)
        return output


@asynccontextmanager
async def talk(engine: FakeEngine) -> AsyncIterator[Compacting]:
    async with served(engine) as server:
        yield Compacting(server, await server.connect())


async def test_users_messages_stay_and_a_summary_stands_for_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_think(monkeypatch)
    async with talk(engine("<think>Hm.</think>\nRome is wet.")) as one:
        more = {**USER, "content": "And tomorrow?", "id": "mine"}
        output = await one.compact(input=[USER, CALL, RESULT, SAID, more], instructions="Be brief.")
        asked = one.prompt()
        assert "Be brief." in asked and "wet" in asked and "It rains." in asked
        assert asked.index("And tomorrow?") < asked.index("Write a summary")
        texts = [item["content"][0]["text"] for item in output[:-1]]
        assert texts == ["Rain?", "And tomorrow?"] and output[1]["id"] == "mine"
        # The conversation goes on from what came back, and the task is no part of it.
        await one.answer([*output, {**USER, "content": "So?"}])
        going_on = one.prompt()
        assert "Rome is wet." in going_on and "It rains." not in going_on
        assert "Write a summary" not in going_on and "Hm." not in going_on
        places = [going_on.index(text) for text in ("Rain?", "And tomorrow?", "Rome", "So?")]
        assert places == sorted(places)


async def test_tools_are_shown_as_in_the_conversation_and_never_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt begins as that of the conversation, so that what is cached of it is found."""
    let_think(monkeypatch)
    async with talk(engine("Rome is wet.")) as one:
        await one.answer([USER], instructions="Be brief.", tools=TOOLS)
        before = one.prompt().removesuffix("<assistant>")
        assert before.startswith('[{"type"') and "weather" in before
        await one.compact(input=[USER, SAID], instructions="Be brief.", tools=TOOLS)
        assert one.prompt().startswith(before)
        grammar = one.request().sampling.grammar
        assert grammar and "weather" not in grammar, "prose in which no call begins"


async def test_where_a_template_shows_no_tools_the_model_is_not_told_to_call_them() -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    async with talk(engine("Rome is wet.", plain)) as one:
        await one.compact(input=[USER, SAID], tools=TOOLS)
        assert "functions you can call" not in one.prompt() and "weather" not in one.prompt()


async def test_what_shapes_the_prompt_is_that_of_the_conversation() -> None:
    template = TEMPLATE + "{{ reasoning_effort }}{{ mood }}"
    async with talk(engine("Rome is wet.", template)) as one:
        more = {"reasoning": {"effort": "high"}, "chat_template_kwargs": {"mood": "glad"}}
        await one.compact(input=[USER, SAID], **more)
        assert one.prompt().endswith("<assistant>highglad")


async def test_a_summary_is_summarised_again() -> None:
    async with talk(engine("Rome is wet.")) as one:
        first = await one.compact(input=[USER, SAID])
        second = await one.compact(input=[*first, {**USER, "content": "So?"}])
        assert "Rome is wet." in one.prompt()
        assert [item["type"] for item in second] == ["message", "message", "compaction"]


async def test_what_is_kept_is_compacted_by_its_id() -> None:
    async with talk(engine("It rains.")) as one:
        first = await one.answer("Rain?", tools=[])
        output = await one.compact(previous_response_id=first.id)
        assert [item["type"] for item in output] == ["message", "compaction"]
        both = await one.compact(previous_response_id=first.id, input="Snow?")
        assert [item["content"][0]["text"] for item in both[:-1]] == ["Rain?", "Snow?"]
        # Its items may be kept, and referred to, like any others.
        second = await one.answer([*output, USER])
        await one.answer([{"type": "item_reference", "id": output[-1]["id"]}, USER])
        assert "Summary of what was said" in one.prompt() and second.status == "completed"


async def test_an_image_stays() -> None:
    async with seeing_engine(most=4000) as seeing, talk(seeing) as one:
        url = data_url(encode(noise(200, 200)))
        image = {"type": "input_image", "detail": "auto", "image_url": url}
        shown = {**USER, "content": [{"type": "input_text", "text": "What?"}, image]}
        output = await one.compact(input=[shown, SAID])
        assert output[0]["content"][1]["image_url"] == url


@pytest.mark.parametrize(
    ("answer", "body", "status", "code", "words"),
    [
        ("x", {}, 400, "invalid_value", "`input` or `previous_response_id` must say what"),
        ("x", {"input": []}, 400, "invalid_value", "must say what is to be compacted"),
        ("x", {"input": 5}, 400, "invalid_type", "input: Expected"),
        ("x", {"previous_response_id": "resp_1"}, 404, "previous_response_not_found", "not found"),
        ("x" * 9000, {"input": "Rain?"}, 400, "context_length_exceeded", "The summary was cut off"),
        ("x", {"input": "Rain? " * 4000}, 400, "context_length_exceeded", "maximum context length"),
        (" \n", {"input": "Rain?"}, 500, "server_error", "the model wrote no summary"),
    ],
)
async def test_what_cannot_be_compacted_is_refused(
    answer: str, body: dict[str, Any], status: int, code: str, words: str
) -> None:
    async with talk(engine(answer)) as one:
        found = error(await one.try_compacting(**body))
        assert (found[0], found[2]) == (status, code) and words in found[3]


@pytest.mark.parametrize("content", ["gAAAAA", None, "tgi-trio:", HERMES.write([ROME])])
async def test_a_compaction_of_another_server_is_refused(content: str | None) -> None:
    """It stands for most of the conversation: without it the answer would be to something else."""
    async with talk(engine()) as one:
        answer = await one.ask([{"type": "compaction", "encrypted_content": content}, USER])
        assert error(answer)[0] == 400
        assert answer.json()["error"]["param"] == "input[0].encrypted_content"


async def test_the_answer_is_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be megabytes of images in it."""
    here: list[bool] = []

    def noted(*given: Any) -> Any:
        here.append(threading.current_thread() is threading.main_thread())
        return list_output(*given)

    monkeypatch.setattr(compaction, "list_output", noted)
    async with talk(engine("Rome is wet.")) as one:
        await one.compact(input=[USER, SAID])
    assert here == [False]
