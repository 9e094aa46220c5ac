"""Load generation: a number of concurrent clients (closed loop), or an arrival rate (open loop).

In a closed loop, each client sends its next request when its last has ended. In an open loop,
requests arrive as a Poisson process, whatever is still running, as from people.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Literal

import trio

from tgi_trio.client.http import Client, HTTPFailure
from tgi_trio.client.measures import RequestRecord, summarise

WORDS: Final = (
    "the server reads a request and the shard computes a step while streams go on and a client "
    "waits for the next token of an answer about blocks queues rings and memory"
).split()


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of a load."""

    requests: int
    words: int  # of the prompt
    max_tokens: int  # of the answer, which no end-of-sequence token ends
    seed: int = 0  # of the prompts and the arrivals
    whole: Mapping[str, Any] | None = None  # fields for other servers that ask for all tokens


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive."""

    kind: Literal["closed", "open"]
    level: float  # closed: clients; open: requests a second

    def __str__(self) -> str:
        return f"{self.kind} {self.level:g}"


def prompt(rng: random.Random, words: int) -> str:
    """Return a prompt of `words` random words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def send_request(
    client: Client,
    text: str,
    max_tokens: int,
    whole: Mapping[str, Any] | None = None,
    on_event: Callable[[], object] = lambda: None,
) -> RequestRecord:
    """Stream one completion and record when each token arrives; a failure is in the record.

    `whole`: fields that make the answer have all its tokens; by default ours, which are also
    vLLM's. Each event counts as a token, unless the server reports usage, since some send several
    tokens in an event. `on_event` is called at each event.
    """
    record = RequestRecord(start=trio.current_time(), events=[])
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "min_tokens": max_tokens} if whole is None else whole
    used = None
    try:
        async with aclosing(client.events("/v1/completions", body)) as events:
            async for at, event in events:
                if "error" in event:
                    record.error = str(event["error"])[:200]
                    break
                used = event.get("usage") or used
                if event.get("choices"):  # empty in an event that only has the usage
                    record.events.append(at)
                    record.tokens += 1
                    on_event()
    except (HTTPFailure, OSError, trio.BrokenResourceError) as error:
        record.error = f"{type(error).__name__}: {error}"
    if used:
        record.tokens = used["completion_tokens"]
    return record


async def run_load(
    client: Client, load: Load, work: Work, done: Callable[[], object]
) -> list[RequestRecord]:
    """Put a load on the server; return a record per request. `done` is called after each."""
    rng = random.Random(work.seed)
    texts = [prompt(rng, work.words) for _ in range(work.requests)]
    records: list[RequestRecord] = []

    async def run(text: str) -> None:
        records.append(await send_request(client, text, work.max_tokens, work.whole))
        done()

    todo = iter(texts)

    async def run_client() -> None:
        for text in todo:
            await run(text)

    async with trio.open_nursery() as nursery:
        if load.kind == "closed":
            for _ in range(int(load.level)):
                nursery.start_soon(run_client)
        else:
            for text in texts:
                nursery.start_soon(run, text)
                await trio.sleep(rng.expovariate(load.level))
    return records


async def measure(
    client: Client, load: Load, work: Work, done: Callable[[], object]
) -> dict[str, Any]:
    """Return the serving metrics of one load; see `measures.summarise`."""
    start = time.perf_counter()
    records = await run_load(client, load, work, done)
    return {"load": load.kind, "level": load.level} | summarise(
        records, time.perf_counter() - start
    )
