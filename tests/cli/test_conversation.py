"""What `chat` sends: images and sounds go with the next message, once it is answered."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from tgi_trio.cli.conversation import LARGEST, Conversation
from tgi_trio.cli.options import ChatOptions
from tgi_trio.client.http import Client
from tgi_trio.errors import GenerationError

pytestmark = pytest.mark.trio


class Scripted:
    """A client that answers as it is told."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def events(
        self, path: str, body: dict[str, Any]
    ) -> AsyncGenerator[tuple[float, dict[str, Any]]]:
        self.asked.append(body)
        yield 0.0, self.answers.pop(0)


async def test_an_answer_is_as_long_as_there_is_room_for_unless_told() -> None:
    for given, sent in ((None, {}), (9, {"max_tokens": 9})):
        client = Scripted(SAYS)
        conversation = Conversation(cast(Client, client), ChatOptions(max_tokens=given))
        conversation.reset()
        assert [piece.text async for piece in conversation.say("Hi")] == ["Red."]
        (body,) = client.asked
        assert {name: value for name, value in body.items() if name == "max_tokens"} == sent


FAILS = {"error": {"message": "overloaded"}}
SAYS = {"choices": [{"delta": {"content": "Red."}}]}


async def test_an_image_waits_until_it_was_seen(tmp_path: Path) -> None:
    client = Scripted(FAILS, SAYS, SAYS)
    conversation = Conversation(cast(Client, client), ChatOptions())
    conversation.reset()
    file = tmp_path / "red.jpg"
    file.write_bytes(b"bytes")
    conversation.attach(file)
    (tmp_path / "note").write_bytes(b"sound")
    conversation.attach(tmp_path / "note", "audio_url")
    with pytest.raises(OSError):
        conversation.attach(tmp_path / "none.png")
    with pytest.raises(GenerationError):
        [piece async for piece in conversation.say("What is it?")]
    for text in ("What is it?", "Sure?"):
        assert [piece.text async for piece in conversation.say(text)] == ["Red."]
    url = f"data:image/jpeg;base64,{base64.b64encode(b'bytes').decode()}"
    sound = f"data:audio/wav;base64,{base64.b64encode(b'sound').decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": sound}},
        {"type": "text", "text": "What is it?"},
    ]
    sent = [body["messages"][-1]["content"] for body in client.asked]
    assert sent == [content, content, "Sure?"]
    assert client.asked[2]["messages"][0]["content"] == content


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("zeros", "it is no file, but a device or a pipe"),  # a link to /dev/zero
        ("pipe", "nobody writes to the pipe"),
        ("folder", "Is a directory"),
        ("large", "it is larger than 64 MiB"),
        ("/proc/kmsg", "it is empty"),  # read, it would wait for the kernel to say something
        ("empty.png", "it is empty"),
    ],
)
async def test_what_is_no_image_is_not_read_without_end(
    name: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "zeros").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.png").touch()
    with open(tmp_path / "large", "wb") as file:
        file.truncate(LARGEST + 1)  # all of it a hole
    conversation = Conversation(cast(Client, Scripted()), ChatOptions())
    with pytest.raises(OSError) as error:
        conversation.attach(tmp_path / name)
    assert error.value.strerror == why and not conversation.attached
    with open(tmp_path / "large", "wb") as file:
        file.truncate(LARGEST)
    conversation.attach(tmp_path / "large")


async def test_a_call_of_a_custom_tool_goes_back_as_it_came() -> None:
    pieces = [
        {"index": 0, "id": "a", "type": "custom", "custom": {"name": "patch", "input": ""}},
        {"index": 0, "custom": {"input": "+ x"}},
    ]
    calls = {"choices": [{"delta": {"tool_calls": pieces}}]}
    client = Scripted(calls, SAYS)
    conversation = Conversation(cast(Client, client), ChatOptions())
    conversation.reset()
    assert [piece async for piece in conversation.say("Patch!")] == []
    (call,) = conversation.calls
    assert (call.name, call.arguments) == ("patch", "+ x")
    assert [piece.text async for piece in conversation.say("Go on.")] == ["Red."]
    sent = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "+ x"}}
    assert client.asked[1]["messages"][-3]["tool_calls"] == [sent]
