"""A conversation as a client of the server sees it: messages, and answers that come in pieces."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgi_trio.cli.options import ChatOptions
from tgi_trio.client.http import Client
from tgi_trio.errors import GenerationError

Message = dict[str, Any]
NO_RESULT = "There is no result."  # of a call that a person leaves without one


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of an answer as it comes."""

    text: str
    thought: bool = False  # what the model thinks before it answers


@dataclass(slots=True)
class Call:
    """A call of a tool, as much of it as there is."""

    id: str = ""
    name: str = ""
    arguments: str = ""  # JSON, unless the answer was cut off; of a custom tool, its text
    custom: bool = False

    def field(self) -> Message:
        """Return the call as messages have it."""
        if self.custom:
            made = {"name": self.name, "input": self.arguments}
            return {"id": self.id, "type": "custom", "custom": made}
        made = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": made}


@dataclass(slots=True)
class _Heard:
    """One answer so far."""

    content: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)

    def take(self, delta: dict[str, Any]) -> list[Piece]:
        """Add a delta; return what there is to show of it at once."""
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        content = delta.get("content") or ""
        for news in delta.get("tool_calls") or ():
            self._add_call(news)
        self.thought += thought
        self.content += content
        return [piece for piece in (Piece(thought, thought=True), Piece(content)) if piece.text]

    def _add_call(self, news: dict[str, Any]) -> None:
        index = news.get("index", 0)
        while len(self.calls) <= index:
            self.calls.append(Call())
        call, made = self.calls[index], news.get("function") or news.get("custom") or {}
        call.id = call.id or news.get("id") or ""
        call.custom = call.custom or "custom" in news
        call.name += made.get("name") or ""
        call.arguments += made.get("arguments") or made.get("input") or ""

    def message(self) -> Message | None:
        """Return the answer as a message of the history; None where nothing was heard."""
        if not (self.content or self.thought or self.calls):
            return None
        message: Message = {"role": "assistant", "content": self.content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [call.field() for call in self.calls]
        return message


@dataclass
class Conversation:
    """The messages so far, and how the next answer is asked for."""

    client: Client
    options: ChatOptions
    tools: list[Any] = field(default_factory=list)  # as the API takes them
    thinking: bool | None = None  # None: as the model's template does by itself
    messages: list[Message] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of the last answer: they want results
    thought: str = ""  # of the last answer
    images: list[str] = field(default_factory=list)  # data URLs, for what is said next

    def attach(self, path: Path) -> None:
        """Show a file with what is said next; raises OSError. What it is, the server finds out."""
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        self.images.append(f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}")

    def reset(self, system: str | None = None) -> None:
        """Begin anew; the system message stays unless another is given."""
        text = system if system is not None else self.options.system
        self.messages = [{"role": "system", "content": text}] if text else []
        self.calls, self.thought, self.images = [], "", []

    async def say(self, text: str) -> AsyncGenerator[Piece]:
        """Say `text`, with images that wait, and yield the pieces of the answer.

        All become part of the history. An answer that is broken off leaves what was heard of it;
        one that failed leaves nothing.
        Raises GenerationError for an error event, and what `Client.events` raises.
        """
        unanswered = [_result(call, NO_RESULT) for call in self.calls]
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        content = [*shown, {"type": "text", "text": text}] if shown else text
        said = {"role": "user", "content": content}
        try:
            async with aclosing(self._answer([*unanswered, said])) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if said in self.messages:
                self.images = []

    async def give_results(self, results: list[str]) -> AsyncGenerator[Piece]:
        """Say what the calls have found, in their order; as `say`."""
        found = zip(self.calls, results, strict=True)
        async with aclosing(self._answer([_result(*each) for each in found])) as pieces:
            async for piece in pieces:
                yield piece

    async def _answer(self, news: list[Message]) -> AsyncGenerator[Piece]:
        heard = _Heard()
        try:
            body = self._body([*self.messages, *news])
            async with aclosing(self.client.events("/v1/chat/completions", body)) as events:
                async for _, event in events:
                    if "error" in event:
                        raise GenerationError(_message(event))
                    for choice in event.get("choices", ()):
                        for piece in heard.take(choice["delta"]):
                            yield piece
        finally:
            if (message := heard.message()) is not None:
                self.messages += [*news, message]
                self.calls, self.thought = heard.calls, heard.thought

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "tgi",  # the base model, whatever its name
            "messages": messages,
            "stream": True,
            "max_tokens": self.options.max_tokens,
            "temperature": self.options.temperature,
        }
        if self.tools:
            body["tools"] = self.tools
        if self.thinking is not None:  # templates know the switch by one of these names
            names = ("enable_thinking", "thinking")
            body["chat_template_kwargs"] = dict.fromkeys(names, self.thinking)
        return body


def _result(call: Call, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def _message(event: dict[str, Any]) -> str:
    error = event["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
