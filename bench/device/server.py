"""The whole server over a bare step of the same model, and over a device that breaks."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import trio
from tokenizers import Tokenizer

from bench.device.random_server import write_folder
from bench.harness.server import Server, serving
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import Load, Work, measure, prompt
from tgi_trio.testing.ports import held_port

_START_S: Final = 120.0
_BROKEN_STREAMS: Final = 8
_BREAK_AT: Final = 40  # steps; the warm-up launches none
_TOLD: Final = 8192  # bytes of what a server said that has failed


def measure_server(
    shape: str, folder: Path, clients: int, context: int, tokens: int, flags: list[str]
) -> dict[str, Any]:
    """Serve a shape with random weights to `clients` that each want `tokens`; return the figures.

    Prompts are such that sequences have `context` tokens on the average, as those of bare steps.
    """
    with _serving(shape, folder, {}, flags) as server:
        client, load = Client(Address(server.host, server.port)), Load("closed", clients)
        words = count_words(folder, max(8, context - tokens // 2))
        trio.run(measure, client, load, Work(clients, words, 4), lambda: None)
        found = trio.run(measure, client, load, Work(2 * clients, words, tokens), lambda: None)
    return {
        "what": f"server, {clients} clients",
        "ready_s": server.ready_s,
        "step_ms": found["itl_ms"]["p50"],
        "ttft_ms": found["ttft_ms"]["p50"],
        "tokens_per_s": found["output_tokens_per_s"],
        "errors": found["errors"],
    }


def measure_break(shape: str, folder: Path, tokens: int, flags: list[str]) -> dict[str, Any]:
    """Have the device of a shard break under streams; return how many got all their tokens."""
    (folder / "broken").unlink(missing_ok=True)
    options = {"break_at": min(_BREAK_AT, tokens), "broken": str(folder / "broken")}
    with _serving(shape, folder, options, flags) as server:
        client, load = Client(Address(server.host, server.port)), Load("closed", _BROKEN_STREAMS)
        work = Work(_BROKEN_STREAMS, 8, tokens)
        found = trio.run(measure, client, load, work, lambda: None)
    whole = found["output_tokens"] == _BROKEN_STREAMS * tokens
    return {
        "what": "a device that breaks under streams",
        "broken": (folder / "broken").exists(),
        "streams": _BROKEN_STREAMS,
        "completed": found["completed"] if whole else 0,
        "errors": found["errors"],
        "step_ms": found["itl_ms"]["p99_9"],  # that of the restart
    }


def count_words(folder: Path, tokens: int) -> int:
    """Return how many words a prompt of about `tokens` tokens has."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = 200
    each = len(tokenizer.encode(prompt(random.Random(0), words)).ids) / words
    return max(1, round(tokens / each))


@contextmanager
def _serving(
    shape: str, folder: Path, options: dict[str, Any], flags: list[str]
) -> Iterator[Server]:
    """Serve a shape on a port of its own."""
    write_folder(shape, folder)
    told = json.dumps({"shape": shape} | options)
    argv = [sys.executable, "-m", "bench.device.random_server", told, "--model-id", str(folder)]
    with held_port() as port, (folder / "log.txt").open("w+b") as log:
        command = [*argv, "--hostname", "127.0.0.1", "--port", str(port), *flags]
        try:
            with serving(command, port, output=log, timeout=_START_S) as server:
                yield server
        except BaseException:
            log.seek(0)
            print(log.read()[-_TOLD:].decode(errors="replace"), file=sys.stderr)
            raise
