"""Streaming requests against a server under test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import orjson

TIMEOUT = httpx.Timeout(240.0)  # seconds; the machine may be busy


def decode(line: str) -> dict[str, Any] | None:
    """Return the event of one SSE line; None for anything else."""
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    return None if data == "[DONE]" else orjson.loads(data)


def generate(url: str, prompt: str, **parameters: Any) -> dict[str, Any]:
    """POST /generate and return the body; raises for an error status."""
    body = {"inputs": prompt, "parameters": parameters}
    response = httpx.post(f"{url}/generate", json=body, timeout=TIMEOUT)
    response.raise_for_status()
    return dict(response.json())


async def stream(
    client: httpx.AsyncClient, url: str, prompt: str, **parameters: Any
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of /generate_stream."""
    body = {"inputs": prompt, "parameters": parameters}
    async with client.stream("POST", f"{url}/generate_stream", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if (event := decode(line)) is not None:
                yield event


def chat_events(url: str, content: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed chat completion."""
    body = {"messages": [{"role": "user", "content": content}], "stream": True, **fields}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT) as reply:
        for line in reply.iter_lines():
            if (event := decode(line)) is not None:
                yield event
