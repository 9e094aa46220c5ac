"""`chat`: talk with a model in the terminal, word by word, with history."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

import trio

from tgi_trio.cli.options import BenchOptions, ChatOptions
from tgi_trio.cli.own_server import own_server
from tgi_trio.client.address import parse_address
from tgi_trio.client.http import Client, HTTPFailure
from tgi_trio.errors import GenerationError

Interrupts = AsyncIterator[int]  # yields at each Ctrl-C

HELP: Final = "/reset forgets the conversation, /system TEXT sets the system message, /quit leaves"


@asynccontextmanager
async def client_for(options: ChatOptions | BenchOptions) -> AsyncGenerator[Client]:
    """Yield a client of the server of `--url`, or of one that is started for the block."""
    async with AsyncExitStack() as stack:
        if options.url is not None:
            address = parse_address(options.url)
        else:
            flags = [
                word
                for name in ("model_id", "dtype")
                if (value := getattr(options, name)) is not None
                for word in (f"--{name.replace('_', '-')}", value)
            ]
            print("starting a server ...", file=sys.stderr)
            address = await stack.enter_async_context(own_server(flags))
        yield Client(address, options.api_key or "")


@dataclass
class Conversation:
    """The messages so far, and how the next answer is asked for."""

    client: Client
    options: ChatOptions
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self, system: str | None = None) -> None:
        """Begin anew; the system message stays unless another is given."""
        text = system if system is not None else self.options.system
        self.messages = [{"role": "system", "content": text}] if text else []

    async def answer(self, text: str) -> AsyncGenerator[str]:
        """Say `text` and yield the pieces of the answer; both become part of the history.

        An answer that is broken off leaves what was heard of it; one that failed leaves nothing.
        Raises GenerationError for an error event, and what `Client.events` raises.
        """
        self.messages.append({"role": "user", "content": text})
        body = {
            "model": "tgi",  # the base model, whatever its name
            "messages": self.messages,
            "stream": True,
            "max_tokens": self.options.max_tokens,
            "temperature": self.options.temperature,
        }
        heard: list[str] = []
        try:
            async with aclosing(self.client.events("/v1/chat/completions", body)) as events:
                async for _, event in events:
                    if "error" in event:
                        raise GenerationError(_message(event))
                    for choice in event.get("choices", ()):
                        if piece := choice["delta"].get("content"):
                            heard.append(piece)
                            yield piece
        finally:
            if heard:
                self.messages.append({"role": "assistant", "content": "".join(heard)})
            else:
                self.messages.pop()


def _message(event: dict[str, Any]) -> str:
    error = event["error"]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


async def chat(options: ChatOptions, lines: TextIO, output: TextIO) -> None:
    """Read lines until the end of input or /quit; Ctrl-C breaks off an answer.

    Raises ShardCannotStart when the server of our own does not start, OSError when the one of
    `--url` cannot be reached.
    """
    async with client_for(options) as client:
        served = (await client.get("/info"))["model_id"]
        print(f"{served} at {client.address}. {HELP}.", file=output)
        conversation = Conversation(client, options)
        conversation.reset()
        with trio.open_signal_receiver(signal.SIGINT) as interrupts:
            while (line := await _next_line(lines, output, interrupts)) is not None:
                command, _, rest = line.partition(" ")
                if command == "/quit":
                    return
                if command in ("/reset", "/system"):
                    conversation.reset(rest if command == "/system" else None)
                elif command.startswith("/"):
                    print(HELP, file=output)
                elif line:
                    await _say(conversation, line, output, interrupts)


async def _next_line(lines: TextIO, output: TextIO, interrupts: Interrupts) -> str | None:
    """Return the next line, None at the end of input or when Ctrl-C comes first."""
    text = ""
    print("> ", end="", file=output, flush=True)
    async with _cancel_at(interrupts):
        # A thread that still waits for a line is left behind: nobody can interrupt it.
        text = await trio.to_thread.run_sync(lines.readline, abandon_on_cancel=True)
    if not text:
        print(file=output)
    return text.strip() if text else None


async def _say(
    conversation: Conversation, text: str, output: TextIO, interrupts: Interrupts
) -> None:
    """Print one answer as it comes; Ctrl-C breaks it off, a failure is told and survived."""
    async with _cancel_at(interrupts):
        try:
            async with aclosing(conversation.answer(text)) as pieces:
                async for piece in pieces:
                    print(piece, end="", file=output, flush=True)
        except (HTTPFailure, GenerationError, OSError, trio.BrokenResourceError) as error:
            print(f"[{error}]", end="", file=output)
    print(file=output)


@asynccontextmanager
async def _cancel_at(interrupts: Interrupts) -> AsyncGenerator[None]:
    """Cancel the block at Ctrl-C, and only the block."""

    async def wait(scope: trio.CancelScope) -> None:
        async for _ in interrupts:
            scope.cancel()
            return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, nursery.cancel_scope)
        yield
        nursery.cancel_scope.cancel()
