"""`chat`: a conversation with a model in the terminal, with history, thoughts and tools."""

from __future__ import annotations

import os
import signal
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, TextIO

import orjson
import trio

from tgi_trio.cli.conversation import Conversation, Piece
from tgi_trio.cli.options import BatchOptions, BenchOptions, ChatOptions
from tgi_trio.cli.own_server import run_own_server
from tgi_trio.client.address import parse_address
from tgi_trio.client.http import Client, HTTPFailure
from tgi_trio.errors import ConfigurationError, GenerationError, tell_reason
from tgi_trio.whole_files import read_file

Interrupts = AsyncIterator[int]  # yields at each Ctrl-C

HELP: Final = (
    "/reset forgets the conversation, /system TEXT sets the system message, /thoughts shows or "
    "folds what the model thinks, /think on|off|auto asks it to, /image FILE shows one with what "
    "you say next, /audio FILE plays one, /quit leaves"
)
_PARTS: Final = {"/image": "image_url", "/audio": "audio_url"}
_THINKING: Final = {"on": True, "off": False, "auto": None}
# What moves a terminal's cursor, sets its title or the clipboard is shown as an escape.
_CONTROLS: Final = {
    code: "" if chr(code) == "\r" else f"\\x{code:02x}"
    for code in (*range(32), *range(127, 160))
    if chr(code) not in "\t\n"
}
_DIM, _PLAIN = "\x1b[2m", "\x1b[22m"


@asynccontextmanager
async def open_client(options: ChatOptions | BenchOptions | BatchOptions) -> AsyncGenerator[Client]:
    """Yield a client of the server at `--url`, or of one that is started for the block."""
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
            address = await stack.enter_async_context(run_own_server(flags))
        yield Client(address, options.api_key or "")


async def read_info(client: Client) -> dict[str, Any]:
    """Return a server's /info.

    Raises OSError if nothing answers, and ConfigurationError if it is no server of TGI's API.
    """
    try:
        info = await client.get("/info")
    except HTTPFailure as error:
        why = str(error)
    except trio.BrokenResourceError as error:
        cause = error.__cause__ or error
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise ConfigurationError(
                f"{client.address} shows a certificate that is not trusted here: "
                f"{cause.verify_message}. The variable SSL_CERT_FILE names a file of those that are"
            ) from error
        why = f"it does not speak {'HTTPS' if client.address.tls else 'HTTP'} ({cause})"
    except ValueError:
        why = "that is no JSON"
    else:
        if isinstance(info, dict) and "model_id" in info:
            return info
        why = "that names no `model_id`"
    raise ConfigurationError(
        f"{client.address} has no /info of a server of TGI's API: {why}. --url takes the server's "
        "own address, such as http://localhost:3000, without /v1"
    )


def read_tools(path: Path) -> list[Any]:
    """Return the tools in the file of `--tools`. Raises ConfigurationError."""
    try:
        tools = orjson.loads(read_file(path))
    except OSError as error:
        raise ConfigurationError(f"--tools {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"--tools {path} is no JSON: {error}") from error
    if not isinstance(tools, list):
        raise ConfigurationError(f"--tools {path} must hold a JSON list of tools, as in the API")
    return tools


@dataclass
class Terminal:
    """Shows answers; thoughts are dimmed, and folded into one line unless they are to be shown."""

    output: TextIO
    color: bool
    shows_thoughts: bool = False
    _thinks: bool = False  # the last piece shown was a thought

    def show(self, piece: Piece) -> None:
        """Show the next piece of an answer."""
        if not piece.thought:
            self.end_thought()
            self._write(self._clean(piece.text))
            return
        if not self._thinks:
            self._thinks = True
            if not self.shows_thoughts:
                self._write(self._dim("[thinks; /thoughts shows it]"))
        if self.shows_thoughts:
            self._write(self._dim(piece.text))

    def end_thought(self) -> None:
        """Begin a new line after a thought, if one was shown."""
        if self._thinks:
            self._write("\n")
        self._thinks = False

    def show_thought(self, thought: str) -> None:
        """Show a whole thought."""
        if thought:
            self._write(self._dim(thought.strip()) + "\n")

    def show_line(self, text: str) -> None:
        """Show what a server says of itself, or of an answer."""
        self._write(self._clean(text) + "\n")

    def _dim(self, text: str) -> str:
        return f"{_DIM}{self._clean(text)}{_PLAIN}" if self.color else self._clean(text)

    def _clean(self, text: str) -> str:
        """Return a server's text as it may be shown; of a pipe or a file nothing is changed."""
        return text.translate(_CONTROLS) if self.output.isatty() else text

    def _write(self, text: str) -> None:
        print(text, end="", file=self.output, flush=True)


def run_chat(options: ChatOptions) -> int:
    """Have a conversation at the terminal; the exit code is 0. Raises as `chat` does."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # of bytes or letters beyond their encoding
    trio.run(chat, options, sys.stdin, sys.stdout)
    return 0


async def chat(options: ChatOptions, lines: TextIO, output: TextIO) -> None:
    """Read lines until the end of input or /quit; Ctrl-C interrupts an answer.

    Raises ShardCannotStart if the server of our own does not start, OSError if the server at
    `--url` cannot be reached, ConfigurationError for invalid tools and what is no such server.
    """
    tools = read_tools(options.tools) if options.tools is not None else []
    color = options.color and output.isatty() and not os.environ.get("NO_COLOR")
    async with open_client(options) as client:
        served = (await read_info(client))["model_id"]
        terminal = Terminal(output, color)
        terminal.show_line(f"{served} at {client.address}. {HELP}.")
        conversation = Conversation(client, options, tools)
        conversation.reset()
        with trio.open_signal_receiver(signal.SIGINT) as interrupts:
            await _Chat(conversation, terminal, lines, interrupts).run()


@dataclass
class _Chat:
    """One run of the command."""

    conversation: Conversation
    terminal: Terminal
    lines: TextIO
    interrupts: Interrupts

    async def run(self) -> None:
        """Read lines and answer them."""
        while (line := await self._next_line("> ")) is not None:
            command, _, rest = line.partition(" ")
            if command == "/quit":
                return
            if command.startswith("/"):
                self._obey(command, rest)
            elif line:
                await self._show(self.conversation.say(line))
                if not await self._give_results():
                    return

    def _obey(self, command: str, rest: str) -> None:
        conversation, terminal = self.conversation, self.terminal
        if command in ("/reset", "/system"):
            conversation.reset(rest if command == "/system" else None)
        elif command == "/thoughts":
            terminal.shows_thoughts = not terminal.shows_thoughts
            if terminal.shows_thoughts:
                terminal.show_thought(conversation.thought)
        elif command == "/think" and rest in _THINKING:
            conversation.thinking = _THINKING[rest]
        elif command in _PARTS and rest:
            self._attach(Path(rest).expanduser(), _PARTS[command])
        else:
            print(HELP, file=terminal.output)

    def _attach(self, path: Path, part: str) -> None:
        try:
            self.conversation.attach(path, part)
        except OSError as error:
            print(f"[{path} cannot be read: {error.strerror}]", file=self.terminal.output)
        else:
            print(f"[{path.name} goes with what you say next]", file=self.terminal.output)

    async def _give_results(self) -> bool:
        """Ask for the results of calls as long as there are any; False at the end of input."""
        while calls := self.conversation.calls:
            results = []
            for call in calls:
                self.terminal.show_line(f"{call.name} {call.arguments}")
                line = await self._next_line("result> ")
                if line is None:
                    return False
                results.append(line)
            await self._show(self.conversation.give_results(results))
            if self.conversation.calls is calls:  # it failed, and another message may follow
                return True
        return True

    async def _next_line(self, prompt: str) -> str | None:
        """Return the next line; None at the end of input or if Ctrl-C comes first."""
        text = ""
        print(prompt, end="", file=self.terminal.output, flush=True)
        async with _cancel_at(self.interrupts):
            # A thread that still waits for a line is abandoned, as it cannot be interrupted.
            text = await trio.to_thread.run_sync(self.lines.readline, abandon_on_cancel=True)
        if not text:
            print(file=self.terminal.output)
        return text.strip() if text else None

    async def _show(self, answer: AsyncGenerator[Piece]) -> None:
        """Print an answer as it arrives; Ctrl-C interrupts it, errors are printed."""
        failed = ""
        async with _cancel_at(self.interrupts):
            try:
                async with aclosing(answer) as pieces:
                    async for piece in pieces:
                        self.terminal.show(piece)
            except BrokenPipeError:  # our own reader has left, not the server
                raise
            except (HTTPFailure, GenerationError, OSError, trio.BrokenResourceError) as error:
                failed = f"[{tell_reason(error)}]"
        self.terminal.end_thought()
        self.terminal.show_line(failed)


@asynccontextmanager
async def _cancel_at(interrupts: Interrupts) -> AsyncGenerator[None]:
    """Cancel only the block at Ctrl-C; an OSError of the block leaves it as it is, in no group."""

    async def wait(scope: trio.CancelScope) -> None:
        async for _ in interrupts:
            scope.cancel()
            return

    failure: OSError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, nursery.cancel_scope)
        try:
            yield
        except OSError as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
