"""Chats of a model that thinks, asked for and read as their clients do."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.router.http.fake_engine import TEMPLATE, FakeEngine, byte_tokenizer
from tests.router.http.served import Answer, served
from tests.router.http.tool_calls import piece
from tgi_trio.router.http.messages import replies
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.call_formats import HERMES

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Rain?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
BODY = {"messages": USER, "max_tokens": 500}
CALL = HERMES.write([("weather", {"city": "Rome"})])
# Qwen's manners, in short: the prompt ends inside a thought unless it is switched off.
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.last %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{{ '<think></think>' if enable_thinking is false else '<think>' }}{% endif %}"
)
# Any marks will do where the model opens its thoughts itself.
MAY = "{# <think> </think> #}" + TEMPLATE
SPECIAL = ("<think>", "</think>", "<|end|>")


def engine(answer: str, template: str = THINKS, special: tuple[str, ...] = ()) -> FakeEngine:
    found = FakeEngine(lambda prompt: answer, tokenizer=byte_tokenizer(special))
    found.chat_template = ChatTemplate({"default": template}, {})
    return found


async def asked(engine: FakeEngine, **more: Any) -> Answer:
    async with served(engine) as server:
        client = await server.connect()
        return await client.post(CHAT, {**BODY, **more})


def choice_of(answer: Answer) -> replies.ChatCompletionComplete:
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=replies.ChatCompletion).choices[0]


def folded(answer: Answer) -> tuple[str, str, list[tuple[str, str]], str | None, list[str]]:
    """Return thought, content, calls, finish reason and tokens with log-probabilities."""
    *events, done = answer.events()
    assert done == b"[DONE]"
    thought, content, reason = "", "", None
    calls: list[Any] = []
    tokens: list[str] = []
    for event in events:
        chunk = msgspec.json.decode(event, type=replies.ChatCompletionChunk)
        for choice in chunk.choices:
            delta = choice.delta
            assert delta.reasoning == delta.reasoning_content
            thought += delta.reasoning_content or ""
            content += delta.content or ""
            for call in delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append([*piece(call)])
                else:
                    calls[call.index][1] += piece(call)[1]
            if choice.logprobs:
                tokens += [entry.token for entry in choice.logprobs.content]
            reason = choice.finish_reason
    return thought, content, [tuple(call) for call in calls], reason, tokens
