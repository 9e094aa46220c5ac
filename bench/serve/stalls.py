"""How long the router's loop stands still: the longest turn under requests that are large or many.

    python -m bench.serve.stalls --json bench/out/stalls.json

A turn is what the loop does between two looks at its sockets: for so long no token of any stream is
passed on. Everything is real but the model, whose steps take no time. Of each turn the processor
time of the loop's thread counts, so that a busy machine is not taken for a slow server; the wall
clock's stands beside it, and for how long another thread held the interpreter when the loop wanted
to go on. The floor is the same server with one short request after the other.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import trio
from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import serving
from bench.images.asking import post
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.demo import model_path
from tgi_trio.testing.ports import reserve_port

BLOCK: Final = 16  # tokens
GOAL_MS: Final = 5.0  # of a turn

Result = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large and how many the requests are."""

    tokens: int  # of a long prompt
    requests: int  # at a time
    blocks: int  # of cached prefixes
    body: int  # bytes
    idle: float  # seconds in which prefixes are kept


@dataclass
class Asking:
    """Asks one server, and notes when each thing was asked."""

    client: Client
    sizes: Sizes
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # name, from, to
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    async def time(self, name: str, ask: Callable[[], Awaitable[Any]]) -> None:
        """Do what `ask` does, as a row of the table."""
        began = time.monotonic()
        await ask()
        await trio.sleep(0.2)  # what it leaves behind belongs to it
        self.spans.append((name, began, time.monotonic()))

    async def complete(self, prompt: Any, new: int = 1) -> None:
        """Have a prompt, a text or ids, completed. Raises RuntimeError if that is refused."""
        body = {"model": "tgi", "prompt": prompt, "max_tokens": new, "ignore_eos": True}
        status, answer = await post(self.client, "/v1/completions", orjson.dumps(body))
        if status != 200:
            raise RuntimeError(f"{status}: {answer[:300]!r}")

    def ids(self, count: int) -> list[int]:
        """Return ids of a prompt that no other has."""
        return self.draw.choices(range(100, 2000), k=count)

    async def short_ones(self) -> None:
        for _ in range(20):
            await self.complete("hello")

    async def cached_prefixes(self) -> None:
        """Fill the cache with prompts of few blocks each."""
        each = 8 * BLOCK + 1
        limit = trio.CapacityLimiter(64)

        async def one() -> None:
            async with limit:
                await self.complete(self.ids(each))

        async with trio.open_nursery() as nursery:
            for _ in range(self.sizes.blocks // 8):
                nursery.start_soon(one)

    async def many(
        self, *, leave: bool, timeout: float | None = None, stream: bool = False
    ) -> None:
        """Have many requests at a time; they `leave` while most are queued, or run to their end."""
        unended = leave or timeout is not None
        new = self.sizes.tokens if unended else 64
        body: Result = {"model": "tgi", "prompt": self.ids(64), "max_tokens": new}
        body |= {"ignore_eos": True, "timeout": timeout, "stream": stream}
        data = orjson.dumps(body)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for _ in range(self.sizes.requests):
                    nursery.start_soon(post, self.client, "/v1/completions", data)
                if leave:
                    await trio.sleep(2)
                    scope.cancel()

    async def large_body(self) -> None:
        """Send a chat of many short messages, which is refused or not: it has to be read."""
        message = {"role": "user", "content": "a few words of a chat"}
        messages = [message] * (self.sizes.body // len(orjson.dumps(message)))
        body = orjson.dumps({"model": "tgi", "messages": messages, "max_tokens": 1})
        await post(self.client, "/v1/chat/completions", body)

    async def large_tools(self) -> None:
        """Send a chat with as many tools as the body has room for, each of a name alone."""
        function = {"type": "function", "function": {"name": "tool_00000"}}
        tools = [
            {**function, "function": {"name": f"tool_{i:05}"}}
            for i in range(self.sizes.body // (len(orjson.dumps(function)) + 1))
        ]
        message = {"role": "user", "content": "hello"}
        body = {"model": "tgi", "messages": [message], "tools": tools, "max_tokens": 1}
        await post(self.client, "/v1/chat/completions", orjson.dumps(body))

    async def large_bodies(self) -> None:
        """Send eight of such chats at a time."""
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(self.large_body)

    async def large_text(self) -> None:
        body = orjson.dumps({"inputs": "word " * (self.sizes.body // 5)})
        await post(self.client, "/generate", body)

    async def pages(self) -> None:
        for path in ("/metrics", "/v1/models", "/info", "/api-doc/openapi.json", "/health"):
            stream = await trio.open_tcp_stream(self.client.address.host, self.client.address.port)
            async with stream:
                await stream.send_all(
                    f"GET {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n".encode()
                )
                async for _ in stream:
                    pass

    async def idle(self) -> None:
        """Wait until prefixes have been kept."""
        await trio.sleep(self.sizes.idle)


def list_rows(asking: Asking) -> list[tuple[str, Callable[[], Awaitable[Any]]]]:
    """Return what is asked, in the order of the table."""
    sizes = asking.sizes
    long_ids, text = asking.ids(sizes.tokens), "word " * (sizes.tokens // 2)
    return [
        ("short requests, the floor", asking.short_ones),
        ("a long prompt, as text", partial(asking.complete, text)),
        ("a long prompt, as ids", partial(asking.complete, long_ids)),
        ("the same again", partial(asking.complete, long_ids)),
        ("a large body of text", asking.large_text),
        ("a large body of messages", asking.large_body),
        ("a large body of tools", asking.large_tools),
        ("many requests", partial(asking.many, leave=False)),
        ("many that leave", partial(asking.many, leave=True)),
        ("many streams that leave", partial(asking.many, leave=True, stream=True)),
        ("many whose deadline passes", partial(asking.many, leave=False, timeout=2.0)),
        ("many chats at a time", asking.large_bodies),
        ("many cached prefixes", asking.cached_prefixes),
        ("pages", asking.pages),
        ("prefixes are kept", asking.idle),
        ("a long prompt in their place", partial(asking.complete, asking.ids(sizes.tokens))),
        ("others in its place", asking.cached_prefixes),
    ]


async def ask_all(asking: Asking) -> None:
    for name, ask in tqdm(list_rows(asking), desc="rows", leave=False):
        await asking.time(name, ask)


@contextmanager
def watched(sizes: Sizes, folder: Path) -> Iterator[tuple[Client, Path]]:
    """Serve a fake model that takes long prompts; yields a client, and the file for its turns."""
    model = folder / "model"
    shutil.copytree(model_path(), model)
    config = json.loads((model / "config.json").read_text())
    longest = 2 * max(sizes.tokens, 1024)
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": longest}))
    fake = {"blocks": 1 + max(sizes.blocks, sizes.tokens // BLOCK + 64), "verify_kv": False}
    turns = folder / "turns.npy"
    flags = {
        "model-id": model,
        "max-total-tokens": sizes.tokens + 1024,
        "max-batch-prefill-tokens": min(4096, sizes.tokens),
        "max-concurrent-requests": sizes.requests + 16,
        "max-batch-size": 64,
        "payload-limit": 2 * sizes.body + 16 * sizes.tokens,
        "max-grammar-bytes": 2**16 + 2 * sizes.body,
        "prefix-cache-path": folder / "kept",
        "prefix-cache-save-seconds": 1,
    }
    command: list[str | Path] = [
        *(sys.executable, "-m", "bench.serve.watched_fake", turns, json.dumps(fake)),
        *("--hostname", "127.0.0.1"),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    with (
        reserve_port() as port,
        serving([*command, f"--port={port}"], port, output=subprocess.DEVNULL) as server,
    ):
        yield Client(Address(server.host, server.port)), turns


def measure(sizes: Sizes, results: list[Result]) -> None:
    """Run everything once; adds a row for each to `results`."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        client, file = stack.enter_context(watched(sizes, Path(name)))
        asking = Asking(client, sizes)
        try:
            trio.run(ask_all, asking)
        finally:
            stack.close()  # turns are written at the end
            if file.exists():
                results += [row_of(*span, np.load(file)) for span in asking.spans]


def row_of(name: str, began: float, ended: float, turns: np.ndarray[Any, Any]) -> Result:
    """Return the longest turns of a span.

    `turns` [n, 4], in seconds: end, wall, processor, and held by other threads before.
    """
    own = turns[(turns[:, 0] >= began) & (turns[:, 0] <= ended)]
    if not len(own):
        return {"what": name, "turns": 0, "longest_ms": 0.0, "wall_ms": 0.0, "held_ms": 0.0}
    longest = own[own[:, 2].argmax()] * 1e3
    over = int((own[:, 2] * 1e3 > GOAL_MS).sum())
    figures = {"longest_ms": round(longest[2], 2), "wall_ms": round(longest[1], 2)}
    figures |= {"held_ms": round(own[:, 3].max() * 1e3, 2)}
    return {"what": name, "turns": len(own), **figures, f"over {GOAL_MS:g} ms": over}


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of a long prompt")
    parser.add_argument("--requests", type=int, default=4000, help="at a time")
    parser.add_argument("--blocks", type=int, default=100_000, help="of cached prefixes")
    parser.add_argument("--body", type=int, default=10_000_000, help="bytes")
    parser.add_argument("--idle", type=float, default=8.0, help="seconds to keep prefixes in")
    stats.add_output_flags(parser)
    args = parser.parse_args()
    sizes = Sizes(args.tokens, args.requests, args.blocks, args.body, args.idle)
    results: list[Result] = []
    with stats.reporting(
        args.json, "serve.stalls", lambda: (stats.table_of(results), {"results": results})
    ):
        measure(sizes, results)


if __name__ == "__main__":
    main()
