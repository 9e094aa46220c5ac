"""A conversation from a client's side: messages, and answers that arrive in pieces."""

from __future__ import annotations

import base64
import errno
import mimetypes
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tgi_trio.cli.options import ChatOptions
from tgi_trio.client.http import Client
from tgi_trio.errors import GenerationError
from tgi_trio.whole_files import read_file

Message = dict[str, Any]
LARGEST: Final = 64 << 20  # bytes of a file that is attached
NO_RESULT = "There is no result."  # for a call whose result the user does not give


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer's text."""

    text: str
    thought: bool = False  # part of a thought


@dataclass(slots=True)
class Call:
    """A call of a tool, as far as it has arrived."""

    id: str = ""
    name: str = ""
    arguments: str = ""  # JSON, unless the answer was cut off; of a custom tool, its text
    custom: bool = False

    def field(self) -> Message:
        """Return the call in the form of messages."""
        if self.custom:
            made = {"name": self.name, "input": self.arguments}
            return {"id": self.id, "type": "custom", "custom": made}
        made = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": made}


@dataclass(slots=True)
class _PartialAnswer:
    """An answer as far as it has arrived."""

    content: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)

    def take(self, delta: dict[str, Any]) -> list[Piece]:
        """Add a delta; return the pieces to show."""
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
        """Return the answer as a message of the history; None if nothing has arrived."""
        if not (self.content or self.thought or self.calls):
            return None
        message: Message = {"role": "assistant", "content": self.content}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [call.field() for call in self.calls]
        return message


# Of files whose names do not say it.
_KINDS: Final = {"image_url": "image/png", "audio_url": "audio/wav"}


@dataclass
class Conversation:
    """The messages so far, and the settings of the next answer."""

    client: Client
    options: ChatOptions
    tools: list[Any] = field(default_factory=list)  # in the API's form
    thinking: bool | None = None  # None: the template's default
    messages: list[Message] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # of the last answer, without results so far
    thought: str = ""  # of the last answer
    # Parts of the next message: images and sounds.
    attached: list[dict[str, Any]] = field(default_factory=list)

    def attach(self, path: Path, part: str = "image_url") -> None:
        """Attach a file to the next message as a part; the server checks its type.

        `part`: the part's type, `image_url` or `audio_url`. Raises OSError for what cannot be read,
        is no file, is empty, or larger than LARGEST.
        """
        kind = mimetypes.guess_type(path.name)[0] or _KINDS[part]
        data = base64.b64encode(_read_attachment(path)).decode()
        self.attached.append({"type": part, part: {"url": f"data:{kind};base64,{data}"}})

    def reset(self, system: str | None = None) -> None:
        """Start again; the system message stays unless another one is given."""
        text = system if system is not None else self.options.system
        self.messages = [{"role": "system", "content": text}] if text else []
        self.calls, self.thought, self.attached = [], "", []

    async def say(self, text: str) -> AsyncGenerator[Piece]:
        """Send `text` with what is attached, and yield the pieces of the answer.

        All become part of the history. An interrupted answer is kept as far as it has arrived;
        nothing is kept of a failed one. Raises GenerationError for an error event, and what
        `Client.events` raises.
        """
        unanswered = [_result(call, NO_RESULT) for call in self.calls]
        parts = [*self.attached, {"type": "text", "text": text}]
        content = parts if self.attached else text
        message = {"role": "user", "content": content}
        try:
            async with aclosing(self._answer([*unanswered, message])) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if message in self.messages:
                self.attached = []

    async def give_results(self, results: list[str]) -> AsyncGenerator[Piece]:
        """Send the results of the calls, in order; as `say`."""
        found = zip(self.calls, results, strict=True)
        async with aclosing(self._answer([_result(*each) for each in found])) as pieces:
            async for piece in pieces:
                yield piece

    async def _answer(self, news: list[Message]) -> AsyncGenerator[Piece]:
        answer = _PartialAnswer()
        try:
            body = self._body([*self.messages, *news])
            async with aclosing(self.client.events("/v1/chat/completions", body)) as events:
                async for _, event in events:
                    if "error" in event:
                        raise GenerationError(_message(event))
                    for choice in event.get("choices") or ():
                        for piece in answer.take(choice.get("delta") or {}):
                            yield piece
        finally:
            if (message := answer.message()) is not None:
                self.messages += [*news, message]
                self.calls, self.thought = answer.calls, answer.thought

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "tgi",  # the base model, whatever its name
            "messages": messages,
            "stream": True,
            "temperature": self.options.temperature,
        }
        if self.options.max_tokens is not None:
            body["max_tokens"] = self.options.max_tokens
        if self.tools:
            body["tools"] = self.tools
        if self.thinking is not None:  # templates have the switch under one of these names
            names = ("enable_thinking", "thinking")
            body["chat_template_kwargs"] = dict.fromkeys(names, self.thinking)
        return body


def _read_attachment(path: Path) -> bytes:
    """Return the bytes of a file. Raises OSError, also for an empty one."""
    content = read_file(path, LARGEST)
    if not content:
        raise OSError(errno.ENODATA, "it is empty", str(path))
    return content


def _result(call: Call, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def _message(event: dict[str, Any]) -> str:
    error = event["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
