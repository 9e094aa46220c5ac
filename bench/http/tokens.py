"""The tokens that the servers of `bench.http` make up, and the streams that wait for them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

STEP = 0.01  # seconds, when paced
WORDS = (" the", " of", " and", " token", " a", " stream", "ing", ' "quoted"', "\n", " server")


def token_text(step: int, paced: bool) -> str:
    """Return the token of a step; paced it is the step's time, so that clients see its age.

    The time is `time.time`, the clock of the kernel's receive stamps.
    """
    return f"{time.time():.6f}" if paced else WORDS[step % len(WORDS)]


def event(index: int, step: int, text: str) -> bytes:
    """Return one event, as a straightforward server makes it."""
    token = {"id": step % 32000, "text": text, "logprob": -0.25, "special": False}
    data = {"index": index, "token": token, "generated_text": None, "details": None}
    return b"data: " + orjson.dumps(data) + b"\n\n"


def max_new_tokens(body: bytes | str) -> int:
    """Return how many tokens a request asks for."""
    return int(orjson.loads(body)["parameters"]["max_new_tokens"])


class Streams:
    """The live streams of a peer's engine: tokens waiting to be sent, and who waits for them."""

    def __init__(self, make_event: Callable[[], Any], paced: bool) -> None:
        self._make_event = make_event  # trio.Event or asyncio.Event
        self._paced = paced
        self._entries: dict[int, list[Any]] = {}  # id -> [tokens, event]

    @property
    def behind(self) -> bool:
        """Whether a stream has not sent its last token yet."""
        return any(tokens for tokens, _ in self._entries.values())

    def __bool__(self) -> bool:
        return bool(self._entries)

    def step(self, step: int) -> None:
        """Give every stream a token."""
        text = token_text(step, self._paced)
        for entry in list(self._entries.values()):
            entry[0].append((step, text))
            entry[1].set()

    async def events(self, count: int) -> AsyncIterator[bytes]:
        """Yield a stream's events, all that are there in one piece."""
        entry: list[Any] = [[], self._make_event()]
        self._entries[id(entry)] = entry
        sent = 0
        try:
            while sent < count:
                await entry[1].wait()
                entry[1] = self._make_event()
                ready, entry[0] = entry[0][: count - sent], []
                chunk = [event(sent + i + 1, step, text) for i, (step, text) in enumerate(ready)]
                sent += len(ready)
                yield b"".join(chunk)
        finally:
            del self._entries[id(entry)]
