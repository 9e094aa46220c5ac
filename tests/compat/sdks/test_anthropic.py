"""The `anthropic` package: messages, streams, counts and errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.compat.agents.scripted import ANSWER, COMMAND, QUESTION, THOUGHT
from tests.compat.conftest import KEY
from tests.compat.sdks.conftest import TOOL, Shell
from tests.compat.sdks.test_openai import CITY, PARAMETERS
from tests.system.server import ServerProcess
from tgi_trio.router.http.dialects.anthropic.schema import MessagesRequest

package = pytest.importorskip("anthropic", reason="pip install -e '.[sdks]'")
pytestmark = pytest.mark.system

SHELL: Any = {"name": TOOL, "description": "Runs a command", "input_schema": PARAMETERS}
WEATHER: Any = {"name": "weather", "input_schema": CITY}


@pytest.fixture
def client(scripted: ServerProcess) -> Iterator[Any]:
    with package.Anthropic(base_url=scripted.url, api_key="-", max_retries=0) as client:
        yield client


@pytest.fixture
def demo(served: ServerProcess) -> Iterator[Any]:
    with package.Anthropic(base_url=served.url, api_key="-", max_retries=0) as client:
        yield client


def ask(client: Any, stream: bool, **options: Any) -> Any:
    """Return a message, put together by the SDK where it is streamed."""
    asked = {"model": "scripted", "max_tokens": 1000, **options}
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        for _ in events:
            pass
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_of_messages(client: Any, shell: Shell, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    options: Any = {"tools": [SHELL], "system": "Be brief.", "thinking": {"type": "adaptive"}}
    first = ask(client, stream, messages=messages, **options)
    thought, call = first.content
    assert (thought.type, thought.thinking) == ("thinking", THOUGHT) and thought.signature
    assert (call.type, call.name, first.stop_reason) == ("tool_use", TOOL, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": shell.run(**call.input)}
    messages.append({"role": "assistant", "content": first.content})
    messages.append({"role": "user", "content": [result]})
    last = ask(client, stream, messages=messages, **options)
    assert last.content[-1].text == ANSWER and last.stop_reason == "end_turn"
    assert shell.commands == [COMMAND]
    usage = last.usage
    assert usage.cache_read_input_tokens > usage.input_tokens
    count = client.messages.count_tokens(model="scripted", messages=messages, **options)
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_the_embedded_model_is_held_to_tools(demo: Any) -> None:
    options: Any = {
        "model": "tgi",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "Where is it warm?"}],
        "tools": [WEATHER],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    whole = demo.messages.create(**options, extra_body={"temperature": 0})
    (call,) = whole.content
    assert call.input["city"] in ("Rome", "Paris") and whole.stop_reason == "tool_use"
    with demo.messages.stream(**options, extra_body={"temperature": 0}) as events:
        kinds = {event.type for event in events}
        (streamed,) = events.get_final_message().content
    assert streamed.input == call.input and "input_json" in kinds


def test_how_an_answer_ends(demo: Any) -> None:
    asked: Any = {
        "model": "tgi",
        "messages": [{"role": "user", "content": "What is continuous batching?"}],
        "extra_body": {"temperature": 0},
    }
    whole = demo.messages.create(**asked, max_tokens=20)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 20
    word = whole.content[0].text.split()[2]
    stopped = demo.messages.create(**asked, max_tokens=20, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert whole.content[0].text.startswith(stopped.content[0].text)
    with demo.messages.stream(**asked, max_tokens=20) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text


def test_models(client: Any) -> None:
    *_, model = client.models.list()  # behind the name of its folder
    assert client.models.retrieve("scripted") == model
    assert (model.id, model.type, model.lifecycle) == ("scripted", "model", "active")
    assert 0 < model.max_input_tokens <= model.max_tokens
    with pytest.raises(package.NotFoundError):
        client.models.retrieve("other")


def test_errors(demo: Any, guarded: ServerProcess) -> None:
    asked: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(package.NotFoundError) as unknown:
        demo.messages.create(model="other", **asked)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert unknown.value.request_id == unknown.value.body["request_id"]
    with pytest.raises(package.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ "):
        long = [{"role": "user", "content": "word " * 5000}]
        demo.messages.create(model="tgi", max_tokens=5, messages=long)
    for given in ({"api_key": KEY}, {"auth_token": KEY}):
        with package.Anthropic(base_url=guarded.url, max_retries=0, **given) as client:
            assert client.messages.create(model="mine", **asked).content
    with package.Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(package.AuthenticationError):
            client.messages.create(model="mine", **asked)


def test_every_field_that_the_sdk_sends_is_known() -> None:
    from anthropic.types import message_create_params

    sent: set[str] = set()
    for kind in ("NonStreaming", "Streaming"):
        shape = getattr(message_create_params, f"MessageCreateParams{kind}")
        sent |= shape.__required_keys__ | shape.__optional_keys__
    served = {field.encode_name for field in msgspec.structs.fields(MessagesRequest)}
    page = (Path(__file__).parents[3] / "docs/messages.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if "for whose account" in line]
    assert sent - served <= set(re.findall(r"`(\w+)`", row.split("|")[1]))
