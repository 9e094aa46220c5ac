"""The prompt that a chat's messages make: parts of a message, a final one that is continued."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from tests.router.http.openai_answers import engine
from tests.router.http.served import served
from tgi_trio.router.http import preparing, rendering
from tgi_trio.router.http.messages import service_replies
from tgi_trio.router.text.chat_template import ChatTemplate

pytestmark = pytest.mark.trio

USER = [{"role": "user", "content": "Yo"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLS = [{**CALL, "id": f"call_{i}"} for i in range(30)]
TOOLS = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(300)]


async def test_template_problems_are_422():
    fake = engine()
    async with served(fake) as server:
        client = await server.connect()
        empty = await client.post("/v1/chat/completions", {"messages": []})
        fake.chat_template = None
        missing = await client.post("/v1/chat/completions", {"messages": USER, "stream": True})
    assert empty.status == missing.status == 422
    assert empty.json()["error_type"] == "template_error"
    assert missing.json()["error"]["message"] == "Template error: template not found"


async def test_a_final_message_of_the_assistant_is_continued():
    async with served(engine()) as server:
        client = await server.connect()
        messages = [*USER, {"role": "assistant", "content": "I say"}]
        await client.post("/v1/chat/completions", {"messages": messages})
        body = {"messages": messages, "continue_final_message": False}
        await client.post("/v1/chat/completions", body)
    prompts = [server.engine.tokenizer.decode(r.prompt_ids) for r in server.engine.submitted]
    assert prompts[0] == "<user>Yo\n<assistant>I say"
    assert prompts[1] == "<user>Yo\n<assistant>I say\n<assistant>"


async def test_a_final_message_that_the_template_changes_is_followed_by_a_new_one():
    one = engine()
    template = (  # many drop thoughts
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    one.chat_template = ChatTemplate({"default": template}, {})
    messages = [*USER, {"role": "assistant", "content": "I </think>say"}]
    async with served(one) as server:
        client = await server.connect()
        answer = await client.post("/chat_tokenize", {"messages": messages})
        asked = {"messages": messages, "continue_final_message": True}
        refused = await client.post("/chat_tokenize", asked)
    assert answer.json()["templated_text"] == "<user>Yo<assistant>say<assistant>"
    # Where it was asked for, it is not done in another way.
    assert (refused.status, b"continue_final_message" in refused.body) == (422, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat_tokenize"])
async def test_a_message_is_either_continued_or_followed_by_a_new_one(path):
    messages = [*USER, {"role": "assistant", "content": "I say"}]
    async with served(engine()) as server:
        client = await server.connect()
        both = {"add_generation_prompt": True, "continue_final_message": True}
        refused = await client.post(path, {"messages": messages, **both})
        for more in ({"add_generation_prompt": True}, {"continue_final_message": True}):
            answer = await client.post("/chat_tokenize", {"messages": messages, **more})
            new = "\n<assistant>" if "add_generation_prompt" in more else ""
            assert answer.json()["templated_text"] == f"<user>Yo\n<assistant>I say{new}"
    assert refused.status == 422
    text = "`continue_final_message` and `add_generation_prompt` cannot both be true"
    assert text in refused.body.decode()


async def test_content_parts_are_joined():
    async with served(engine()) as server:
        client = await server.connect()
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        answer = await client.post(
            "/chat_tokenize", {"messages": [{"role": "u", "content": parts}]}
        )
        image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
        refused = await client.post(
            "/v1/chat/completions", {"messages": [{"role": "u", "content": image}]}
        )
    reply = msgspec.json.decode(answer.body, type=service_replies.ChatTokenizeResponse)
    assert reply.templated_text == "<u>ab\n<assistant>"
    assert reply.tokenize_response[0].text == "<"
    assert refused.status == 422


def watch_rendering(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the thread of each rendering is added."""
    threads: list[int] = []

    def render(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return rendered(*args)

    rendered = rendering.render_with_tools
    for module in (rendering, preparing):
        monkeypatch.setattr(module, "render_with_tools", render)
    return threads


@pytest.mark.parametrize(
    ("messages", "elsewhere"),
    [
        ([{"role": "user", "content": "Hi"}], False),
        ([{"role": "user", "content": "x" * (1 << 19)}], True),
        ([{"role": "user", "content": str(i)} for i in range(300)], True),
        ([*USER, *[{"role": "assistant", "content": "", "tool_calls": CALLS}] * 10], True),
    ],
)
async def test_long_conversations_are_rendered_beside_the_loop(monkeypatch, messages, elsewhere):
    threads = watch_rendering(monkeypatch)
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/chat_tokenize", {"messages": messages})
    assert answer.status == 200, answer.body
    text = answer.json()["templated_text"]
    assert all(message["content"] in text for message in messages)
    assert [each != threading.get_ident() for each in threads] == [elsewhere]


async def test_many_tools_are_rendered_beside_the_loop(monkeypatch):
    threads, one = watch_rendering(monkeypatch), engine()
    one.chat_template = ChatTemplate({"default": "{{ tools | length }}"}, {})
    async with served(one) as server:
        client = await server.connect()
        answer = await client.post("/v1/chat/completions", {"messages": USER, "tools": TOOLS})
    assert answer.status == 200, answer.body
    assert server.engine.prompts == ["300"]
    assert [each != threading.get_ident() for each in threads] == [True]
