"""The `openai` package: responses and chats, with tools."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import openai as package
import pytest
from openai import OpenAI

from tests.compat.agents.scripted import ANSWER, COMMAND, QUESTION, THOUGHT
from tests.compat.sdks.conftest import TOOL, Shell
from tests.system.server import ServerProcess

pytestmark = pytest.mark.system

PARAMETERS: Any = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
    "additionalProperties": False,
}
FUNCTION: Any = {"type": "function", "name": TOOL, "parameters": PARAMETERS, "strict": True}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


@pytest.fixture
def client(scripted: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{scripted.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def ask(client: OpenAI, stream: bool, **options: Any) -> Any:
    """Return a response, put together by the SDK where it is streamed."""
    if not stream:
        return client.responses.create(model="scripted", **options)
    with client.responses.stream(model="scripted", **options) as events:
        for _ in events:
            pass
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_of_responses(client: OpenAI, shell: Shell, stream: bool) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    first = ask(client, stream, input=items, tools=[FUNCTION])
    thought, call = first.output
    assert thought.type == "reasoning" and thought.content[0].text == THOUGHT
    assert (call.type, call.name) == ("function_call", TOOL) and first.status == "completed"
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    result = shell.run(**json.loads(call.arguments))
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    last = ask(client, stream, input=items, tools=[FUNCTION])
    assert last.output_text == ANSWER and shell.commands == [COMMAND]
    # The head of the prompt is the same, and so is its cached prefix.
    assert last.usage.input_tokens_details.cached_tokens > first.usage.input_tokens // 2


def test_thoughts_are_carried_without_being_read(client: OpenAI) -> None:
    include: Any = ["reasoning.encrypted_content"]
    first = client.responses.create(
        model="scripted", input=QUESTION, tools=[FUNCTION], include=include, store=False
    )
    kept: Any = first.output[0].model_dump(exclude_none=True, exclude={"content"})
    assert kept["encrypted_content"] and first.model_dump()["store"] is False
    items: list[Any] = [{"role": "user", "content": QUESTION}, kept, first.output[1].model_dump()]
    with_thought = client.responses.create(model="scripted", input=items).usage
    without = client.responses.create(model="scripted", input=[items[0], items[2]]).usage
    assert with_thought is not None and without is not None
    assert with_thought.input_tokens > without.input_tokens


def test_the_embedded_model_is_held_to_forms_and_tools(openai: OpenAI) -> None:
    asked: Any = {"model": "tgi", "input": "Where is it warm?", "temperature": 0}
    form: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    whole = openai.responses.create(**asked, text=form)
    assert json.loads(whole.output_text)["city"] in ("Rome", "Paris")
    with openai.responses.stream(**asked, text=form) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_response()
    assert streamed.output_text == whole.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    choice: Any = {"type": "function", "name": "weather"}
    forced = openai.responses.create(
        **asked, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    (call,) = forced.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Paris")


def test_a_limit_and_the_texts_of_a_stream(openai: OpenAI) -> None:
    asked: Any = {"model": "tgi", "input": "What is continuous batching?", "temperature": 0}
    whole = openai.responses.create(**asked, max_output_tokens=7)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.output_tokens == 7
    deltas = [
        event.delta
        for event in openai.responses.create(**asked, max_output_tokens=7, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == whole.output_text != ""


def test_log_probabilities_of_texts(openai: OpenAI) -> None:
    asked: Any = {"model": "tgi", "input": "What is a ring buffer?", "temperature": 0}
    asked |= {"max_output_tokens": 7, "include": ["message.output_text.logprobs"]}
    whole = openai.responses.create(**asked, top_logprobs=2)
    (part,) = whole.output[-1].content
    assert part.type == "output_text" and part.logprobs
    assert "".join(each.token for each in part.logprobs) == whole.output_text
    for each in part.logprobs:
        best = each.top_logprobs[0]
        assert (best.token, best.logprob) == (each.token, each.logprob)
        assert len(each.top_logprobs) == 2
    with openai.responses.stream(**asked, top_logprobs=2) as events:
        told = [each for event in events if "text.delta" in event.type for each in event.logprobs]  # type: ignore[union-attr]
    assert [each.token for each in told] == [each.token for each in part.logprobs]


def test_a_custom_tool_is_held_to_its_grammar(openai: OpenAI) -> None:
    grammar = 'start: "move " SIDE\nSIDE: "left" | "right"\n'
    form: Any = {"type": "grammar", "syntax": "lark", "definition": grammar}
    tool: Any = {"type": "custom", "name": "robot", "format": form}
    choice: Any = {"type": "custom", "name": "robot"}
    asked: Any = {"model": "tgi", "input": "Go!", "tools": [tool], "tool_choice": choice}
    options: Any = {"max_output_tokens": 200, "temperature": 0, "parallel_tool_calls": False}
    output = openai.responses.create(**asked, **options).output
    (call,) = [item for item in output if item.type != "reasoning"]  # a thought may come first
    assert call.type == "custom_tool_call" and call.name == "robot"
    assert re.fullmatch("move (left|right)", call.input)


def test_what_is_kept(openai: OpenAI) -> None:
    asked: Any = {"model": "tgi", "temperature": 0, "max_output_tokens": 20}
    first = openai.responses.create(input="What is a ring buffer?", **asked)
    assert first.store
    second = openai.responses.create(input="Why?", previous_response_id=first.id, **asked)
    user: Any = [{"role": "user", "content": text} for text in ("What is a ring buffer?", "Why?")]
    sent_back: Any = [item.model_dump(exclude_none=True) for item in first.output]
    whole = openai.responses.create(input=[user[0], *sent_back, user[1]], store=False, **asked)
    assert whole.output_text == second.output_text and not whole.store
    assert whole.usage is not None and second.usage is not None
    assert whole.usage.input_tokens == second.usage.input_tokens
    assert openai.responses.retrieve(second.id) == second
    items = openai.responses.input_items.list(second.id, limit=1, order="asc")
    assert [item.type for item in items] == ["message", "message", "message"]  # page by page
    openai.responses.delete(first.id)
    for id in (first.id, whole.id):
        with pytest.raises(package.NotFoundError):
            openai.responses.retrieve(id)


def test_a_conversation_that_is_made_shorter(openai: OpenAI) -> None:
    user: Any = [{"role": "user", "content": text} for text in ("What is a ring buffer?", "Why?")]
    said: Any = {"role": "assistant", "content": "A queue in a ring of memory."}
    shorter = openai.responses.compact(model="tgi", input=[user[0], said])
    assert [item.type for item in shorter.output] == ["message", "compaction"]
    sent_back: Any = [item.to_dict(warnings=False) for item in shorter.output]
    answer = openai.responses.create(
        model="tgi", input=[*sent_back, user[1]], temperature=0, max_output_tokens=20
    )
    assert answer.output_text


LONG: dict[str, Any] = {"model": "tgi", "input": "What is continuous batching?", "temperature": 0}


def wait_for(openai: OpenAI, id: str) -> Any:
    """Return a response in the background once it has ended, as OpenAI's guide does."""
    while (found := openai.responses.retrieve(id)).status in ("queued", "in_progress"):
        time.sleep(0.01)
    return found


def test_in_the_background(openai: OpenAI) -> None:
    asked: Any = {**LONG, "max_output_tokens": 30}
    begun = openai.responses.create(**asked, background=True)
    assert begun.status in ("queued", "in_progress") and begun.background
    found = wait_for(openai, begun.id)
    waited = openai.responses.create(**asked)
    assert found.output_text == waited.output_text != ""
    assert found.status == waited.status
    assert found.usage.output_tokens == waited.usage.output_tokens
    going_on = openai.responses.create(**{**asked, "input": "Why?"}, previous_response_id=begun.id)
    assert going_on.previous_response_id == begun.id


def test_a_stream_in_the_background_is_taken_up_again(openai: OpenAI) -> None:
    asked: Any = {**LONG, "max_output_tokens": 30}
    stream = openai.responses.create(**asked, background=True, stream=True)
    told: list[Any] = []
    for event in stream:
        told.append(event)
        if len(told) == 8:
            break
    stream.close()
    id = told[0].response.id
    assert [each.type for each in told[:2]] == ["response.created", "response.queued"]
    last = told[-1].sequence_number
    told += openai.responses.retrieve(id, stream=True, starting_after=last)
    assert [each.sequence_number for each in told] == list(range(len(told)))
    texts = [each.delta for each in told if each.type == "response.output_text.delta"]
    found = wait_for(openai, id)
    assert "".join(texts) == found.output_text and told[-1].response == found


def test_one_in_the_background_is_cancelled(openai: OpenAI) -> None:
    asked: Any = {**LONG, "max_output_tokens": 400}
    begun = openai.responses.create(**asked, background=True)
    cancelled = openai.responses.cancel(begun.id)
    assert cancelled.status in ("cancelled", "completed", "incomplete")  # it may have been quick
    assert openai.responses.cancel(begun.id) == cancelled == openai.responses.retrieve(begun.id)
    waited = openai.responses.create(**{**LONG, "max_output_tokens": 5})
    with pytest.raises(package.BadRequestError, match="`background`"):
        openai.responses.cancel(waited.id)


def test_a_conversation(openai: OpenAI) -> None:
    system: Any = {"role": "system", "content": "Be brief."}
    kept = openai.conversations.create(items=[system], metadata={"topic": "rings"})
    asked: Any = {"model": "tgi", "temperature": 0, "max_output_tokens": 20}
    first = openai.responses.create(input="What is a ring?", conversation=kept.id, **asked)
    assert first.conversation is not None and first.conversation.id == kept.id
    second = openai.responses.create(input="Why?", conversation=kept.id, **asked)
    whole: Any = [system, {"role": "user", "content": "What is a ring?"}]
    whole += [item.model_dump(exclude_none=True) for item in first.output]
    whole.append({"role": "user", "content": "Why?"})
    sent = openai.responses.create(input=whole, store=False, **asked)
    assert sent.output_text == second.output_text
    assert sent.usage is not None and second.usage is not None
    assert sent.usage.input_tokens == second.usage.input_tokens
    items = list(openai.conversations.items.list(kept.id, order="asc", limit=2))  # page by page
    assert [item.type for item in items] == ["message"] * 5
    second_id = str(items[1].id)
    assert openai.conversations.items.retrieve(second_id, conversation_id=kept.id) == items[1]
    added = openai.conversations.items.create(kept.id, items=[{"role": "user", "content": "So?"}])
    openai.conversations.items.delete(str(added.data[0].id), conversation_id=kept.id)
    assert list(openai.conversations.items.list(kept.id, order="asc")) == items
    changed = openai.conversations.update(kept.id, metadata={"topic": "queues"})
    assert changed.metadata == {"topic": "queues"}
    assert openai.conversations.retrieve(kept.id) == changed
    assert openai.conversations.delete(kept.id).deleted
    with pytest.raises(package.NotFoundError) as gone:
        openai.responses.create(input="Why?", conversation=kept.id, **asked)
    assert gone.value.code == "conversation_not_found"


def test_errors(openai: OpenAI) -> None:
    with pytest.raises(package.NotFoundError) as unknown:
        openai.responses.create(model="tgi", input="Hi", previous_response_id="resp_1")
    assert unknown.value.code == "previous_response_not_found"
    with pytest.raises(package.NotFoundError):
        openai.responses.create(model="other", input="Hi")
    with pytest.raises(package.NotFoundError):
        openai.responses.retrieve("resp_1")
    with pytest.raises(package.BadRequestError) as long:
        openai.responses.create(model="tgi", input="word " * 5000)
    assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_of_chats(client: OpenAI, shell: Shell, stream: bool) -> None:
    function = {"name": TOOL, "parameters": PARAMETERS, "strict": True}
    options: Any = {"model": "scripted", "tools": [{"type": "function", "function": function}]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def answer() -> Any:
        if not stream:
            return client.chat.completions.create(messages=messages, **options).choices[0].message
        with client.chat.completions.stream(messages=messages, **options) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0].message

    first = answer()
    (call,) = first.tool_calls
    assert first.reasoning_content == THOUGHT
    result = shell.run(**json.loads(call.function.arguments))
    messages.append(first.model_dump(exclude_none=True, exclude={"parsed"}))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert answer().content == ANSWER and shell.commands == [COMMAND]
